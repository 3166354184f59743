"""Loading of weights: a baseline's into a model with non-local blocks, with nothing missing in silence."""

from __future__ import annotations

from nonlocal_det.checkpoint.checkpointer import NonLocalCheckpointer
from nonlocal_det.checkpoint.report import CheckpointError, LoadReport

__all__ = ["CheckpointError", "LoadReport", "NonLocalCheckpointer"]
