"""Building models from configs; frequent mistakes that Detectron2 finds then are one line that says where."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable

import torch
from detectron2 import modeling
from detectron2.config import CfgNode
from torch import nn

from nonlocal_det.config.messages import get_value
from nonlocal_det.errors import ConfigError

# Detectron2's packages, and the key of the features that each reads from another.
_FEATURES = {
    "backbone": "MODEL.FPN.IN_FEATURES",
    "proposal_generator": "MODEL.RPN.IN_FEATURES",
    "roi_heads": "MODEL.ROI_HEADS.IN_FEATURES",
    "meta_arch": "MODEL.RETINANET.IN_FEATURES",
}


def build_model(cfg: CfgNode, build: Callable[[CfgNode], nn.Module] = modeling.build_model) -> nn.Module:
    """Build a config's model, on its MODEL.DEVICE, by Detectron2.

    Args:
        cfg: the config.
        build: Detectron2's way to build it.

    Raises:
        ConfigError: a part is not registered, reads features that are not made, or needs compiled operators
            that are not there.
    """
    try:
        return build(cfg)
    except (ImportError, KeyError) as error:
        fault = _describe(cfg, error)
        if fault is None:
            raise
        raise ConfigError(fault) from error


def build_on_meta(cfg: CfgNode) -> nn.Module:
    """Build a config's model without memory for its tensors; errors are those of :func:`build_model`."""
    cfg = cfg.clone()
    cfg.defrost()
    cfg.MODEL.DEVICE = "meta"
    with torch.device("meta"):
        return build_model(cfg)


def _describe(cfg: CfgNode, error: Exception) -> str | None:
    """Return what is wrong in one line; None for other errors."""
    text = str(error.args[0]) if error.args else ""
    if found := re.match(r"No object named '(.*)' found in '(.*)' registry", text):
        return (
            f"{found[1]!r} is not registered in {found[2]}: correct the config key that names it, or import "
            "the code that registers it"
        )
    if isinstance(error, ImportError):
        missing = text.startswith("Cannot import 'detectron2._C'")
        return f"the model cannot be built: {text}; compile Detectron2's operators" if missing else None
    frame, _ = list(traceback.walk_tb(error.__traceback__))[-1]
    package, _, part = frame.f_globals["__name__"].rpartition("detectron2.modeling.")
    key = _FEATURES.get(part.partition(".")[0]) if not package else None
    if key and text in get_value(cfg, key):
        return f"{key} is {get_value(cfg, key)}: nothing makes {text!r}; write names that the backbone makes"
    return None
