"""Detectron2's own checkpoints, and ours: the names are the model's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nonlocal_det.convert.draft import TORCHVISION_PIXELS, Draft, Pixels, Prepared, Source
from nonlocal_det.errors import CheckpointError


def _prepare(tensors: dict[str, Any], rest: Mapping[str, Any], draft: Draft) -> Prepared:
    if rest.get("__author__") == "torchvision":
        draft.know(pixels=TORCHVISION_PIXELS, stride_in_1x1=False)
    pixels = {}
    for key in ("mean", "std"):
        if (name := f"pixel_{key}") in tensors:
            # To as many digits as float32 has, so that 103.53 is 103.53 in the config.
            pixels[key] = tuple(float(f"{value:.6g}") for value in tensors.pop(name).flatten().tolist())
            draft.skipped[name] = "in the config"
    if any(value <= 0 for value in pixels.get("std", ())):
        raise CheckpointError(f"pixel_std is {list(pixels['std'])}; pixels are divided by it")
    if pixels:
        draft.know(pixels=replace(draft.net.pixels or Pixels("", None, None), **pixels))
    return tensors, {name: name for name in tensors}


DETECTRON2 = Source(
    name="detectron2",
    modules={name: name for name in ("theta", "phi", "g", "w_z", "w_z.norm", "w_f")},
    places={
        r"(?:.*\.)?(?P<place>res[2-5]\.non_local_\d+)": "{place}",
        r"(?:.*\.)?(?P<place>keypoint_head\.non_local_\d+)": "{place}",
    },
    skips={
        r"(fc|fc1000|linear)\.(weight|bias)": "ImageNet's classifier",
        r"(?:.*\.)?cell_anchors\.\d+": "made from the config",
    },
    pool=("input", "embedding", "none"),
    scale={"embedded_gaussian": (True, False), "gaussian": (True, False)},
    prepare=_prepare,
    finish=lambda draft: None,  # ours always have biases
)
