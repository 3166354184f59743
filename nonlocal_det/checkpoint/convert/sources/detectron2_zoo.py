"""Detectron2's own checkpoints, and ours: the names are the model's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nonlocal_det.checkpoint.convert.draft import TORCHVISION_PIXELS, Draft, Source


def _prepare(
    tensors: dict[str, Any], rest: Mapping[str, Any], draft: Draft
) -> tuple[dict[str, Any], dict[str, str]]:
    if rest.get("__author__") == "torchvision":
        draft.pixels, draft.stride_in_1x1 = TORCHVISION_PIXELS, False
    return tensors, {name: name for name in tensors}


DETECTRON2 = Source(
    name="detectron2",
    title="Detectron2",
    marks=(r"(^|\.)res[2-5]\.\d+\.conv1\.weight$|(^|\.)(res[2-5]|keypoint_head)\.non_local_\d+\.g\.weight$",),
    rules={r".*": "{0}"},
    modules={name: name for name in ("theta", "phi", "g", "w_z", "w_z.norm", "w_f")},
    places={
        r"(?:.*\.)?(?P<place>res[2-5]\.non_local_\d+)": "{place}",
        r"(?:.*\.)?(?P<place>keypoint_head\.non_local_\d+)": "{place}",
    },
    skips={
        r"(fc|fc1000|linear)\.(weight|bias)": "ImageNet's classifier",
        r"(?:.*\.)?cell_anchors\.\d+": "made from the config",
        r"pixel_(mean|std)": "made from the config",
    },
    pool=("input", "embedding", "none"),
    scale={"embedded_gaussian": (True, False), "gaussian": (True, False)},
    prepare=_prepare,
)
