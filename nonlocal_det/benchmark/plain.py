"""The block as the plain matrix formulation of its equations: what its cost is compared with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nonlocal_det.layers import NonLocalBlock


def plain_block(block: NonLocalBlock, x: Tensor) -> Tensor:
    """Eq. 6 with y = f g / C(x), where f is the whole N x M matrix of Eq. 2 to 5 and autograd keeps it.

    It reads the weights of a two-dimensional block without a norm, and uses none of its code. It is written
    to cost no more than the formulation must: the logits are scaled before they are a matrix, C(x) = M
    divides y and not f, and Eq. 5 holds ReLU(a_i + b_j) and not the concatenated vectors.
    x and what is returned, z, are [B, C, H, W].
    """
    pooled = F.max_pool2d(x, 2) if block.pool == "input" else x
    theta, phi, g = x, pooled, _conv(block.g, pooled)
    if block.pairwise != "gaussian":
        theta, phi = _conv(block.theta, x), _conv(block.phi, pooled)
    if block.pool == "embedding":
        phi, g = F.max_pool2d(phi, 2), F.max_pool2d(g, 2)
    theta, phi, g = theta.flatten(2).transpose(1, 2), phi.flatten(2), g.flatten(2)

    if block.pairwise == "concatenation":
        w_theta, w_phi = block.w_f.weight[0].chunk(2)
        f = torch.relu((theta @ w_theta)[:, :, None] + (w_phi @ phi)[:, None, :])
    elif block.pairwise == "dot_product":
        f = theta @ phi
    else:
        f = torch.softmax((theta * block.logit_scale) @ phi, dim=2)  # C(x) = sum_j f
    y = g @ f.transpose(1, 2)
    if block.pairwise in ("concatenation", "dot_product"):
        y = y / f.shape[2]
    return _conv(block.w_z, y.view(*y.shape[:2], *x.shape[2:])) + x


def _conv(layer: torch.nn.Conv2d, x: Tensor) -> Tensor:
    return F.conv2d(x, layer.weight, layer.bias)
