"""Forms of Eq. 1 that never hold the N x M matrix, as autograd functions.

Both are exact: they order the sums of Eq. 1 differently and approximate nothing. A second derivative raises.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from .precision import full_precision

_MIN_ROWS = 256  # with fewer rows the matrix products are slower, whatever the byte limit


class ChunkedGaussian(Function):
    """Softmax attention (Eq. 2, Eq. 3) over chunks of queries: theta [B, D, N], phi [B, D, M], g [B, V, M].

    The forward pass keeps the weights of the first chunks, up to `keep_bytes`; the backward pass computes the
    others again. So the extra memory is bounded, at the cost of at most one more matrix product than the
    matrix form's six.
    """

    @staticmethod
    def forward(
        ctx: Any, theta: Tensor, phi: Tensor, g: Tensor, scale: float, chunk_bytes: int, keep_bytes: int
    ) -> Tensor:
        """Return y [B, V, N]."""
        chunks = _chunks(theta, phi, chunk_bytes)
        y = g.new_empty(g.shape[0], g.shape[1], theta.shape[2])
        scratch = _Scratch(chunks, phi)
        kept: list[Tensor] = []
        for samples, rows in chunks:
            logits = scratch(0, samples, rows)
            keep_bytes -= logits.numel() * logits.element_size()
            weights = torch.empty_like(logits) if keep_bytes >= 0 else scratch(1, samples, rows)
            if keep_bytes >= 0:
                kept.append(weights)
            _weights(theta[samples, :, rows], phi[samples], scale, logits, weights)
            torch.bmm(g[samples], weights.transpose(1, 2), out=y[samples, :, rows])
        ctx.save_for_backward(theta, phi, g, *kept)
        ctx.scale, ctx.chunk_bytes = scale, chunk_bytes
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of theta, phi and g, of dy [B, V, N]."""
        theta, phi, g, *kept = ctx.saved_tensors
        need_theta, need_phi, need_g = ctx.needs_input_grad[:3]
        dy = dy.contiguous()
        dtheta = torch.empty_like(theta, memory_format=torch.contiguous_format) if need_theta else None
        dphi = torch.zeros_like(phi, memory_format=torch.contiguous_format) if need_phi else None
        dg = torch.zeros_like(g, memory_format=torch.contiguous_format) if need_g else None
        chunks = _chunks(theta, phi, ctx.chunk_bytes)
        scratch = _Scratch(chunks, phi)
        with full_precision(dy.device):
            for index, (samples, rows) in enumerate(chunks):
                q, dy_rows = theta[samples, :, rows], dy[samples, :, rows]
                if index < len(kept):
                    weights = kept[index]
                else:
                    weights = scratch(1, samples, rows)
                    _weights(q, phi[samples], ctx.scale, scratch(0, samples, rows), weights)
                if dg is not None:
                    dg[samples].baddbmm_(dy_rows, weights)
                if dtheta is None and dphi is None:
                    continue
                dweights = torch.bmm(dy_rows.transpose(1, 2), g[samples], out=scratch(0, samples, rows))
                # dlogits = weights * (dweights - sum_j weights * dweights), in one pass.
                dlogits = scratch(2, samples, rows)
                gradient = torch.ops.aten._softmax_backward_data.out
                gradient(dweights, weights, 2, weights.dtype, grad_input=dlogits)
                if dtheta is not None:
                    part = dtheta[samples, :, rows]
                    part.baddbmm_(phi[samples], dlogits.transpose(1, 2), beta=0, alpha=ctx.scale)
                if dphi is not None:
                    dphi[samples].baddbmm_(q, dlogits, alpha=ctx.scale)
        return dtheta, dphi, dg, None, None, None


def _weights(q: Tensor, phi: Tensor, scale: float, logits: Tensor, weights: Tensor) -> None:
    """Write softmax(scale * q^T phi) [b, n, M] to weights, through the scratch space logits."""
    logits.baddbmm_(q.transpose(1, 2), phi, beta=0, alpha=scale)
    torch.softmax(logits, dim=2, out=weights)


