"""Building models from configs; what Detectron2 finds wrong with a config is one line that says where."""

from __future__ import annotations

import functools
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from detectron2 import modeling
from detectron2.config import CfgNode
from torch import nn

from nonlocal_det.config import ConfigError

__all__ = ["build_model", "config_faults"]

# In the order in which they are read.
_FEATURES = (
    "MODEL.FPN.IN_FEATURES",
    "MODEL.RPN.IN_FEATURES",
    "MODEL.ROI_HEADS.IN_FEATURES",
    "MODEL.RETINANET.IN_FEATURES",
    "MODEL.SEM_SEG_HEAD.IN_FEATURES",
)


def build_model(cfg: CfgNode) -> nn.Module:
    """Build a config's model, on its MODEL.DEVICE, by Detectron2.

    Args:
        cfg: the config.

    Raises:
        ConfigError: see :func:`config_faults`.
    """
    with config_faults(cfg):
        return modeling.build_model(cfg)


@contextmanager
def config_faults(cfg: CfgNode) -> Iterator[None]:
    """Turn what Detectron2 raises while it builds a model from a config into a line about the config.

    Errors that other code raises, such as a head of the user's own, pass through.

    Args:
        cfg: the config.

    Raises:
        ConfigError: a part is not registered, reads features that are not made, needs compiled operators that
            are not there, or is refused otherwise.
    """
    try:
        yield
    except (AssertionError, ImportError, KeyError, ValueError) as error:
        fault = _describe(cfg, error)
        if fault is None:
            raise
        raise ConfigError(fault) from error


def _describe(cfg: CfgNode, error: Exception) -> str | None:
    """Return what is wrong in one line; None where neither Detectron2 nor fvcore has found it."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    module = frame.f_globals.get("__name__", "")
    if module.partition(".")[0] not in ("detectron2", "fvcore"):
        return None
    text = " ".join(str(error.args[0]).split()) if error.args else ""
    if found := re.match(r"No object named '(.*)' found in '(.*)' registry", text):
        return (
            f"{found[1]!r} is not registered in {found[2]}: correct the config key that names it, or import "
            "the code that registers it"
        )
    for key in _FEATURES:
        names = functools.reduce(lambda node, part: node.get(part, {}), key.split("."), cfg)
        if isinstance(error, KeyError) and text in names:
            return f"{key} is {list(names)}: nothing makes {text!r}; write names that the backbone makes"
    last = traceback.extract_tb(error.__traceback__)[-1]
    if isinstance(error, KeyError):
        text = f"{text!r} is not known"
    return f"the model cannot be built: {text or last.line} ({last.name} in {module}); correct the config"
