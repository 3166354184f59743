"""The pairwise functions f of Eq. 1: y_i = 1/C(x) * sum_j f(x_i, x_j) g(x_j).

Every function takes the compared vectors and the values channels first, as the 1x1 convolutions give them
once their spatial axes are flattened: theta [B, D, N] (queries), phi [B, D, M] (keys), g [B, V, M] (values).
It returns y [B, V, N]. "Non-local Neural Networks", Wang, Girshick, Gupta, He, CVPR 2018, section 3.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

PAIRWISE_FUNCTIONS = ("embedded_gaussian", "gaussian", "dot_product", "concatenation")


def gaussian_weights(theta: Tensor, phi: Tensor, scale: float = 1.0) -> Tensor:
    """Normalised weights f / C(x) of Eq. 2 and Eq. 3: a softmax over the keys.

    Args:
        theta: queries [B, D, N].
        phi: keys [B, D, M].
        scale: factor of the logits theta_i . phi_j.

    Returns:
        Weights [B, N, M]; each row sums to 1.
    """
    return torch.softmax(torch.matmul(theta.transpose(1, 2) * scale, phi), dim=-1)


def dot_product_weights(theta: Tensor, phi: Tensor) -> Tensor:
    """Normalised weights f / C(x) of Eq. 4: (theta_i . phi_j) / M, which may be negative.

    Args:
        theta: queries [B, D, N].
        phi: keys [B, D, M].

    Returns:
        Weights [B, N, M].
    """
    return torch.matmul(theta.transpose(1, 2), phi) / phi.shape[2]


def concatenation_weights(theta: Tensor, phi: Tensor, w_f: Tensor) -> Tensor:
    """Normalised weights f / C(x) of Eq. 5: ReLU(w_f . [theta_i, phi_j]) / M.

    Args:
        theta: queries [B, D, N].
        phi: keys [B, D, M].
        w_f: weight vector [1, 2D], the half for theta first.

    Returns:
        Weights [B, N, M].
    """
    a, b = _concatenation_terms(theta, phi, w_f)
    return torch.relu(a.unsqueeze(2) + b.unsqueeze(1)) / phi.shape[2]


def _concatenation_terms(theta: Tensor, phi: Tensor, w_f: Tensor) -> tuple[Tensor, Tensor]:
    """Splits w_f . [theta_i, phi_j] into a_i + b_j, a [B, N] and b [B, M]."""
    w_theta, w_phi = w_f.reshape(-1).chunk(2)
    return torch.matmul(w_theta, theta), torch.matmul(w_phi, phi)


def gaussian(theta: Tensor, phi: Tensor, g: Tensor, scale: float = 1.0) -> Tensor:
    """Eq. 1 with the Gaussian (Eq. 2: theta = phi = x) or the embedded Gaussian (Eq. 3).

    Args:
        theta: queries [B, D, N].
        phi: keys [B, D, M].
        g: values [B, V, M].
        scale: factor of the logits theta_i . phi_j.

    Returns:
        y [B, V, N].
    """
    return torch.matmul(g, gaussian_weights(theta, phi, scale).transpose(1, 2))


def dot_product(theta: Tensor, phi: Tensor, g: Tensor) -> Tensor:
    """Eq. 1 with the dot product (Eq. 4), C(x) = M.

    Args:
        theta: queries [B, D, N].
        phi: keys [B, D, M].
        g: values [B, V, M].

    Returns:
        y [B, V, N].
    """
    return torch.matmul(g, dot_product_weights(theta, phi).transpose(1, 2))


def concatenation(theta: Tensor, phi: Tensor, g: Tensor, w_f: Tensor) -> Tensor:
    """Eq. 1 with the concatenation (Eq. 5), C(x) = M.

    Args:
        theta: queries [B, D, N].
        phi: keys [B, D, M].
        g: values [B, V, M].
        w_f: weight vector [1, 2D], the half for theta first.

    Returns:
        y [B, V, N].
    """
    return torch.matmul(g, concatenation_weights(theta, phi, w_f).transpose(1, 2))