def _chunks(theta: Tensor, phi: Tensor, chunk_bytes: int) -> list[tuple[slice, slice]]:
    """Split the B x N queries into (samples, rows) whose weights take about chunk_bytes."""
    batch, _, queries = theta.shape
    row_bytes = phi.shape[2] * phi.element_size()
    rows = max(_MIN_ROWS, chunk_bytes // row_bytes)
    if rows >= queries:
        samples = max(1, chunk_bytes // (queries * row_bytes))
        return [(slice(b, min(b + samples, batch)), slice(0, queries)) for b in range(0, batch, samples)]
    rows = math.ceil(queries / math.ceil(queries / rows))  # equal parts
    parts = [slice(i, min(i + rows, queries)) for i in range(0, queries, rows)]
    return [(slice(b, b + 1), part) for b in range(batch) for part in parts]


class _Scratch:
    """Buffers for the weights of a chunk, used again for every chunk: new memory would cost page faults."""

    def __init__(self, chunks: list[tuple[slice, slice]], phi: Tensor) -> None:
        self._keys = phi.shape[2]
        self._size = max((_length(s) * _length(r) for s, r in chunks), default=0) * self._keys
        self._like = phi
        self._buffers: dict[int, Tensor] = {}

    def __call__(self, name: int, samples: slice, rows: slice) -> Tensor:
        if name not in self._buffers:
            self._buffers[name] = self._like.new_empty(self._size)
        shape = (_length(samples), _length(rows), self._keys)
        return self._buffers[name][: math.prod(shape)].view(shape)


def _length(part: slice) -> int:
    return part.stop - part.start


class SortedConcatenation(Function):
    """Sum of ReLU(a_i + b_j) g_j over j (Eq. 5 without 1 / C(x)) by sorting: a [B, N], b [B, M], g [B, V, M].

    See `sorted_sums`; it is done for blocks of channels. The gradient of g is the same sum with queries and
    keys exchanged.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, g: Tensor, chunk_bytes: int) -> Tensor:
        """Return y [B, V, N]."""
        y = g.new_empty(g.shape[0], g.shape[1], a.shape[1])
        order, count = prefix_order(a, b)
        for part in _channel_parts(a, b, g, chunk_bytes):
            y[:, part] = sorted_sums(a, b, g[:, part], order, count)[0]
        ctx.save_for_backward(a, b, g)
        ctx.chunk_bytes = chunk_bytes
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of a, b and g, of dy [B, V, N]."""
        a, b, g = ctx.saved_tensors
        da, db, dg = torch.zeros_like(a), torch.zeros_like(b), torch.empty_like(g)
        order, count = prefix_order(a, b)
        query_order, query_count = prefix_order(b, a)
        for part in _channel_parts(a, b, g, ctx.chunk_bytes):
            da += (dy[:, part] * prefix_sums(g[:, part], order, count)).sum(dim=1)
            dg[:, part], on = sorted_sums(b, a, dy[:, part], query_order, query_count)
            db += (g[:, part] * on).sum(dim=1)
        return da, db, dg, None


def prefix_order(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the order of keys [B, M] in which those that are on for a query come first, and how many are.

    Key j is on for query i where -b_j < a_i, of a [B, N] and b [B, M]. The values compared are exact, so ties
    (b_j = -a_i, where ReLU and its gradient are 0) are too.
    """
    ascending, order = torch.sort(-b, dim=1, stable=True)
    return order, torch.searchsorted(ascending, a.contiguous())


def prefix_sums(values: Tensor, order: Tensor, count: Tensor) -> Tensor:
    """Return for each query the sum of values [B, V, M] over the keys that are on, [B, V, N]."""
    channels = values.shape[1]
    sums = values.gather(2, order.unsqueeze(1).expand(-1, channels, -1)).cumsum(dim=2)
    return F.pad(sums, [1, 0]).gather(2, count.unsqueeze(1).expand(-1, channels, -1))


def sorted_sums(a: Tensor, b: Tensor, values: Tensor, order: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of ReLU(a_i + b_j) v_j over j, and of v_j over the keys that are on, each [B, V, N].

    The first are a_i * (sum of v_j) + (sum of b_j v_j), both over the keys that are on. Only a_i + b_j
    matters, so both are shifted to where b has mean zero: without that, opposite offsets of a and b cancel
    between the two sums, and fp32 loses them. `order` and `count` are those of `prefix_order`.
    """
    shift = b.mean(dim=1, keepdim=True).detach()
    on = prefix_sums(values, order, count)
    weighted = prefix_sums(values * (b - shift).unsqueeze(1), order, count)
    return weighted + on * (a + shift).unsqueeze(1), on


def _channel_parts(a: Tensor, b: Tensor, g: Tensor, chunk_bytes: int) -> Iterator[slice]:
    """Slices of the channels whose [B, part, N + M] values take about chunk_bytes."""
    step = max(1, chunk_bytes // max(1, (a.numel() + b.numel()) * g.element_size()))
    for start in range(0, g.shape[1], step):
        yield slice(start, min(start + step, g.shape[1]))
