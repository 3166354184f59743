"""Which exact form evaluates a pairwise function: chosen by size and device, never by the user.

All forms of a function give the same result up to rounding. The limits below were measured (CPU) or are
measured at first use (CUDA: fused attention against chunks).
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

MIB = 1 << 20

FORMS = {
    "gaussian": ("matrix", "chunked", "fused"),
    "dot_product": ("matrix", "rearranged"),
    "concatenation": ("matrix", "sorted"),
}
"""Forms of each function. The embedded Gaussian shares those of "gaussian"."""


@dataclass(frozen=True)
class Limits:
    """Byte limits of the forms on one kind of device, for one call (all samples of a batch together).

    Args:
        matrix: largest N x M matrix that is built whole.
        chunk: size of one chunk of rows of the matrix (the Gaussian functions) or of channels
        (concatenation).
        keep: how much of the weights the chunked form keeps for its backward pass, in units of the bytes of
            theta and y, so that memory grows with the positions and not with their square. It computes the
            others again, which costs a seventh matrix product.
    """

    matrix: int
    chunk: int
    keep: float


# CPU: chunks that stay in the last-level cache. CUDA: large enough to keep the device busy.
_LIMITS = {"cpu": Limits(4 * MIB, 4 * MIB, 2.0), "cuda": Limits(64 * MIB, 128 * MIB, 1.0)}

_forced: list[str] = []
_limits: list[Limits] = []


@contextlib.contextmanager
def evaluate_with(
    form: str | None = None,
    *,
    matrix_bytes: int | None = None,
    chunk_bytes: int | None = None,
    keep: float | None = None,
) -> Iterator[None]:
    """Forces a form, or other byte limits, on the pairwise functions called inside.

    For tests and measurements: the choice made without it is meant to be right.

    Args:
        form: "matrix" (all functions), "chunked" or "fused" (the two Gaussian functions), "rearranged" (dot
            product), "sorted" (concatenation). A function that lacks it keeps its own choice.
        matrix_bytes: replaces `Limits.matrix`.
        chunk_bytes: replaces `Limits.chunk`.
        keep: replaces `Limits.keep`.

    Raises:
        ValueError: an unknown form.
    """
    known = sorted({name for forms in FORMS.values() for name in forms})
    if form is not None and form not in known:
        raise ValueError(f"form={form!r} is unknown; use one of {known}")
    changes = {"matrix": matrix_bytes, "chunk": chunk_bytes, "keep": keep}
    changes = {name: value for name, value in changes.items() if value is not None}
    before = _forced[:], _limits[:]
    if form is not None:
        _forced[:] = [form]
    if changes:
        _limits[:] = [replace(_limits[0] if _limits else _LIMITS["cpu"], **changes)]
    try:
        yield
    finally:
        _forced[:], _limits[:] = before


def limits_for(device: torch.device) -> Limits:
    """The byte limits on a device."""
    if _limits:
        return _limits[0]
    return _LIMITS.get(device.type, _LIMITS["cuda"])


def choose_form(function: str, theta: Tensor, phi: Tensor, g: Tensor) -> str:
    """The form to evaluate a function with.

    Args:
        function: a key of `FORMS`.
        theta: queries [B, D, N].
        phi: keys [B, D, M].
        g: values [B, V, M].

    Returns:
        One of `FORMS[function]`.
    """
    if _forced and _forced[0] in FORMS[function]:
        return _forced[0]
    batch, compared, queries = theta.shape
    values, keys = g.shape[1:]
    if function == "dot_product":
        # The cheaper order of the two products. Where that is the matrix, it is smaller than its operands.
        matrix, rearranged = queries * keys * (compared + values), (queries + keys) * compared * values
        return "matrix" if matrix <= rearranged else "rearranged"
    if batch * queries * keys * max(4, theta.element_size()) <= limits_for(theta.device).matrix:
        return "matrix"
    if function == "concatenation":
        return "sorted"
    # The fused backward pass adds in any order, and nothing can be timed while a CUDA graph is recorded.
    if theta.is_cuda and not (
        torch.are_deterministic_algorithms_enabled() or torch.cuda.is_current_stream_capturing()
    ):
        return fastest_gaussian_form(theta.device, theta.dtype, compared, values)
    return "chunked"


@cache
def fastest_gaussian_form(device: torch.device, dtype: torch.dtype, compared: int, values: int) -> str:
    """Times fused attention and chunks once on a device, forward and backward, and names the faster.

    Args:
        device: where to measure.
        dtype: type of theta, phi and g.
        compared: D, length of theta_i and phi_j.
        values: V, length of g_j.

    Returns:
        "fused" or "chunked"; "chunked" where no fused kernel takes these lengths.
    """
    from .pairwise import gaussian  # here: pairwise.py imports this module

    queries, keys = 4096, 1024
    # Zeros: times do not depend on the values, and a random draw would change the user's sequence.
    shapes = ((1, compared, queries), (1, compared, keys), (1, values, keys))
    inputs = [torch.zeros(s, device=device, dtype=dtype, requires_grad=True) for s in shapes]

    def step() -> None:
        with torch.enable_grad():
            y = gaussian(*inputs, compared**-0.5)
        torch.autograd.grad(y, inputs, torch.ones_like(y))

    times = {}
    for form in ("chunked", "fused"):
        with evaluate_with(form), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says at length why a kernel does not fit
            try:
                times[form] = _seconds(step, device)
            except RuntimeError:  # no fused kernel for this device, type or length, or no memory
                continue
    return min(times, key=times.__getitem__, default="chunked")


def _seconds(step: Callable[[], None], device: torch.device, repeats: int = 3) -> float:
    """Shortest of a few runs after one that warms up."""
    best = float("inf")
    for _ in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best
