"""Where Eq. 1 must not run in half precision."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor


def full_precision(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Switch autocast off on a device. The tensors inside must be cast by the caller."""
    # The meta device has no autocast, and asking about it raises.
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


def at_least_float(x: Tensor) -> Tensor:
    """Return float16 and bfloat16 as float32, float32 and float64 as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
