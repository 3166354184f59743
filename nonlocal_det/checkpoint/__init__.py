"""Loading of weights: a baseline's into a model with non-local blocks, with nothing missing in silence."""

from __future__ import annotations

from nonlocal_det.checkpoint.checkpointer import NonLocalCheckpointer
from nonlocal_det.checkpoint.load_report import LoadReport
from nonlocal_det.errors import CheckpointError

__all__ = ["CheckpointError", "LoadReport", "NonLocalCheckpointer"]
