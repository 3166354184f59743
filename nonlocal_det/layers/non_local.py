"""The non-local block (Eq. 6) around the pairwise functions of `pairwise.py`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .norm import build_norm
from .pairwise import (
    PAIRWISE_FUNCTIONS,
    concatenation,
    concatenation_weights,
    dot_product,
    dot_product_weights,
    gaussian,
    gaussian_weights,
)
from .precision import at_least_float, full_precision

POOLS = ("input", "embedding", "none")
INITS = ("msra", "normal")


class _NormMixin:
    """A convolution followed by its norm, with the state keys weight, bias and norm.*."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.jit.is_scripting():  # noqa: SIM108 (TorchScript skips a branch, not half an expression)
            x = self._conv_forward(x, self.weight, self.bias)
        else:
            x = self._convolve(x)
        if self.norm is not None:
            x = self.norm(x)
        return x

    def _convolve(self, x: Tensor) -> Tensor:
        """Keep float32 input in float32: autocast to float16 it might be infinite, and 0 * inf is NaN."""
        with full_precision(x.device) if x.dtype == torch.float32 else nullcontext():
            return self._conv_forward(x.to(self.weight.dtype), self.weight, self.bias)


class _Conv1dNorm(_NormMixin, nn.Conv1d):
    pass


class _Conv2dNorm(_NormMixin, nn.Conv2d):
    pass


class _Conv3dNorm(_NormMixin, nn.Conv3d):
    pass


_CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_CONV_NORMS = {1: _Conv1dNorm, 2: _Conv2dNorm, 3: _Conv3dNorm}


