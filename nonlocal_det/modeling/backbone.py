"""A backbone wrapper that puts non-local blocks into the ResNet of any registered backbone (Sec. 5)."""

from __future__ import annotations

import logging
from functools import partial

from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY, Backbone
from detectron2.modeling.backbone.resnet import ResNet
from tabulate import tabulate
from torch import nn

from nonlocal_det.config.keys import STAGES
from nonlocal_det.errors import ConfigError, counted
from nonlocal_det.modeling.block import BlockOptions, StageNonLocalBlock, build_residual_block
from nonlocal_det.modeling.insertion import insert_blocks, resolve_positions

logger = logging.getLogger(__name__)

_HEADERS = ("name", "where (blocks from 0)", "C", "C'", "parameters", "state")


@BACKBONE_REGISTRY.register()
def build_nonlocal_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> Backbone:
    """Build the backbone that MODEL.NONLOCAL.BACKBONE names, and insert the blocks that RES2 to RES5 ask for.

    A block before residual block i of res4 is named ``res4.non_local_i``, or ``res4.residual_i`` where
    MODEL.NONLOCAL.BLOCK is "residual"; all other names stay, so checkpoints of the wrapped backbone load.
    Blocks in a stage that MODEL.BACKBONE.FREEZE_AT freezes are frozen too. What was inserted is logged.

    Args:
        cfg: a config with MODEL.NONLOCAL (see :func:`nonlocal_det.add_nonlocal_config`).
        input_shape: shape of the images.

    Raises:
        ConfigError: MODEL.NONLOCAL is missing or names no place, the backbone has no ResNet or lacks a stage
            or what RetinaNet reads, or a position is outside its stage or named twice.
    """
    options = BlockOptions.from_config(cfg)
    node = cfg.MODEL.NONLOCAL
    backbone = BACKBONE_REGISTRY.get(node.BACKBONE)(cfg, input_shape)
    resnet = _find_resnet(backbone, node.BACKBONE)
    _check_retinanet(cfg, backbone)
    rows = []
    for index, key in enumerate(STAGES, start=2):
        if not len(node[key]):
            continue
        stage, name = _find_stage(resnet, key, node), key.lower()
        count = len(stage)
        positions = resolve_positions(f"MODEL.NONLOCAL.{key}", node[key], count)
        if node.BLOCK == "residual":
            make = partial(build_residual_block, stage[-1], norm=options.norm)
        else:
            make = partial(options.build, block=StageNonLocalBlock)
        inserted = insert_blocks(stage, positions, node.BLOCK, make)
        for position, (block_name, block) in zip(positions, inserted, strict=True):
            if index <= cfg.MODEL.BACKBONE.FREEZE_AT:
                block.freeze()
            rows.append(_table_row(f"{name}.{block_name}", position, count, block))
    _log(rows, node, options)
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


def _find_stage(resnet: ResNet, key: str, node: CfgNode) -> nn.Sequential:
    if key.lower() not in resnet.stage_names:
        raise ConfigError(
            f"MODEL.NONLOCAL.{key} is {list(node[key])}: the ResNet of {node.BACKBONE} has "
            f"{', '.join(resnet.stage_names)} alone (in a C4 model res5 belongs to the RoI heads); write "
            f"MODEL.NONLOCAL.{resnet.stage_names[-1].upper()} [-1]"
        )
    return getattr(resnet, key.lower())


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


def _table_row(name: str, position: int, count: int, block: nn.Module) -> tuple:
    where = f"before block {position} of {count}" if position < count else f"after the last of {count} blocks"
    inner = block.inter_channels if isinstance(block, StageNonLocalBlock) else block.conv1.out_channels
    trained = any(parameter.requires_grad for parameter in block.parameters())
    state = "trained" if trained else "frozen (FREEZE_AT)"
    return name, where, block.in_channels, inner, sum(x.numel() for x in block.parameters()), state


def _log(rows: list[tuple], node: CfgNode, options: BlockOptions) -> None:
    logger.info(
        "Inserted %s%s with %s parameters into %s:\n%s",
        counted(len(rows), f"{node.BLOCK.replace('_', '-')} block"),
        f" ({options.pairwise})" if node.BLOCK == "non_local" else "",
        f"{sum(row[-2] for row in rows):,}",
        node.BACKBONE,
        tabulate(rows, _HEADERS, "pipe", intfmt=","),
    )
