"""The time axis of a conv's weight, which nets for clips have and nets for pictures lack."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

SUMMED = "summed over its"


def fit_time(weight: Tensor, shape: Sequence[int]) -> tuple[Tensor, str]:
    """Give a conv's weight the time axis that its place has; what a still clip gives stays the same.

    A clip net's weight [C_out, C_in, T, H, W] is kept for a clip net, and summed over T for a picture net. A
    picture net's is repeated over the T of a clip net, and divided by it. What is no conv's is kept.

    Returns:
        The weight, and what was done to it; "" for nothing.
    """
    if weight.dim() == 5 and len(shape) == 4:
        frames = weight.shape[2]
        return weight.sum(2), "time axis of 1 dropped" if frames == 1 else f"{SUMMED} {frames} frames"
    if weight.dim() == 4 and len(shape) == 5:
        frames = shape[2]
        how = "time axis of 1 added" if frames == 1 else f"repeated over {frames} frames, each 1/{frames}"
        return weight[:, :, None].expand(-1, -1, frames, -1, -1) / frames, how
    return weight, ""
