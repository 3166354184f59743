"""What can be wrong with blocks and their backbone, before a net is built and once it has its weights."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable

from detectron2.config import CfgNode, get_cfg
from detectron2.modeling import BACKBONE_REGISTRY
from torch import nn

from nonlocal_det.config.keys import BLOCKS, NORMS, STAGES, WRAPPER, add_keys
from nonlocal_det.config.messages import check_choice, check_least, config_error
from nonlocal_det.errors import ConfigError, quoted
from nonlocal_det.layers import INITS, PAIRWISE_FUNCTIONS, POOLS

logger = logging.getLogger(__name__)

# Keys whose wrong values Detectron2 would find late, in a traceback.
_RESNET_CHOICES = {
    "MODEL.RESNETS.DEPTH": (18, 34, 50, 101, 152),
    "MODEL.RESNETS.NORM": (
        *("FrozenBN", "BN", "SyncBN", "nnSyncBN"),
        *("naiveSyncBN", "naiveSyncBN_N", "GN", "LN", ""),
    ),
}
_BLOCK_CHOICES = {
    **{"BLOCK": BLOCKS, "PAIRWISE": PAIRWISE_FUNCTIONS, "POOL": POOLS, "NORM": NORMS, "INIT": INITS}
}


def check_blocks(cfg: CfgNode) -> None:
    """Check the options of MODEL.NONLOCAL, and that blocks asked for have a backbone that takes them.

    What depends on the net (a position outside its stage, a backbone without a ResNet) is checked when it is
    built.

    Raises:
        ConfigError: the first thing found.
    """
    check_options(cfg)
    if any("resnet" in name for name in (cfg.MODEL.BACKBONE.NAME, cfg.MODEL.NONLOCAL.BACKBONE)):
        for key, right in _RESNET_CHOICES.items():
            check_choice(cfg, key, right)


def check_options(cfg: CfgNode) -> None:
    """Check MODEL.NONLOCAL alone: its values, and that blocks asked for have a backbone that takes them.

    Raises:
        ConfigError: the first thing found.
    """
    _check_values(cfg)
    _check_backbone(cfg)


def _check_values(cfg: CfgNode) -> None:
    node = cfg.MODEL.NONLOCAL
    if node.NORM == "FrozenBN":
        raise ConfigError(
            "MODEL.NONLOCAL.NORM is 'FrozenBN': its gamma starts at 0 and cannot be trained, so the block "
            f'would be dead for ever; write "" (no norm, the frozen-BN recipe) or one of {quoted(NORMS[1:])}'
        )
    for key, right in _BLOCK_CHOICES.items():
        if node[key] not in right:
            raise config_error(f"MODEL.NONLOCAL.{key}", node[key], f"not known; write one of {quoted(right)}")
    check_least(cfg, "MODEL.NONLOCAL.REDUCTION", 1, "must be 1 or more; the paper's is 2")
    if node.BLOCK == "residual":
        _check_residual(node)
    for stage in STAGES:
        positions = node[stage] if isinstance(node[stage], (list, tuple)) else [None]
        if any(isinstance(position, bool) or not isinstance(position, int) for position in positions):
            why = "must be a list of whole numbers, such as [-1]"
            raise config_error(f"MODEL.NONLOCAL.{stage}", node[stage], why)


def _check_residual(node: CfgNode) -> None:
    """Refuse options that a residual block does not have."""
    defaults = get_cfg()
    add_keys(defaults)
    for key in ("PAIRWISE", "REDUCTION", "POOL", "SCALE", "INIT"):
        default = defaults.MODEL.NONLOCAL[key]
        if node[key] != default:
            raise ConfigError(
                f"MODEL.NONLOCAL.{key} is {node[key]!r}: would be ignored, as MODEL.NONLOCAL.BLOCK is "
                f'"residual"; leave it at {default!r}, or write "non_local" there'
            )


def _check_backbone(cfg: CfgNode) -> None:
    node, name = cfg.MODEL.NONLOCAL, cfg.MODEL.BACKBONE.NAME
    asked = [stage for stage in STAGES if len(node[stage])]
    if name == WRAPPER:
        if not asked:
            raise ConfigError(
                f"MODEL.BACKBONE.NAME is {WRAPPER!r}: no block would be inserted, as RES2 to RES5 of "
                "MODEL.NONLOCAL are all empty; write MODEL.NONLOCAL.RES4 [-1], or MODEL.BACKBONE.NAME "
                f'"{node.BACKBONE}"'
            )
        why = None
        if node.BACKBONE == WRAPPER:
            why = 'the wrapper cannot wrap itself; write a builder, such as "build_resnet_fpn_backbone"'
        elif node.BACKBONE not in BACKBONE_REGISTRY:
            known = sorted(key for key, _ in BACKBONE_REGISTRY if key != WRAPPER)
            why = f"not registered; write one of {quoted(known)}"
        if why:
            raise config_error("MODEL.NONLOCAL.BACKBONE", node.BACKBONE, why)
    elif asked:
        raise ConfigError(
            f"MODEL.NONLOCAL.{asked[0]} is {list(node[asked[0]])}: would be ignored, as MODEL.BACKBONE.NAME "
            f'is "{name}"; write MODEL.BACKBONE.NAME "{WRAPPER}" and MODEL.NONLOCAL.BACKBONE "{name}"'
        )


def check_loaded(
    cfg: CfgNode, model: nn.Module, fresh_blocks: Iterable[str], *, resumed: bool = False
) -> None:
    """Check a model that has its weights, before it is trained; warn of frozen norms on random weights.

    Args:
        cfg: the config.
        model: the model, not wrapped for several processes.
        fresh_blocks: names of the inserted blocks that no file gave weights to.
        resumed: whether the weights come from a checkpoint of the run itself.

    Raises:
        ConfigError: such a block is frozen, so that it would stay an identity.
    """
    if not resumed and not cfg.MODEL.WEIGHTS and cfg.MODEL.RESNETS.NORM == "FrozenBN":
        logger.warning(
            'MODEL.WEIGHTS is empty and MODEL.RESNETS.NORM is "FrozenBN", which does nothing to random '
            "weights: deep nets overflow. Give weights, or train from scratch with MODEL.RESNETS.NORM "
            '"BN" and MODEL.BACKBONE.FREEZE_AT 0'
        )
    for name in fresh_blocks:
        if any(parameter.requires_grad for parameter in model.get_submodule(name).parameters()):
            continue
        found = re.search(r"(?:^|\.)res([2-5])\.(non_local|residual)_\d+$", name)
        if found is None:
            raise ConfigError(f"the new block {name} is frozen, so it would stay an identity")
        stage, kind = int(found[1]), found[2].replace("_", "-")
        raise ConfigError(
            f"MODEL.BACKBONE.FREEZE_AT is {cfg.MODEL.BACKBONE.FREEZE_AT}: it freezes res{stage} and "
            f"the new {kind} block {name} in it, which would stay an identity; write "
            f"MODEL.BACKBONE.FREEZE_AT {stage - 1} or less, leave MODEL.NONLOCAL.RES{stage} empty, or "
            "give MODEL.WEIGHTS that hold the block"
        )
