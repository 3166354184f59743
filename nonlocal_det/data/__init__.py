"""Data sets that the package makes itself, registered with Detectron2 on import."""

from nonlocal_det.data.builtin import register_builtin_datasets

__all__ = ["register_builtin_datasets"]

register_builtin_datasets()
