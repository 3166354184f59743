"""Non-local blocks (Wang, Girshick, Gupta and He, CVPR 2018) for Detectron2's detectors.

Importing this package registers its backbone, keypoint head and data sets with Detectron2.
``nonlocal_det.layers`` needs PyTorch alone; everything else needs Detectron2.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

__version__ = "0.1.0"

__all__ = ["ConfigError", "add_nonlocal_config", "get_config"]

if find_spec("detectron2") is None:
    DETECTRON2_MISSING = (
        "nonlocal_det needs Detectron2 (only nonlocal_det.layers works without it): run `make setup` in a "
        "checkout of nonlocal_det, or install it as its README says under Set-up"
    )
    logging.getLogger(__name__).warning(DETECTRON2_MISSING)

    def __getattr__(name: str) -> Any:
        if name in __all__:
            raise ImportError(DETECTRON2_MISSING, name="detectron2")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

else:
    from nonlocal_det._upstream import filter_upstream_warnings

    filter_upstream_warnings()  # before Detectron2 is imported: it warns while it is

    from nonlocal_det import data, modeling  # noqa: F401  (registers)
    from nonlocal_det.config import ConfigError, add_nonlocal_config, get_config
