"""The pairwise functions f of Eq. 1: y_i = 1/C(x) * sum_j f(x_i, x_j) g(x_j).

Every function takes the compared vectors and the values channels first, as the 1x1 convolutions give them
once their spatial axes are flattened, and returns y [B, V, N]. "Non-local Neural Networks", Wang, Girshick,
Gupta, He, CVPR 2018, section 3.2.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .blockwise import ChunkedGaussian, SortedConcatenation, prefix_order, sorted_sums
from .forms import choose_form, limits_for
from .precision import at_least_float, full_precision

PAIRWISE_FUNCTIONS = ("embedded_gaussian", "gaussian", "dot_product", "concatenation")


def gaussian_weights(theta: Tensor, phi: Tensor, scale: float = 1.0) -> Tensor:
    """Return the weights f / C(x) of `gaussian`, [B, N, M]: a softmax over the keys."""
    return torch.softmax(torch.matmul(theta.transpose(1, 2) * scale, phi), dim=-1)


def dot_product_weights(theta: Tensor, phi: Tensor) -> Tensor:
    """Return the weights f / C(x) of `dot_product`, [B, N, M]: (theta_i . phi_j) / M, of either sign."""
    return torch.matmul(theta.transpose(1, 2), phi) / phi.shape[2]


def concatenation_weights(theta: Tensor, phi: Tensor, w_f: Tensor) -> Tensor:
    """Return the weights f / C(x) of `concatenation`, [B, N, M]: ReLU(w_f . [theta_i, phi_j]) / M."""
    a, b = _concatenation_terms(theta, phi, w_f)
    return torch.relu(a.unsqueeze(2) + b.unsqueeze(1)) / phi.shape[2]


def _concatenation_terms(theta: Tensor, phi: Tensor, w_f: Tensor) -> tuple[Tensor, Tensor]:
    """Split w_f . [theta_i, phi_j] into a_i + b_j, a [B, N] and b [B, M]."""
    w_theta, w_phi = w_f.reshape(-1).chunk(2)
    return torch.matmul(w_theta, theta), torch.matmul(w_phi, phi)


def gaussian(theta: Tensor, phi: Tensor, g: Tensor, scale: float = 1.0) -> Tensor:
    """Return y of Eq. 1 with the Gaussian (Eq. 2: theta = phi = x) or the embedded Gaussian (Eq. 3).

    It is of g's type, as it lies between the values.

    Args:
        theta: queries [B, D, N].
        phi: keys [B, D, M].
        g: values [B, V, M].
        scale: factor of the logits theta_i . phi_j.
    """
    if torch.jit.is_scripting():  # noqa: SIM108 (TorchScript skips a branch, not half an expression)
        y = _fused_gaussian(theta, phi, g, scale)
    else:
        y = _gaussian(theta, phi, g, scale)
    return y


def dot_product(theta: Tensor, phi: Tensor, g: Tensor) -> Tensor:
    """Return y of Eq. 1 with the dot product (Eq. 4), C(x) = M.

    It is of g's type, but float32 for float16, whose range it can exceed.

    Args:
        theta: queries [B, D, N].
        phi: keys [B, D, M].
        g: values [B, V, M].
    """
    if torch.jit.is_scripting():
        y = _rearranged_dot_product(at_least_float(theta), at_least_float(phi), at_least_float(g))
        y = _as_values(y, g)
    else:
        y = _dot_product(theta, phi, g)
    return y


def concatenation(theta: Tensor, phi: Tensor, g: Tensor, w_f: Tensor) -> Tensor:
    """Return y of Eq. 1 with the concatenation (Eq. 5), C(x) = M.

    It is of g's type, but float32 for float16, whose range it can exceed.

    Args:
        theta: queries [B, D, N].
        phi: keys [B, D, M].
        g: values [B, V, M].
        w_f: weight vector [1, 2D], the half for theta first.
    """
    if torch.jit.is_scripting():
        a, b = _concatenation_terms(at_least_float(theta), at_least_float(phi), at_least_float(w_f))
        y = _as_values(_sorted_concatenation(a, b, at_least_float(g)), g)
    else:
        y = _concatenation(theta, phi, g, w_f)
    return y


def _gaussian(theta: Tensor, phi: Tensor, g: Tensor, scale: float) -> Tensor:
    with full_precision(g.device):
        if _is_captured():
            return _fused_gaussian(theta, phi, g, scale)
        form = choose_form("gaussian", theta, phi, g, gaussian)
        if form == "fused":
            # Without this list torch would fall back to the whole matrix where it has no fused kernel.
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
                return _fused_gaussian(theta, phi, g, scale)
        theta, phi, values = at_least_float(theta), at_least_float(phi), at_least_float(g)
        if form == "matrix":
            y = torch.matmul(values, gaussian_weights(theta, phi, scale).transpose(1, 2))
        else:
            limits = limits_for(g.device)
            has_backward = torch.is_grad_enabled() and any(t.requires_grad for t in (theta, phi, values))
            size = (theta.numel() + theta.shape[0] * values.shape[1] * theta.shape[2]) * theta.element_size()
            keep_bytes = int(limits.keep * size) if has_backward else 0
            y = ChunkedGaussian.apply(theta, phi, values, scale, limits.chunk, keep_bytes)
        return y.to(g.dtype)


def _dot_product(theta: Tensor, phi: Tensor, g: Tensor) -> Tensor:
    with full_precision(g.device):
        # A recorded graph may run at other sizes.
        form = "rearranged" if _is_captured() else choose_form("dot_product", theta, phi, g)
        theta, phi, values = at_least_float(theta), at_least_float(phi), at_least_float(g)
        if form == "matrix":
            y = torch.matmul(values, dot_product_weights(theta, phi).transpose(1, 2))
        else:
            y = _rearranged_dot_product(theta, phi, values)
        return _as_values(y, g)


def _concatenation(theta: Tensor, phi: Tensor, g: Tensor, w_f: Tensor) -> Tensor:
    with full_precision(g.device):
        if _is_exporting():  # searchsorted has no ONNX form: what is exported holds the matrix
            form = "matrix"
        elif _is_captured():
            form = "sorted"
        else:
            form = choose_form("concatenation", theta, phi, g)
        theta, phi, values, w_f = (at_least_float(t) for t in (theta, phi, g, w_f))
        if form == "matrix":
            y = torch.matmul(values, concatenation_weights(theta, phi, w_f).transpose(1, 2))
            return _as_values(y, g)
        a, b = _concatenation_terms(theta, phi, w_f)
        if _is_captured():
            y = _sorted_concatenation(a, b, values)
        else:
            y = SortedConcatenation.apply(a, b, values / phi.shape[2], limits_for(g.device).chunk)
        return _as_values(y, g)


def _fused_gaussian(theta: Tensor, phi: Tensor, g: Tensor, scale: float) -> Tensor:
    """Fused attention. Its kernels want rows [B, 1, N, D], contiguous, of one type."""
    q = theta.to(g.dtype).transpose(1, 2).unsqueeze(1).contiguous()
    k = phi.to(g.dtype).transpose(1, 2).unsqueeze(1).contiguous()
    v = g.transpose(1, 2).unsqueeze(1).contiguous()
    return F.scaled_dot_product_attention(q, k, v, scale=scale).squeeze(1).transpose(1, 2)


def _rearranged_dot_product(theta: Tensor, phi: Tensor, g: Tensor) -> Tensor:
    """The product of g and phi first: sum_j (theta_i . phi_j) g_j = (sum_j g_j phi_j^T) theta_i."""
    return torch.matmul(torch.matmul(g, phi.transpose(1, 2)) / phi.shape[2], theta)


def _sorted_concatenation(a: Tensor, b: Tensor, g: Tensor) -> Tensor:
    """`SortedConcatenation` as plain operations, for TorchScript and compilers."""
    order, count = prefix_order(a, b)
    return sorted_sums(a, b, g / b.shape[1], order, count)[0]


def _as_values(y: Tensor, g: Tensor) -> Tensor:
    """Cast y back to g's type unless that is float16, whose range an unnormalised sum can exceed."""
    return y if g.dtype == torch.float16 else y.to(g.dtype)


def _is_captured() -> bool:
    """Return whether torch records the operations now: custom autograd functions would get in its way."""
    return torch.jit.is_tracing() or torch.compiler.is_compiling()


def _is_exporting() -> bool:
    return torch.onnx.is_in_onnx_export() or (torch.compiler.is_compiling() and torch.compiler.is_exporting())