class NonLocalBlock(nn.Module):
    """Non-local block, z_i = W_z y_i + x_i (Eq. 6), y from Eq. 1.

    The order is: 1x1 convolutions `theta`, `phi` (both absent for "gaussian") and `g`, the pairwise function
    (for "concatenation" with `w_f` = Linear(2C', 1, bias=False), the half for theta first), the 1x1
    convolution `w_z`, the norm `w_z.norm` if any, and the sum with x. Nothing follows the sum. The block
    starts as an exact identity: without a norm W_z is zero; with one gamma is zero and W_z is not, so that
    gradients flow (section 4.1).

    Args:
        in_channels: C, channels of x and z.
        inter_channels: C', channels of theta, phi and g. Default: max(1, C // 2), section 3.3.
        ndim: number of spatial axes of x: 1, 2 or 3 (time, height, width).
        pairwise: "embedded_gaussian" (Eq. 3), "gaussian" (Eq. 2), "dot_product" (Eq. 4) or "concatenation"
            (Eq. 5).
        pool: where the keys and values are halved by a 2x max pool (section 3.3): "input" pools x before phi
            and g, "embedding" pools after them, "none" does not pool. 1-D pools its axis, 2-D both, 3-D
            height and width. An odd last row or column is dropped; an axis of length 1 is kept.
        scale: divide the logits of the two Gaussian functions by sqrt(d), d the length of the two vectors
            that are compared: C' when embedded, C when not. The paper has no scale; its authors' code does.
        norm: what follows W_z: "" (nothing), "BN", "SyncBN", "GN", "LN", or a callable that takes the channel
            count and returns a module. Its weight (gamma) is set to zero where it has one; otherwise W_z is.
        init: how theta, phi, g, w_f and, where a norm with a weight follows, W_z start: "msra" (He et al.
            2015, normal, fan-in) or "normal" (standard deviation 0.01). Biases are zero.

    Raises:
        ValueError: an option that is none of these, or a norm that cannot learn (FrozenBN).
    """

    def __init__(
        self,
        in_channels: int,
        inter_channels: int | None = None,
        *,
        ndim: int = 2,
        pairwise: str = "embedded_gaussian",
        pool: str = "input",
        scale: bool = True,
        norm: str | Callable[[int], nn.Module | None] = "",
        init: str = "msra",
    ) -> None:
        super().__init__()
        if inter_channels is None:
            inter_channels = max(1, in_channels // 2)
        _check_choice("ndim", ndim, tuple(_CONVS))
        _check_choice("pairwise", pairwise, PAIRWISE_FUNCTIONS)
        _check_choice("pool", pool, POOLS)
        _check_choice("init", init, INITS)
        _check_positive("in_channels", in_channels)
        _check_positive("inter_channels", inter_channels)

        self.in_channels, self.inter_channels, self.ndim = in_channels, inter_channels, ndim
        self.pairwise, self.pool, self.scale, self.init = pairwise, pool, scale, init
        compared = in_channels if pairwise == "gaussian" else inter_channels
        self.logit_scale: float = compared**-0.5 if scale else 1.0

        conv = _CONVS[ndim]
        # None rather than absent: TorchScript then drops the branches that need them.
        self.theta = None if pairwise == "gaussian" else conv(in_channels, inter_channels, 1)
        self.phi = None if pairwise == "gaussian" else conv(in_channels, inter_channels, 1)
        self.g = conv(in_channels, inter_channels, 1)
        self.w_f = nn.Linear(2 * inter_channels, 1, bias=False) if pairwise == "concatenation" else None
        self.w_z = _CONV_NORMS[ndim](inter_channels, in_channels, 1)
        self.w_z.norm = build_norm(norm, in_channels, ndim)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the starting values: `init` everywhere, biases zero, exactly one of gamma and W_z zero."""
        norm = self.w_z.norm
        gamma = getattr(norm, "weight", None)
        for layer in filter(None, (self.theta, self.phi, self.g, self.w_f, self.w_z)):
            if self.init == "msra":
                nn.init.kaiming_normal_(layer.weight, mode="fan_in", nonlinearity="relu")
            else:
                nn.init.normal_(layer.weight, std=0.01)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        nn.init.zeros_(self.w_z.weight if gamma is None else gamma)
        if getattr(norm, "bias", None) is not None:
            nn.init.zeros_(norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return z [B, C, *spatial].

        Args:
            x: feature map [B, C, *spatial]; B may be 0, every spatial axis has at least one position.

        Raises:
            ValueError: x has another number of axes than ndim + 2.
        """
        self._check_input(x)
        source = self._source(x)
        keys = source if self.phi is None else self.phi(source)
        # g before the keys are pooled: gradients are summed in the order of the forward pass.
        values, keys = self._pooled(self.g(source)), self._pooled(keys)
        theta = (x if self.theta is None else self.theta(x)).flatten(2)
        if self.w_f is not None:
            y = concatenation(theta, keys.flatten(2), values.flatten(2), self.w_f.weight)
        elif self.pairwise == "dot_product":
            y = dot_product(theta, keys.flatten(2), values.flatten(2))
        else:
            y = gaussian(theta, keys.flatten(2), values.flatten(2), self.logit_scale)
        y = y.unflatten(2, x.shape[2:])
        return self.w_z(y) + x

    @torch.no_grad()
    def attention(self, x: Tensor, queries: Tensor) -> Tensor:
        """Return the weights f(x_i, x_j) / C(x) of Eq. 1 that given positions i put on every key position j.

        They are [B, Q, *key_grid]; the key grid is x's, halved where `pool` halves it. They sum to 1 for the
        two Gaussian functions; for "dot_product" they may be negative.

        Args:
            x: feature map [B, C, *spatial].
            queries: integer cells of x in the order of its axes ((y, x) in 2-D): [B, Q, ndim], or [Q, ndim]
                for every sample.

        Raises:
            ValueError: x or queries has a wrong shape, or queries are not integers.
            IndexError: a query outside x.
        """
        self._check_input(x)
        index = _flat_index(queries, x)
        theta = x.flatten(2).gather(2, index.unsqueeze(1).expand(-1, x.shape[1], -1))  # [B, C, Q]
        if self.theta is not None:
            # One map of a single position per query: a convolution takes no map of 0 positions, but 0 maps.
            cells = theta.transpose(1, 2).flatten(0, 1)
            cells = self.theta(cells.view(*cells.shape, *[1] * self.ndim)).flatten(1)
            theta = cells.unflatten(0, index.shape).transpose(1, 2)
        source = self._source(x)
        keys = self._pooled(source if self.phi is None else self.phi(source))
        phi = keys.flatten(2)
        with full_precision(x.device):
            theta, phi = at_least_float(theta), at_least_float(phi)
            if self.w_f is not None:
                weights = concatenation_weights(theta, phi, at_least_float(self.w_f.weight))
            elif self.pairwise == "dot_product":
                weights = dot_product_weights(theta, phi)
            else:
                weights = gaussian_weights(theta, phi, self.logit_scale)
        return weights.unflatten(2, keys.shape[2:])

    def _source(self, x: Tensor) -> Tensor:
        return _subsample(x) if self.pool == "input" else x

    def _pooled(self, embedding: Tensor) -> Tensor:
        return _subsample(embedding) if self.pool == "embedding" else embedding

    def _check_input(self, x: Tensor) -> None:
        if x.dim() != self.ndim + 2:
            raise ValueError(
                f"x has shape {list(x.shape)}; a block with ndim={self.ndim} takes {self.ndim + 2} axes: "
                "batch, channels and the spatial axes"
            )

    def extra_repr(self) -> str:
        """Return the options, for printing."""
        return (
            f"{self.in_channels}, {self.inter_channels}, ndim={self.ndim}, pairwise={self.pairwise!r}, "
            f"pool={self.pool!r}, scale={self.scale}"
        )


def _subsample(x: Tensor) -> Tensor:
    """2x max pool of the last axis (1-D) or the last two (2-D, 3-D), floor; an axis of length 1 is kept."""
    width = min(2, x.shape[-1])
    if x.dim() == 3:
        return F.max_pool1d(x, [width])
    height = min(2, x.shape[-2])
    if x.dim() == 4:
        return F.max_pool2d(x, [height, width])
    return F.max_pool3d(x, [1, height, width])


def _flat_index(queries: Tensor, x: Tensor) -> Tensor:
    """Check cells [Q, ndim] or [B, Q, ndim] of x and return their row-major positions [B, Q]."""
    batch, size = x.shape[0], list(x.shape[2:])
    if queries.is_floating_point() or queries.is_complex() or queries.dtype == torch.bool:
        raise ValueError(f"queries are {queries.dtype}; give integer cells (torch.int64)")
    if queries.dim() == 2:
        queries = queries.unsqueeze(0).expand(batch, -1, -1)
    if queries.dim() != 3 or queries.shape[0] != batch or queries.shape[2] != len(size):
        raise ValueError(
            f"queries have shape {list(queries.shape)}; give [Q, {len(size)}] or [{batch}, Q, {len(size)}] "
            f"for x of shape {list(x.shape)}"
        )
    queries = queries.to(x.device, torch.int64)
    outside = ((queries < 0) | (queries >= torch.tensor(size, device=x.device))).any(dim=2)
    if outside.any():
        raise IndexError(f"query {queries[outside][0].tolist()} is outside the map of size {size}")
    index = queries[..., 0]
    for axis in range(1, len(size)):
        index = index * size[axis] + queries[..., axis]
    return index


def _check_choice(name: str, value: object, choices: tuple) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; use one of {list(choices)}")


def _check_positive(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r}; give a whole number of at least 1")
