"""Filters for the warnings that Detectron2 raises on current PyTorch releases.

Users of this package can do nothing about them. Exactly those named here are filtered; everything else that
Detectron2, PyTorch or the user's own code has to say stays visible.
"""

from __future__ import annotations

import logging
import warnings

# (action, message, category, module): what warnings.filterwarnings takes; message and module are regular
# expressions that match from the start. None has a colon, at which pytest splits its own form of them.
UPSTREAM_WARNINGS: tuple[tuple[str, str, type[Warning], str], ...] = (
    # fvcore/nn/focal_loss.py and detectron2/modeling/box_regression.py script functions while they are
    # imported. PyTorch gives its own module as the place, whoever calls, so this hides it from all callers.
    (
        "ignore",
        r"`torch\.jit\.script` is deprecated\. Please switch to `torch\.compile` or `torch\.export`",
        FutureWarning,
        r"torch\.jit\._script$",
    ),
    # detectron2/modeling/anchor_generator.py calls meshgrid without `indexing`. PyTorch warns once a process,
    # and gives its own module here too.
    (
        "ignore",
        r"torch\.meshgrid. in an upcoming release, it will be required to pass the indexing argument",
        UserWarning,
        r"torch\.functional$",
    ),
    # Keypoints, made from the list of arrays that detectron2/data/detection_utils.py collects.
    (
        "ignore",
        r"Creating a tensor from a list of numpy\.ndarrays is extremely slow",
        UserWarning,
        r"detectron2\.structures\.keypoints$",
    ),
    # create_ddp_model; the name that replaces broadcast_buffers is not in older PyTorch releases.
    (
        "ignore",
        r"`broadcast_buffers` is deprecated\. Use `forward_sync_buffers` instead",
        FutureWarning,
        r"detectron2\.engine\.defaults$",
    ),
)


class _FxTracingFilter(logging.Filter):
    """Drop the log record that ``torch.fx`` writes at the first call of ``ROIPooler.forward``."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether ``record`` is to be logged."""
        return not record.getMessage().startswith("is_fx_tracing will return true for both fx.symbolic_trace")


_FX_TRACING_FILTER = _FxTracingFilter()


def filter_upstream_warnings() -> None:
    """Keep the known upstream warnings from being shown.

    Call it before ``detectron2`` is imported: some come while it is. Calling it again does no harm.
    """
    for action, message, category, module in UPSTREAM_WARNINGS:
        warnings.filterwarnings(action, message, category, module)
    logging.getLogger("torch.fx._symbolic_trace").addFilter(_FX_TRACING_FILTER)
