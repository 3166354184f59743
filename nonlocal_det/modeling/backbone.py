"""A backbone wrapper that puts non-local blocks into the ResNet of any registered backbone (Sec. 5)."""

from __future__ import annotations

import logging

from detectron2.config import CfgNode
from detectron2.layers import CNNBlockBase, ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY, Backbone
from detectron2.modeling.backbone.resnet import ResNet
from tabulate import tabulate

from nonlocal_det.config.keys import STAGES, WRAPPER
from nonlocal_det.errors import ConfigError
from nonlocal_det.modeling.block import (
    BlockOptions,
    StageNonLocalBlock,
    build_residual_block,
    replace_children,
)

__all__ = ["build_nonlocal_backbone"]

logger = logging.getLogger(__name__)


@BACKBONE_REGISTRY.register()
def build_nonlocal_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> Backbone:
    """Build the backbone named by MODEL.NONLOCAL.BACKBONE and insert the blocks that RES2 to RES5 ask for.

    A block before residual block i of res4 is named ``res4.non_local_i``, or ``res4.residual_i`` where
    MODEL.NONLOCAL.BLOCK is "residual"; the names of everything else stay as they are, so checkpoints of the
    wrapped backbone load. Blocks in a stage that MODEL.BACKBONE.FREEZE_AT
    freezes are frozen too. What was inserted where is logged.

    Args:
        cfg: a config with MODEL.NONLOCAL (see :func:`nonlocal_det.add_nonlocal_config`).
        input_shape: shape of the images.

    Returns:
        The wrapped builder's backbone, changed in place.

    Raises:
        ConfigError: MODEL.NONLOCAL is missing or wrong, the backbone has no ResNet or lacks a stage, a
            position is outside its stage or named twice, or the outputs are not those that RetinaNet reads.
    """
    options = BlockOptions.from_config(cfg)
    node = cfg.MODEL.NONLOCAL
    backbone = BACKBONE_REGISTRY.get(node.BACKBONE)(cfg, input_shape)
    resnet = _find_resnet(backbone, node.BACKBONE)
    _check_retinanet(cfg, backbone)

    rows = []
    for stage_index, key in enumerate(STAGES, start=2):
        if not len(node[key]):
            continue
        name = key.lower()
        if name not in resnet.stage_names:
            raise ConfigError(
                f"MODEL.NONLOCAL.{key} is {list(node[key])}: the ResNet of {node.BACKBONE} has "
                f"{', '.join(resnet.stage_names)} alone (in a C4 model res5 belongs to the RoI heads); write "
                f"MODEL.NONLOCAL.{resnet.stage_names[-1].upper()} [-1]"
            )
        stage = getattr(resnet, name)
        residual = list(stage.named_children())
        blocks = {}
        for position in _resolve(key, node[key], len(residual)):
            # What a block reads is what the residual block before it made; the first reads its own input.
            channels = residual[position - 1][1].out_channels if position else residual[0][1].in_channels
            if node.BLOCK == "residual":
                block = build_residual_block(residual[-1][1], channels, options.norm)
            else:
                block = options.build(channels, StageNonLocalBlock)
            if stage_index <= cfg.MODEL.BACKBONE.FREEZE_AT:
                block.freeze()
            blocks[position] = block
            rows.append(_table_row(f"{name}.{node.BLOCK}_{position}", position, len(residual), block))
        children = []
        for position, child in enumerate([*residual, None]):
            if position in blocks:
                children.append((f"{node.BLOCK}_{position}", blocks[position]))
            if child is not None:
                children.append(child)
        replace_children(stage, children)

    if not rows:
        raise ConfigError(
            f'MODEL.BACKBONE.NAME is "{WRAPPER}": no block would be inserted, as RES2 to RES5 of MODEL.NONLOCAL '
            f'are all empty; write MODEL.NONLOCAL.RES4 [-1], or MODEL.BACKBONE.NAME "{node.BACKBONE}"'
        )
    total = sum(row[-2] for row in rows)
    logger.info(
        "Inserted %d %s block%s%s with %s parameters into %s:\n%s",
        len(rows),
        node.BLOCK.replace("_", "-"),
        "" if len(rows) == 1 else "s",
        f" ({options.pairwise})" if node.BLOCK == "non_local" else "",
        f"{total:,}",
        node.BACKBONE,
        tabulate(
            rows, ("name", "where (blocks from 0)", "C", "C'", "parameters", "state"), "pipe", intfmt=","
        ),
    )
    return backbone


def _find_resnet(backbone: Backbone, builder: str) -> ResNet:
    found = [module for module in backbone.modules() if isinstance(module, ResNet)]
    if len(found) != 1:
        raise ConfigError(
            f"MODEL.NONLOCAL.BACKBONE is {builder!r}: it made {type(backbone).__name__} with "
            f"{len(found) or 'no'} ResNet inside, but blocks go into one; write a builder such as "
            '"build_resnet_fpn_backbone"'
        )
    return found[0]


def _check_retinanet(cfg: CfgNode, backbone: Backbone) -> None:
    if cfg.MODEL.META_ARCHITECTURE != "RetinaNet":
        return
    made = backbone.output_shape()
    lacking = [name for name in cfg.MODEL.RETINANET.IN_FEATURES if name not in made]
    if lacking:
        raise ConfigError(
            f"MODEL.NONLOCAL.BACKBONE is {cfg.MODEL.NONLOCAL.BACKBONE!r}: RetinaNet reads "
            f"{', '.join(lacking)}, which it does not make (it makes {', '.join(made)}); write "
            '"build_retinanet_resnet_fpn_backbone"'
        )


def _resolve(key: str, positions: list[int], count: int) -> list[int]:
    """Return the positions counted from 0, sorted; ``count`` is the number of residual blocks."""
    resolved: list[int] = []
    for position in positions:
        if not -count <= position <= count:
            raise ConfigError(
                f"MODEL.NONLOCAL.{key} is {list(positions)}: {position} is outside the stage, which has "
                f"{count} blocks; write {-count} to {count} (-1 is before the last block, {count} after it)"
            )
        index = position + count if position < 0 else position
        if index in resolved:
            raise ConfigError(
                f"MODEL.NONLOCAL.{key} is {list(positions)}: place {index} is named twice (of {count} blocks "
                f"the last is -1 or {count - 1}, and the first {-count} or 0); write each place once"
            )
        resolved.append(index)
    return sorted(resolved)


def _table_row(name: str, position: int, count: int, block: CNNBlockBase | StageNonLocalBlock) -> tuple:
    where = f"before block {position} of {count}" if position < count else f"after the last of {count} blocks"
    parameters = list(block.parameters())
    return (
        name,
        where,
        block.in_channels,
        block.inter_channels if isinstance(block, StageNonLocalBlock) else block.conv1.out_channels,
        sum(parameter.numel() for parameter in parameters),
        "trained" if any(parameter.requires_grad for parameter in parameters) else "frozen (FREEZE_AT)",
    )
