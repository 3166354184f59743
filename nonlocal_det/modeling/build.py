"""Building models from configs; what Detectron2 finds wrong with a config is one line that says where."""

from __future__ import annotations

import functools
import re
import traceback
from collections.abc import Callable
from pathlib import Path

import detectron2
import fvcore
import torch
from detectron2 import modeling
from detectron2.config import CfgNode
from torch import nn

import nonlocal_det
from nonlocal_det.errors import ConfigError

__all__ = ["build_model", "build_on_meta"]

# Detectron2's packages, and the key of the features that each reads from another.
_FEATURES = {
    "backbone": "MODEL.FPN.IN_FEATURES",
    "proposal_generator": "MODEL.RPN.IN_FEATURES",
    "roi_heads": "MODEL.ROI_HEADS.IN_FEATURES",
    "meta_arch": "MODEL.RETINANET.IN_FEATURES",
}
_UPSTREAM = tuple(Path(package.__file__).parent for package in (detectron2, fvcore))
_TORCH = Path(torch.__file__).parent
_OURS = Path(nonlocal_det.__file__).parent


def build_model(cfg: CfgNode, build: Callable[[CfgNode], nn.Module] = modeling.build_model) -> nn.Module:
    """Build a config's model, on its MODEL.DEVICE, by Detectron2.

    Errors in which other code takes part, such as a head of the user's own, pass through.

    Args:
        cfg: the config.
        build: Detectron2's way to build it.

    Raises:
        ConfigError: a part is not registered, reads features that are not made, needs compiled operators that
            are not there, or is refused otherwise.
    """
    try:
        return build(cfg)
    except (ArithmeticError, AssertionError, ImportError, LookupError, ValueError) as error:
        fault = _describe(cfg, error)
        if fault is None:
            raise
        raise ConfigError(fault) from error


def build_on_meta(cfg: CfgNode) -> nn.Module:
    """Build a config's model without memory for its tensors.

    Args:
        cfg: the config, which stays as it is.

    Raises:
        ConfigError: see :func:`build_model`.
    """
    cfg = cfg.clone()
    cfg.defrost()
    cfg.MODEL.DEVICE = "meta"
    with torch.device("meta"):
        return build_model(cfg)


def _describe(cfg: CfgNode, error: Exception) -> str | None:
    """Return what is wrong in one line; None where code of the user's own or of other libraries took part."""
    # By the files: a star import from Detectron2 changes a module's __name__.
    frames = [(frame, Path(frame.f_code.co_filename)) for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not all(_within(path, *_UPSTREAM, _TORCH, _OURS) for _, path in frames):
        return None
    while _within(frames[-1][1], _TORCH):  # what torch refuses is the fault of who called it
        frames.pop()
    last, path = frames[-1]
    if not _within(path, *_UPSTREAM):
        return None
    text = " ".join(str(error.args[0]).split()) if error.args else ""
    if found := re.match(r"No object named '(.*)' found in '(.*)' registry", text):
        return (
            f"{found[1]!r} is not registered in {found[2]}: correct the config key that names it, or import "
            "the code that registers it"
        )
    module = last.f_globals["__name__"]
    key = _FEATURES.get(module.removeprefix("detectron2.modeling.").partition(".")[0])
    if isinstance(error, KeyError) and key:
        names = functools.reduce(lambda node, part: node[part], key.split("."), cfg)
        if text in names:
            return f"{key} is {list(names)}: nothing makes {text!r}; write names that the backbone makes"
    if isinstance(error, KeyError):
        text = f"{text!r} is not known"
    if not re.search("[a-z]", text):  # an assertion that says nothing
        text = traceback.extract_tb(error.__traceback__)[-1].line or type(error).__name__
    remedy = "compile Detectron2's operators" if isinstance(error, ImportError) else "correct the config"
    return f"the model cannot be built: {text} ({module}); {remedy}"


def _within(path: Path, *folders: Path) -> bool:
    return any(folder in path.parents for folder in folders)
