"""mmcv's NonLocal2d, alone or as a plugin of mmdetection's ResNet."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from nonlocal_det.checkpoint.convert.draft import TORCHVISION_PIXELS, Draft, Pixels, Source
from nonlocal_det.checkpoint.convert.sources.torchvision_resnet import RESNET_RULES

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
# use_scale is for the embedded form alone.
MMCV_SCALE = {"embedded_gaussian": (True, False), "gaussian": (False,)}
_CAFFE_PIXELS = Pixels("BGR", (103.53, 116.28, 123.675), (1.0, 1.0, 1.0))


def _prepare(
    tensors: dict[str, Any], rest: Mapping[str, Any], draft: Draft
) -> tuple[dict[str, Any], dict[str, str]]:
    meta = rest.get("meta")
    meta = meta if isinstance(meta, Mapping) else {}
    config = next((meta[key] for key in ("cfg", "config") if isinstance(meta.get(key), str)), "")
    caffe = re.search(r"style=['\"]caffe['\"]", config) is not None
    names = {name.removeprefix("backbone."): name for name in tensors}
    if "conv1.weight" not in names:
        draft.pixels = None  # blocks alone
    else:
        draft.pixels = _CAFFE_PIXELS if caffe else TORCHVISION_PIXELS
        draft.stride_in_1x1 = caffe
        where = "as the config in the file says" if config else "as the file does not say otherwise"
        draft.notes.append(f'the ResNet is taken to be of style "{"caffe" if caffe else "pytorch"}", {where}')
    return {short: tensors[name] for short, name in names.items()}, names


MMDETECTION = Source(
    name="mmdetection",
    title="mmdetection's ResNet and mmcv's NonLocal2d",
    marks=(r"(^|\.)conv_out\.conv\.weight$|^backbone\.layer1\.0\.conv1\.weight$",),
    rules=RESNET_RULES,
    modules=MMCV_MODULES,
    places={r"layer(?P<layer>[1-4])\.(?P<after>\d+)\.nonlocal_block\w*": "res{stage}.non_local_{place}"},
    inside_branch=r"layer[1-4]\.\d+\.nonlocal_block\w*",
    skips={
        r"(neck|rpn_head|bbox_head|roi_head|mask_head|shared_head|decode_head|auxiliary_head)\..*": (
            "mmdetection's necks and heads are not converted"
        ),
        r"(backbone\.)?fc\.(weight|bias)": "ImageNet's classifier",
    },
    pool="by name",
    scale=MMCV_SCALE,
    prepare=_prepare,
)
