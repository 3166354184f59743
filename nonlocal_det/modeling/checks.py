"""What can be wrong with MODEL.NONLOCAL and the backbone before a net is built."""

from __future__ import annotations

from detectron2.config import CfgNode, get_cfg
from detectron2.modeling import BACKBONE_REGISTRY

from nonlocal_det.config.keys import BLOCKS, NORMS, STAGES, WRAPPER, add_keys
from nonlocal_det.config.messages import check_choice, config_error
from nonlocal_det.errors import quoted
from nonlocal_det.layers import INITS, PAIRWISE_FUNCTIONS, POOLS

__all__ = ["check_blocks"]

# Keys whose wrong values Detectron2 would find late, in a traceback.
_RESNET_CHOICES = {
    "MODEL.RESNETS.DEPTH": (18, 34, 50, 101, 152),
    "MODEL.RESNETS.NORM": (
        *("FrozenBN", "BN", "SyncBN", "nnSyncBN"),
        *("naiveSyncBN", "naiveSyncBN_N", "GN", "LN", ""),
    ),
}
_BLOCK_CHOICES = {
    "BLOCK": BLOCKS,
    "PAIRWISE": PAIRWISE_FUNCTIONS,
    "POOL": POOLS,
    "NORM": NORMS,
    "INIT": INITS,
}


def check_blocks(cfg: CfgNode) -> None:
    """Check the options of blocks, and that blocks asked for in the backbone have one that takes them.

    What depends on the built net (a position outside its stage, a backbone without a ResNet) is checked where
    the net is built.

    Args:
        cfg: a config with MODEL.NONLOCAL.

    Raises:
        ConfigError: the first thing found.
    """
    _check_options(cfg)
    _check_backbone(cfg)
    if any("resnet" in name for name in (cfg.MODEL.BACKBONE.NAME, cfg.MODEL.NONLOCAL.BACKBONE)):
        for key, right in _RESNET_CHOICES.items():
            check_choice(cfg, key, right)


def _check_options(cfg: CfgNode) -> None:
    node = cfg.MODEL.NONLOCAL
    if node.NORM == "FrozenBN":
        raise config_error(
            "MODEL.NONLOCAL.NORM",
            node.NORM,
            "its gamma starts at 0 and cannot be trained, so the block would be dead for ever; "
            'write "" (no norm, the frozen-BN recipe) or one of ' + quoted(NORMS[1:]),
        )
    for key, right in _BLOCK_CHOICES.items():
        if node[key] not in right:
            raise config_error(f"MODEL.NONLOCAL.{key}", node[key], f"not known; write one of {quoted(right)}")
    if node.REDUCTION < 1:
        raise config_error("MODEL.NONLOCAL.REDUCTION", node.REDUCTION, "must be 1 or more; the paper's is 2")
    if node.BLOCK == "residual":
        _check_residual(node)
    for stage in STAGES:
        positions = node[stage] if isinstance(node[stage], (list, tuple)) else [None]
        for position in positions:
            if isinstance(position, bool) or not isinstance(position, int):
                raise config_error(
                    f"MODEL.NONLOCAL.{stage}", node[stage], "must be a list of whole numbers, such as [-1]"
                )


def _check_residual(node: CfgNode) -> None:
    """Refuse options that a residual block does not have."""
    defaults = get_cfg()
    add_keys(defaults)
    for key in ("PAIRWISE", "REDUCTION", "POOL", "SCALE", "INIT"):
        default = defaults.MODEL.NONLOCAL[key]
        if node[key] != default:
            raise config_error(
                f"MODEL.NONLOCAL.{key}",
                node[key],
                f'would be ignored, as MODEL.NONLOCAL.BLOCK is "residual"; leave it at {default!r}, or write '
                '"non_local" there',
            )


def _check_backbone(cfg: CfgNode) -> None:
    node = cfg.MODEL.NONLOCAL
    asked = {f"MODEL.NONLOCAL.{stage}": node[stage] for stage in STAGES if len(node[stage])}
    name = cfg.MODEL.BACKBONE.NAME
    if name == WRAPPER:
        if not asked:
            raise config_error(
                "MODEL.BACKBONE.NAME",
                name,
                "no block would be inserted, as RES2 to RES5 of MODEL.NONLOCAL are all empty; "
                f'write MODEL.NONLOCAL.RES4 [-1], or MODEL.BACKBONE.NAME "{node.BACKBONE}"',
            )
        if node.BACKBONE == WRAPPER:
            raise config_error(
                "MODEL.NONLOCAL.BACKBONE",
                node.BACKBONE,
                'the wrapper cannot wrap itself; write a builder, such as "build_resnet_fpn_backbone"',
            )
        if node.BACKBONE not in BACKBONE_REGISTRY:
            known = sorted(key for key, _ in BACKBONE_REGISTRY if key != WRAPPER)
            raise config_error(
                "MODEL.NONLOCAL.BACKBONE", node.BACKBONE, "not registered; write one of " + quoted(known)
            )
    elif asked:
        key, value = next(iter(asked.items()))
        raise config_error(
            key,
            list(value),
            f'would be ignored, as MODEL.BACKBONE.NAME is "{name}"; write MODEL.BACKBONE.NAME "{WRAPPER}" '
            f'and MODEL.NONLOCAL.BACKBONE "{name}"',
        )
