"""Loading of weights: a baseline's into a model with non-local blocks, with nothing missing in silence."""

from nonlocal_det.checkpoint.checkpointer import NonLocalCheckpointer

__all__ = ["NonLocalCheckpointer"]
