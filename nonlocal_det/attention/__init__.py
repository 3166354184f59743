"""Where non-local blocks look: recorded during an inference, and drawn."""

from nonlocal_det.attention.figure import draw_attention
from nonlocal_det.attention.recording import (
    AttentionRecorder,
    AttentionRow,
    BlockAttention,
    row_difference,
    save_attention,
)

__all__ = [
    "AttentionRecorder",
    "AttentionRow",
    "BlockAttention",
    "draw_attention",
    "row_difference",
    "save_attention",
]
