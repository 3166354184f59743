"""The block as a member of a ResNet's stage, and blocks made from a config."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from detectron2.config import CfgNode
from detectron2.layers import CNNBlockBase
from detectron2.layers.batch_norm import NaiveSyncBatchNorm
from detectron2.modeling.backbone.resnet import BasicBlock, BottleneckBlock
from torch import nn

from nonlocal_det.errors import ConfigError
from nonlocal_det.layers import NonLocalBlock
from nonlocal_det.modeling.checks import check_options

logger = logging.getLogger(__name__)


class StageNonLocalBlock(NonLocalBlock):
    """A non-local block with what a ResNet stage asks of its members. Arguments: :class:`NonLocalBlock`'s.

    :class:`detectron2.layers.CNNBlockBase` cannot be a second base: the two ``__init__`` would call each
    other with the wrong arguments.
    """

    def __init__(self, in_channels: int, *args: Any, **options: Any) -> None:
        super().__init__(in_channels, *args, **options)
        self.out_channels = in_channels
        self.stride = 1

    freeze = CNNBlockBase.freeze


def _naive_sync_batch_norm(channels: int) -> nn.Module:
    # "N" weighs every rank by its batch: a rank may have no RoI at all.
    return NaiveSyncBatchNorm(channels, stats_mode="N")


@dataclass(frozen=True)
class BlockOptions:
    """The options of :class:`NonLocalBlock` that all blocks of a model share; C' = max(1, C // reduction)."""

    pairwise: str = "embedded_gaussian"
    reduction: int = 2
    pool: str = "input"
    scale: bool = True
    norm: str | Callable[[int], nn.Module] = ""
    init: str = "msra"

    @classmethod
    def from_config(cls, cfg: CfgNode) -> BlockOptions:
        """Read MODEL.NONLOCAL; raise a ConfigError where the config has none, or a wrong one."""
        if "NONLOCAL" not in cfg.MODEL:
            raise ConfigError(
                "MODEL.NONLOCAL is missing: call nonlocal_det.add_nonlocal_config(cfg) right after "
                "get_cfg(), before a file is merged"
            )
        check_options(cfg)  # the config of a user's own script comes here without get_config
        node = cfg.MODEL.NONLOCAL
        if node.INIT == "normal" and not node.NORM:
            logger.warning(
                'MODEL.NONLOCAL.INIT "normal" without a norm may learn slowly: theta, phi and g start at '
                '0.01 and W_z at 0; write INIT "msra", or a norm such as NORM "BN"'
            )
        norm = _naive_sync_batch_norm if node.NORM == "naiveSyncBN" else node.NORM
        return cls(node.PAIRWISE, node.REDUCTION, node.POOL, node.SCALE, norm, node.INIT)

    def build(self, channels: int, block: type[NonLocalBlock] = NonLocalBlock) -> NonLocalBlock:
        """Make a block of a class for maps of C channels."""
        options = dict(vars(self))
        return block(channels, max(1, channels // options.pop("reduction")), ndim=2, **options)


def build_residual_block(
    like: BasicBlock | BottleneckBlock, channels: int, norm: str | Callable[[int], nn.Module] = ""
) -> BasicBlock | BottleneckBlock:
    """Make an ordinary residual block that starts as an identity: what a non-local block is compared with.

    Its last gamma is 0, or without a norm its last conv. Its input, which a ReLU has made, is not negative.

    Args:
        like: a block of the stage. The new one has its kind, groups, dilation and ratio of inner channels.
        channels: C of the input and the output, [B, C, H, W].
        norm: the norm after every conv: a name that Detectron2 knows, or a callable channels -> module.
    """
    if isinstance(like, BasicBlock):
        block = BasicBlock(channels, channels, norm=norm)
        last = block.conv2
    else:
        block = BottleneckBlock(
            channels,
            channels,
            bottleneck_channels=like.conv1.out_channels * channels // like.out_channels,
            num_groups=like.conv2.groups,
            dilation=like.conv2.dilation[0],
            norm=norm,
        )
        last = block.conv3
    nn.init.zeros_(last.weight if last.norm is None else last.norm.weight)
    return block
