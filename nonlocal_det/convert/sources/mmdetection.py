"""mmcv's NonLocal2d, alone or as a plugin of mmdetection's ResNet."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from nonlocal_det.convert.draft import (
    CAFFE_PIXELS,
    TORCHVISION_PIXELS,
    Draft,
    Net,
    Prepared,
    Source,
    fill_bias,
    fill_biases,
)
from nonlocal_det.convert.sources.torchvision_resnet import RESNET_RULES
from nonlocal_det.errors import CheckpointError

# ConvModule: a conv and its norm, under the norm's kind. A pooled one is the first of a Sequential.
MMCV_MODULES = {
    "theta.conv": "theta",
    "phi.conv": "phi",
    "phi.0.conv": "phi",
    "g.conv": "g",
    "g.0.conv": "g",
    "conv_out.conv": "w_z",
    "conv_out.bn": "w_z.norm",
    "conv_out.gn": "w_z.norm",
    "concat_project.conv": "w_f",
}
MMCV_NORMS = {"conv_out.bn": "BN", "conv_out.gn": "GN"}
# use_scale is for the embedded form alone.
MMCV_SCALE = {"embedded_gaussian": (True, False), "gaussian": (False,)}
# Faster and Mask R-CNN with FPN, from mmdetection 2: classes in Detectron2's order, the background last.
_DETECTOR_RULES = {
    r"neck\.lateral_convs\.(?P<level>[0-3])\.conv": "backbone.fpn_lateral{stage}",
    r"neck\.fpn_convs\.(?P<level>[0-3])\.conv": "backbone.fpn_output{stage}",
    r"rpn_head\.rpn_conv": "proposal_generator.rpn_head.conv",
    r"rpn_head\.rpn_cls": "proposal_generator.rpn_head.objectness_logits",
    r"rpn_head\.rpn_reg": "proposal_generator.rpn_head.anchor_deltas",
    r"roi_head\.bbox_head\.shared_fcs\.(?P<i>\d)": "roi_heads.box_head.fc{next}",
    r"roi_head\.bbox_head\.fc_cls": "roi_heads.box_predictor.cls_score",
    r"roi_head\.bbox_head\.fc_reg": "roi_heads.box_predictor.bbox_pred",
    r"roi_head\.mask_head\.convs\.(?P<i>\d)\.conv": "roi_heads.mask_head.mask_fcn{next}",
    r"roi_head\.mask_head\.upsample": "roi_heads.mask_head.deconv",
    r"roi_head\.mask_head\.conv_logits": "roi_heads.mask_head.predictor",
}


def fill_mmcv_biases(draft: Draft) -> None:
    """Give mmcv's convs biases where they have none: all alike, and conv_out before a norm."""
    fill_biases(draft)
    for parts in draft.blocks.values():
        if {"w_z.weight", "w_z.norm.weight"} <= parts.keys() and "w_z.bias" not in parts:
            fill_bias(parts, "w_z")


def _prepare(tensors: dict[str, Any], rest: Mapping[str, Any], draft: Draft) -> Prepared:
    meta = rest.get("meta")
    meta = meta if isinstance(meta, Mapping) else {}
    config = next((meta[key] for key in ("cfg", "config") if isinstance(meta.get(key), str)), "")
    caffe = re.search(r"style=['\"]caffe['\"]", config) is not None
    names: dict[str, str] = {}
    for name in tensors:
        short = name.removeprefix("backbone.")
        if short in names:
            raise CheckpointError(f"both {names[short]} and {name} are {short} of the backbone")
        names[short] = name
    where = "as the config in the file says" if config else "as the file does not say otherwise"
    draft.know(
        pixels=CAFFE_PIXELS if caffe else TORCHVISION_PIXELS,
        stride_in_1x1=caffe,
        notes=(f'the ResNet is taken to be of style "{"caffe" if caffe else "pytorch"}", {where}',),
    )
    return {short: tensors[name] for short, name in names.items()}, names


def _finish(draft: Draft) -> None:
    fill_mmcv_biases(draft)
    draft.inside_branch = set(draft.places)  # where the plugin is


MMDETECTION = Source(
    name="mmdetection",
    rules={**RESNET_RULES, **_DETECTOR_RULES},
    modules=MMCV_MODULES,
    places={r"layer(?P<layer>[1-4])\.(?P<after>\d+)\.nonlocal_block\w*": "res{stage}.non_local_{place}"},
    skips={
        r"(bbox_head|mask_head|decode_head|auxiliary_head)\..*": "a head that Detectron2 has no equal of",
        r"(backbone\.)?fc\.(weight|bias)": "ImageNet's classifier",
    },
    scale=MMCV_SCALE,
    block_norms=MMCV_NORMS,
    net=Net(unpadded_pool=False, norm="BN"),
    prepare=_prepare,
    finish=_finish,
)
