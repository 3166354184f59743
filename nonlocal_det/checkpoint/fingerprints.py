"""Whose weights a file holds, told by the names of its tensors."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import NamedTuple


class Fingerprint(NamedTuple):
    """How a program's weights are told: each of the marks, which are patterns, is found in some name."""

    title: str
    marks: tuple[str, ...]


#: By short name; the more particular first, as others' marks are found in their names too.
FINGERPRINTS = {
    "authors": Fingerprint(
        "the authors' Caffe2 nets",
        (r"^conv1_w$", r"^res2_0_branch2a_w$", r"^nonlocal_conv\d_\d+_theta_w$|_bn_riv$"),
    ),
    "caffe2": Fingerprint(
        "Caffe2 (MSRA's ImageNet backbones, Detectron)", (r"^conv1_w$", r"^res2_0_branch2a_w$")
    ),
    "mmaction2": Fingerprint("mmaction2's ResNet3d", (r"(^|\.)layer1\.0\.conv1\.conv\.weight$",)),
    "mmdetection": Fingerprint(
        "mmdetection and mmcv's NonLocal2d",
        (r"(^|\.)conv_out\.conv\.weight$|^backbone\.layer1\.0\.conv1\.weight$",),
    ),
    "slowfast": Fingerprint(
        "SlowFast", (r"(^|\.)conv_theta\.(weight|bias)$|^s2\.pathway0_res0\.branch2\.a\.weight$",)
    ),
    "nonlocal_pytorch": Fingerprint(
        "Non-local_pytorch", (r"(^|\.)g\.(0\.)?(weight|bias)$", r"(^|\.)W\.(0\.)?(weight|bias)$")
    ),
    "torchvision": Fingerprint("torchvision's ResNet", (r"^layer1\.0\.conv1\.weight$", r"^bn1\.weight$")),
    "detectron2": Fingerprint(
        "Detectron2",
        (r"(^|\.)res[2-5]\.\d+\.conv1\.weight$|(^|\.)(res[2-5]|keypoint_head)\.non_local_\d+\.g\.weight$",),
    ),
    "onnx": Fingerprint("ONNX", (r"(?!)",)),  # known by its file, not by names
}


def likely_sources(names: Collection[str]) -> list[str]:
    """Return whose weights tensors of these names may be, by short name, the likeliest first."""
    return [
        source
        for source, fingerprint in FINGERPRINTS.items()
        if all(any(re.search(mark, name) for name in names) for mark in fingerprint.marks)
    ]
