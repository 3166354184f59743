"""torchvision's ResNet, whose names mmdetection and many others share."""

from __future__ import annotations

from nonlocal_det.convert.draft import TORCHVISION_PIXELS, Net, Source

_BLOCK = r"layer(?P<layer>[1-4])\.(?P<i>\d+)\."
RESNET_RULES = {
    r"(?:conv|(?P<norm>bn))1": "stem.conv1",
    _BLOCK + r"(?:conv|(?P<norm>bn))(?P<n>[1-3])": "res{stage}.{i}.conv{n}",
    _BLOCK + r"downsample\.(?:0|(?P<norm>1))": "res{stage}.{i}.shortcut",
}

TORCHVISION = Source(
    name="torchvision",
    rules=RESNET_RULES,
    skips={r"fc\.(weight|bias)": "ImageNet's classifier"},
    net=Net(TORCHVISION_PIXELS, stride_in_1x1=False, unpadded_pool=False),
)
