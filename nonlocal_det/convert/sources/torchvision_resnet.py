"""torchvision's ResNet, whose names mmdetection and many others share."""

from __future__ import annotations

from nonlocal_det.convert.draft import TORCHVISION_PIXELS, Net, Source

_BLOCK = r"layer(?P<layer>[1-4])\.(?P<i>\d+)\."
RESNET_RULES = {
    r"conv1\.(?P<leaf>weight|bias)": "stem.conv1.{leaf}",
    r"bn1\.(?P<leaf>\w+)": "stem.conv1.norm.{leaf}",
    _BLOCK + r"conv(?P<n>[1-3])\.(?P<leaf>weight|bias)": "res{stage}.{i}.conv{n}.{leaf}",
    _BLOCK + r"bn(?P<n>[1-3])\.(?P<leaf>\w+)": "res{stage}.{i}.conv{n}.norm.{leaf}",
    _BLOCK + r"downsample\.0\.(?P<leaf>weight|bias)": "res{stage}.{i}.shortcut.{leaf}",
    _BLOCK + r"downsample\.1\.(?P<leaf>\w+)": "res{stage}.{i}.shortcut.norm.{leaf}",
}

TORCHVISION = Source(
    name="torchvision",
    rules=RESNET_RULES,
    skips={r"fc\.(weight|bias)": "ImageNet's classifier"},
    net=Net(TORCHVISION_PIXELS, stride_in_1x1=False, unpadded_pool=False),
)
