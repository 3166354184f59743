"""The norm that may follow W_z, as a name or as a callable."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import nn

NORMS = ("", "BN", "SyncBN", "GN", "LN")
"""Norms that torch alone can serve. "" is no norm."""

_BATCH_NORMS = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}


def build_norm(norm: str | Callable[[int], nn.Module | None], channels: int, ndim: int) -> nn.Module | None:
    """Make the norm for a feature map [B, channels, *spatial]; None for no norm.

    Args:
        norm: one of `NORMS`, or a callable that takes the channel count and returns a module or None. "GN"
            has gcd(32, channels) groups; "LN" is a group norm of one group, so it also works on every size.
        channels: channels of the map that the norm sees.
        ndim: number of spatial axes, 1 to 3.

    Raises:
        ValueError: an unknown name, or a norm whose weight is a buffer (FrozenBN): started at zero it could
            never learn, and started elsewhere the block would not be an identity.
    """
    if callable(norm):
        module = norm(channels)
        if module is not None and "weight" in dict(module.named_buffers(recurse=False)):
            raise ValueError(
                f"norm={type(module).__name__}: its weight is a buffer that cannot learn, so the block would "
                f"be dead; use one of {list(NORMS)}, or a norm whose weight is a parameter"
            )
        return module
    if norm == "":
        return None
    if norm == "BN":
        return _BATCH_NORMS[ndim](channels)
    if norm == "SyncBN":
        return nn.SyncBatchNorm(channels)
    if norm == "GN":
        return nn.GroupNorm(math.gcd(32, channels), channels)
    if norm == "LN":
        return nn.GroupNorm(1, channels)
    raise ValueError(f"norm={norm!r} is unknown; use one of {list(NORMS)}, or a callable channels -> module")
