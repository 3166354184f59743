"""Which exact form evaluates a pairwise function: chosen by size and device, never by the user.

All forms of a function give the same result up to rounding. The limits below were measured on a CPU. On CUDA
fused attention is measured against chunks: once a process at its first use, or before that by `settle`, with
which several processes choose alike. A forward pass never waits for another process.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, distributed

MIB = 1 << 20

FORMS = {
    "gaussian": ("matrix", "chunked", "fused"),
    "dot_product": ("matrix", "rearranged"),
    "concatenation": ("matrix", "sorted"),
}
"""Forms of each function. The embedded Gaussian shares those of "gaussian"."""


@dataclass(frozen=True)
class Limits:
    """Byte limits of the forms on one kind of device, for one call (all samples of a batch together)."""

    matrix: int  # largest N x M matrix that is built whole
    chunk: int  # one chunk of rows of the matrix (the Gaussian functions) or of channels (concatenation)
    # How much of the weights the chunked form keeps for its backward pass, in units of the bytes of theta and
    # y, so that memory grows with the positions and not with their square. It computes the others again, at
    # the cost of a seventh matrix product.
    keep: float


# CPU: chunks that stay in the last-level cache. CUDA: large enough to keep the device busy.
_LIMITS = {"cpu": Limits(4 * MIB, 4 * MIB, 2.0), "cuda": Limits(64 * MIB, 128 * MIB, 1.0)}

# The form and the limits that are forced.
_forced: ContextVar[tuple[str | None, Limits | None]] = ContextVar("forced", default=(None, None))


class GaussianCase(NamedTuple):
    """What the faster form of a large Gaussian function depends on."""

    device: str  # its type
    dtype: torch.dtype  # of theta and phi
    compared: int  # D, length of theta_i and phi_j
    values: int  # V, length of g_j


Gaussian = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""(theta [B, D, N], phi [B, D, M], g [B, V, M], scale) -> y [B, V, N], in the form that is forced."""

# What this process has measured, or was told: it holds for the hardware, so for all models alike.
_settled: dict[GaussianCase, str] = {}


@contextlib.contextmanager
def evaluate_with(
    form: str | None = None,
    *,
    matrix_bytes: int | None = None,
    chunk_bytes: int | None = None,
    keep: float | None = None,
) -> Iterator[None]:
    """Force a form, or other byte limits, on the pairwise functions called inside, by this thread.

    It is for tests and measurements.

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
    given = {"matrix": matrix_bytes, "chunk": chunk_bytes, "keep": keep}
    changes = {name: value for name, value in given.items() if value is not None}
    outer_form, limits = _forced.get()
    if changes:
        limits = replace(limits or _LIMITS["cpu"], **changes)
    token = _forced.set((form or outer_form, limits))
    try:
        yield
    finally:
        _forced.reset(token)


def limits_for(device: torch.device) -> Limits:
    """Return the byte limits on a device."""
    return _forced.get()[1] or _LIMITS.get(device.type, _LIMITS["cuda"])


def choose_form(
    function: str, theta: Tensor, phi: Tensor, g: Tensor, gaussian: Gaussian | None = None
) -> str:
    """Return the form to evaluate a function with, one of `FORMS[function]`.

    Args:
        function: a key of `FORMS`.
        theta: queries [B, D, N].
        phi: keys [B, D, M].
        g: values [B, V, M].
        gaussian: what may be timed on CUDA, once; without it that is left to `settle`.
    """
    forced, _ = _forced.get()
    if forced in FORMS[function]:
        return forced
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
        with torch.cuda.device_of(theta):
            return settled_form(GaussianCase(theta.device.type, theta.dtype, compared, values), gaussian)
    return "chunked"


def settled_form(case: GaussianCase, gaussian: Gaussian | None = None) -> str:
    """Return the form that was settled for a case, "fused" or "chunked".

    Where none was, a process that is alone measures now. One of several takes "chunked", which fits every
    case: the others may not come here, and forms that differ round differently.
    """
    if case not in _settled and gaussian is not None and _processes() == 1:
        settle([case], gaussian)
    return _settled.get(case, "chunked")


def settle(cases: Iterable[GaussianCase], gaussian: Gaussian) -> None:
    """Measure cases that have no form yet. Of several processes the first decides for all.

    With torch.distributed's default group all of its processes must call this together, with equal cases.
    """
    cases = sorted(set(cases), key=str)
    forms = [_settled.get(case) for case in cases]
    several = _processes() > 1
    if not several or distributed.get_rank() == 0:
        found = zip(cases, forms, strict=True)
        forms = [form or fastest_gaussian_form(case, gaussian) for case, form in found]
    if several and cases:
        distributed.broadcast_object_list(forms, src=0)
    _settled.update(zip(cases, forms, strict=True))


def fastest_gaussian_form(case: GaussianCase, gaussian: Gaussian) -> str:
    """Time fused attention and chunks, forward and backward, on the current device; return the faster.

    That is "fused" or "chunked"; "chunked" where no fused kernel takes the case.
    """
    queries, keys = 4096, 1024
    # Zeros: times do not depend on the values, and a random draw would change the user's sequence.
    shapes = ((1, case.compared, queries), (1, case.compared, keys), (1, case.values, keys))
    inputs = [torch.zeros(s, device=case.device, dtype=case.dtype, requires_grad=True) for s in shapes]

    def step() -> None:
        with torch.enable_grad():
            y = gaussian(*inputs, case.compared**-0.5)
        torch.autograd.grad(y, inputs, torch.ones_like(y))

    times = {}
    for form in ("chunked", "fused"):
        with evaluate_with(form), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says at length why a kernel does not fit
            try:
                times[form] = _seconds(step, case.device)
            except RuntimeError:  # no fused kernel for this device, type or length, or no memory
                continue
    return min(times, key=times.__getitem__, default="chunked")


def _seconds(step: Callable[[], None], device: str, repeats: int = 3) -> float:
    """Return the shortest of a few runs after one that warms up."""
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    times = []
    for _ in range(repeats + 1):
        synchronize()
        start = time.perf_counter()
        step()
        synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def _processes() -> int:
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size()
    return 1
