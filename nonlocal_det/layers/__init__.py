"""Non-local operations that need torch alone.

`NonLocalBlock` is Eq. 6 of "Non-local Neural Networks" (Wang, Girshick, Gupta, He, CVPR 2018); the pairwise
functions are Eq. 1 with the f of Eq. 2 to 5.
"""

from .forms import FORMS, evaluate_with
from .kernels import settle_kernels
from .non_local import INITS, POOLS, NonLocalBlock
from .norm import NORMS
from .pairwise import (
    PAIRWISE_FUNCTIONS,
    concatenation,
    concatenation_weights,
    dot_product,
    dot_product_weights,
    gaussian,
    gaussian_weights,
)

__all__ = [
    "FORMS",
    "INITS",
    "NORMS",
    "PAIRWISE_FUNCTIONS",
    "POOLS",
    "NonLocalBlock",
    "concatenation",
    "concatenation_weights",
    "dot_product",
    "dot_product_weights",
    "evaluate_with",
    "gaussian",
    "gaussian_weights",
    "settle_kernels",
]
