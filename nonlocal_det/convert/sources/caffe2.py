"""Caffe2 pickles: the ImageNet backbones of MSRA's lineage, and Detectron's models."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from detectron2.checkpoint.c2_model_loading import convert_c2_detectron_names

from nonlocal_det.convert.draft import Draft, Pixels, Source
from nonlocal_det.errors import CheckpointError

MEAN = (103.53, 116.28, 123.675)
MSRA_PIXELS = Pixels("BGR", MEAN, (1.0, 1.0, 1.0))
# The one ResNeXt of Detectron's zoo whose images were divided: X-101-32x8d.
RESNEXT_101_PIXELS = Pixels("BGR", MEAN, (57.375, 57.12, 58.395))

TRAINING_STATE = {
    r".*_momentum": "the optimiser's state",
    r"lr|model_iter|weight_order": "the training's state",
}


def rename(tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Give Caffe2's tensors Detectron2's names, by Detectron2's own tables.

    Returns:
        The tensors by their new names, and new name -> name in the file.

    Raises:
        CheckpointError: two tensors have one name.
    """
    try:
        return convert_c2_detectron_names(tensors)
    except AssertionError:
        raise CheckpointError("two tensors of the file have the same name in Detectron2") from None


def _prepare(
    tensors: dict[str, Any], rest: Mapping[str, Any], draft: Draft
) -> tuple[dict[str, Any], dict[str, str]]:
    renamed, origins = rename(tensors)
    wide = renamed.get("res2.0.conv2.weight")
    grouped = wide is not None and wide.dim() == 4 and wide.shape[0] != wide.shape[1]
    deep = sum(re.fullmatch(r"res4\.\d+\.conv1\.weight", name) is not None for name in renamed)
    backbone = [name for name in origins.values() if re.match(r"(res_)?conv1_|res[2-5]_\d", name)]
    kinds = {kind for kind in ("bn", "gn") if any(f"_{kind}_" in name for name in backbone)}
    if len(kinds) > 1:
        raise CheckpointError("the file's ResNet has batch norms and group norms; Detectron2's has one kind")
    draft.norm = "GN" if kinds == {"gn"} else "BN"
    draft.stride_in_1x1 = not (grouped or draft.norm == "GN")
    if grouped and deep == 23:
        draft.pixels = RESNEXT_101_PIXELS
    return renamed, origins


CAFFE2 = Source(
    name="caffe2",
    title="Caffe2 (MSRA's ImageNet backbones, Detectron)",
    marks=(r"^conv1_w$", r"^res2_0_branch2a_w$"),
    rules={r".*": "{0}"},
    skips={r"(fc1000|pred)_[wb]": "ImageNet's classifier", **TRAINING_STATE},
    affine_norms=True,
    pixels=MSRA_PIXELS,
    prepare=_prepare,
)
