"""mmaction2's ResNet3d with mmcv's NonLocal3d after a residual block."""

from __future__ import annotations

from nonlocal_det.convert.draft import TORCHVISION_PIXELS, Net, Source
from nonlocal_det.convert.sources.mmdetection import MMCV_MODULES, MMCV_NORMS, MMCV_SCALE, fill_mmcv_biases

_BLOCK = r"(?:backbone\.)?layer(?P<layer>[1-4])\.(?P<i>\d+)\."

MMACTION2 = Source(
    name="mmaction2",
    rules={
        r"(?:backbone\.)?conv1\.(?:conv|(?P<norm>bn))": "stem.conv1",
        _BLOCK + r"conv(?P<n>[1-3])\.(?:conv|(?P<norm>bn))": "res{stage}.{i}.conv{n}",
        _BLOCK + r"downsample\.(?:conv|(?P<norm>bn))": "res{stage}.{i}.shortcut",
    },
    modules=MMCV_MODULES,
    places={_BLOCK.replace("<i>", "<after>") + "non_local_block": "res{stage}.non_local_{place}"},
    skips={r"(cls_head|roi_head)\..*": "the classifier of videos"},
    scale=MMCV_SCALE,
    block_norms=MMCV_NORMS,
    net=Net(
        TORCHVISION_PIXELS,
        stride_in_1x1=False,
        unpadded_pool=False,
        norm="BN",
        notes=('the ResNet is taken to be of style "pytorch", as the file does not say',),
    ),
    finish=fill_mmcv_biases,
)
