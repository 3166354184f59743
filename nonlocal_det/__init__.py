"""Non-local blocks (Wang, Girshick, Gupta and He, CVPR 2018) for Detectron2's detectors.

Importing this package is light and registers nothing. The first use of a public name, such as
``from nonlocal_det import get_config``, registers its backbones, heads and data sets with Detectron2.
``nonlocal_det.layers`` needs PyTorch alone; everything else needs Detectron2.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from nonlocal_det.upstream import filter_upstream_warnings

__version__ = "0.1.0"

__all__ = ["ConfigError", "add_nonlocal_config", "get_config"]

DETECTRON2_MISSING = (
    "nonlocal_det needs Detectron2 (only nonlocal_det.layers works without it): run `make setup` in a "
    "checkout of nonlocal_det, or install it as its README says under Set-up"
)

filter_upstream_warnings()  # before Detectron2 is imported: it warns while it is

# Public name -> the module that defines it.
_PUBLIC = {
    "ConfigError": "nonlocal_det.errors",
    "add_nonlocal_config": "nonlocal_det.engine.task",
    "get_config": "nonlocal_det.engine.task",
}
# What registers with Detectron2 when it is imported.
_REGISTERING = ("nonlocal_det.modeling", "nonlocal_det.detection")


def register_all() -> None:
    """Register backbones, heads, data sets and tasks. A second call changes nothing.

    Raises:
        ImportError: Detectron2 is missing.
    """
    if find_spec("detectron2") is None:
        raise ImportError(DETECTRON2_MISSING, name="detectron2")
    for module in _REGISTERING:
        import_module(module)


def __dir__() -> list[str]:
    return [*globals(), *_PUBLIC]


def __getattr__(name: str) -> Any:
    if name == "layers":  # needs PyTorch alone
        return import_module("nonlocal_det.layers")
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    register_all()
    return getattr(import_module(_PUBLIC[name]), name)
