"""Pictures of what a model finds and of where its non-local blocks look."""

from nonlocal_det.visualization.attention import (
    AttentionRecorder,
    AttentionRow,
    BlockAttention,
    row_difference,
    save_attention,
)
from nonlocal_det.visualization.attention_figure import draw_attention
from nonlocal_det.visualization.instances import InstanceColors, draw_instances

__all__ = [
    "AttentionRecorder",
    "AttentionRow",
    "BlockAttention",
    "InstanceColors",
    "draw_attention",
    "draw_instances",
    "row_difference",
    "save_attention",
]
