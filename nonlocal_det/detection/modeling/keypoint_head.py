"""The keypoint head of Sec. 5.2: Detectron2's convs with a non-local block after every few of them."""

from __future__ import annotations

import logging
from typing import Any

from detectron2.config import CfgNode, configurable
from detectron2.layers import ShapeSpec
from detectron2.modeling.roi_heads import ROI_KEYPOINT_HEAD_REGISTRY, KRCNNConvDeconvUpsampleHead
from torch import nn

from nonlocal_det.errors import ConfigError
from nonlocal_det.modeling.block import BlockOptions
from nonlocal_det.modeling.insertion import replace_children

logger = logging.getLogger(__name__)


@ROI_KEYPOINT_HEAD_REGISTRY.register()
class NonLocalKeypointHead(KRCNNConvDeconvUpsampleHead):
    """Detectron2's keypoint head with a non-local block after every k convs.

    The paper puts one after every 2 of the 8 convs (Sec. 5.2): ``non_local_2`` follows ``conv_fcn_relu2``,
    and so on to ``non_local_8``. The convs keep their names, so a baseline's checkpoint loads.

    Args:
        input_shape: shape of a RoI's features.
        num_keypoints: K, the number of keypoints.
        conv_dims: output channels of each conv; a block takes the number of the conv before it.
        nonlocal_every: k, at least 1 and at most the number of convs.
        nonlocal_options: the options of the blocks; the defaults unless given.
        kwargs: what :class:`KRCNNConvDeconvUpsampleHead` takes besides.

    Raises:
        ConfigError: no conv is followed by a block.
    """

    @configurable
    def __init__(
        self,
        input_shape: ShapeSpec,
        *,
        num_keypoints: int,
        conv_dims: list[int],
        nonlocal_every: int,
        nonlocal_options: BlockOptions | None = None,
        **kwargs: Any,
    ) -> None:
        # The parent sets every weight of its children, one-dimensional norms too, so blocks come after it.
        super().__init__(input_shape, num_keypoints=num_keypoints, conv_dims=conv_dims, **kwargs)
        if not 1 <= nonlocal_every <= len(conv_dims):
            raise ConfigError(
                f"MODEL.NONLOCAL.KEYPOINT_HEAD is {nonlocal_every}: no block would be inserted into a head "
                f"of {len(conv_dims)} convs; write 1 to {len(conv_dims)}, such as 2"
            )
        options = nonlocal_options or BlockOptions()
        children: list[tuple[str, nn.Module]] = []
        blocks: list[nn.Module] = []
        for name, child in self.named_children():
            children.append((name, child))
            for index, channels in enumerate(conv_dims, start=1):
                if name == f"conv_fcn_relu{index}" and index % nonlocal_every == 0:
                    blocks.append(options.build(channels))
                    children.append((f"non_local_{index}", blocks[-1]))
        replace_children(self, children)
        logger.info(
            "Inserted %d non-local blocks (%s) with %s parameters into the keypoint head: one after every "
            "%d of its %d convs",
            len(blocks),
            options.pairwise,
            f"{sum(p.numel() for block in blocks for p in block.parameters()):,}",
            nonlocal_every,
            len(conv_dims),
        )

    @classmethod
    def from_config(cls, cfg: CfgNode, input_shape: ShapeSpec) -> dict[str, Any]:
        """Read the constructor's arguments from a config.

        Raises:
            ConfigError: the config has no MODEL.NONLOCAL.
        """
        options = BlockOptions.from_config(cfg)
        blocks = {"nonlocal_every": cfg.MODEL.NONLOCAL.KEYPOINT_HEAD, "nonlocal_options": options}
        return super().from_config(cfg, input_shape) | blocks
