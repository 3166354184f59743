"""Eq. 1 to 6 as loops over positions, in float64: what the layers are compared with.

It reads the parameters of a block by their names and shares no code with the layers. Every step is a plain
torch operation on vectors, so autograd gives the reference gradients too.
"""

import itertools
import math

import torch


def naive_pairwise(name, theta, phi, g, w_f=None, scale=1.0):
    """Eq. 1 by a double loop. theta (N, D), phi (M, D), g (M, V) -> y (N, V)."""
    rows = []
    for i in range(theta.shape[0]):
        logits = []
        for j in range(phi.shape[0]):
            if name == "concatenation":
                logits.append(torch.relu(w_f.reshape(-1) @ torch.cat([theta[i], phi[j]])))
            else:
                logits.append(theta[i] @ phi[j])
        f = torch.stack(logits)
        if name in ("gaussian", "embedded_gaussian"):
            f = torch.exp(f * scale - (f * scale).max().detach())  # the constant cancels in f / C(x)
            c = f.sum()
        else:
            c = phi.shape[0]
        rows.append(sum(f[j] * g[j] for j in range(phi.shape[0])) / c)
    return torch.stack(rows)


def naive_max_pool(x):
    """2x max pool, floor, of the last axis of (C, L), the last two of (C, H, W) and (C, T, H, W)."""
    pooled_axes = (1,) if x.dim() == 2 else (x.dim() - 2, x.dim() - 1)
    step = [min(2, n) if axis in pooled_axes else 1 for axis, n in enumerate(x.shape)]
    out_size = [n // s for n, s in zip(x.shape, step, strict=True)][1:]
    cells = []
    for cell in itertools.product(*map(range, out_size)):
        window = [slice(c * s, c * s + s) for c, s in zip(cell, step[1:], strict=True)]
        cells.append(x[(slice(None), *window)].reshape(x.shape[0], -1).max(dim=1).values)
    return torch.stack(cells, dim=1).reshape(x.shape[0], *out_size)


def naive_norm(name, module, u):
    """Training-mode norm of u (B, C, P) from its definition; weight and bias are the module's."""
    if name == "":
        return u
    batch, channels, positions = u.shape
    if name in ("BN", "SyncBN"):
        mean = u.mean(dim=(0, 2), keepdim=True)
        var = ((u - mean) ** 2).mean(dim=(0, 2), keepdim=True)
        normal = (u - mean) / torch.sqrt(var + 1e-5)
    else:
        groups = 1 if name == "LN" else math.gcd(32, channels)
        parts = u.reshape(batch, groups, -1)
        mean = parts.mean(dim=2, keepdim=True)
        var = ((parts - mean) ** 2).mean(dim=2, keepdim=True)
        normal = ((parts - mean) / torch.sqrt(var + 1e-5)).reshape(batch, channels, positions)
    return normal * module.weight[None, :, None] + module.bias[None, :, None]


def _conv1x1(layer, x):
    """(C, P) -> (P, C_out): a 1x1 convolution is one matrix for every position."""
    weight = layer.weight.reshape(layer.weight.shape[0], -1)
    return torch.stack([weight @ x[:, p] + layer.bias for p in range(x.shape[1])])


def naive_block(block, x, *, pairwise, pool, scale, norm):
    """Eq. 6 for x (B, C, *spatial); the options are given, not read from the block."""
    outputs = []
    for sample in x:
        x_hat = naive_max_pool(sample) if pool == "input" else sample
        grid = x_hat.shape[1:]
        flat, flat_hat = sample.flatten(1), x_hat.flatten(1)
        g = _conv1x1(block.g, flat_hat)
        if pairwise == "gaussian":
            theta, phi = flat.T, flat_hat.T
        else:
            theta, phi = _conv1x1(block.theta, flat), _conv1x1(block.phi, flat_hat)
        if pool == "embedding":
            phi = naive_max_pool(phi.T.reshape(-1, *grid)).flatten(1).T
            g = naive_max_pool(g.T.reshape(-1, *grid)).flatten(1).T
        w_f = block.w_f.weight if pairwise == "concatenation" else None
        y = naive_pairwise(pairwise, theta, phi, g, w_f, theta.shape[1] ** -0.5 if scale else 1.0)
        outputs.append(_conv1x1(block.w_z, y.T).T)
    u = naive_norm(norm, block.w_z.norm, torch.stack(outputs))
    return u.reshape(x.shape) + x


def plain_matrix(name, theta, phi, g, w_f=None, scale=1.0):
    """Eq. 1 with the whole N x M matrix, as people write it: (B, D, N), (B, D, M), (B, V, M) -> (B, V, N)."""
    theta, phi, g = theta.transpose(1, 2), phi.transpose(1, 2), g.transpose(1, 2)
    if name == "concatenation":
        w_theta, w_phi = w_f.reshape(-1).chunk(2)
        f = torch.relu((theta @ w_theta)[:, :, None] + (phi @ w_phi)[:, None, :])
        y = f @ g / g.shape[1]
    elif name == "dot_product":
        y = (theta @ phi.transpose(1, 2)) @ g / g.shape[1]
    else:
        y = torch.softmax((theta * scale) @ phi.transpose(1, 2), dim=-1) @ g
    return y.transpose(1, 2)
