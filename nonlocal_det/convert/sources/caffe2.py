"""Caffe2 pickles: the ImageNet backbones of MSRA's lineage, and Detectron's models."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from detectron2.checkpoint.c2_model_loading import convert_c2_detectron_names

from nonlocal_det.convert.draft import (
    CAFFE_PIXELS,
    NEUTRAL,
    Draft,
    Entry,
    Net,
    Prepared,
    Source,
    fill_biases,
    has_statistics,
    inside_backbone,
)
from nonlocal_det.errors import CheckpointError

# The one ResNeXt of Detectron's zoo whose images were divided: X-101-32x8d.
RESNEXT_101_PIXELS = replace(CAFFE_PIXELS, std=(57.375, 57.12, 58.395))

TRAINING_STATE = {
    r".*_momentum": "the optimiser's state",
    r"lr|model_iter|weight_order": "the training's state",
}

_NEUTRAL_HOW = "neutral, for an affine layer without statistics"


def rename(tensors: dict[str, Any]) -> Prepared:
    """Give Caffe2's tensors Detectron2's names, by Detectron2's own tables."""
    try:
        return convert_c2_detectron_names(tensors)
    except AssertionError:
        raise CheckpointError("two tensors of the file have the same name in Detectron2") from None


def _prepare(tensors: dict[str, Any], rest: Mapping[str, Any], draft: Draft) -> Prepared:
    renamed, origins = rename(tensors)
    wide = renamed.get("res2.0.conv2.weight")
    grouped = wide is not None and wide.dim() == 4 and wide.shape[0] != wide.shape[1]
    deep = sum(re.fullmatch(r"res4\.\d+\.conv1\.weight", name) is not None for name in renamed)
    backbone = [name for name in origins.values() if re.match(r"(res_)?conv1_|res[2-5]_\d", name)]
    kinds = {kind for kind in ("bn", "gn") if any(f"_{kind}_" in name for name in backbone)}
    if len(kinds) > 1:
        raise CheckpointError("the file's ResNet has batch norms and group norms; Detectron2's has one kind")
    norm = "GN" if kinds == {"gn"} else "BN"
    draft.know(norm=norm, stride_in_1x1=not (grouped or norm == "GN"))
    if grouped and deep == 23:
        draft.know(pixels=RESNEXT_101_PIXELS)
    return renamed, origins


def fill_gaps(draft: Draft) -> None:
    """Give affine layers, which stand for frozen batch norms if no norm has any, statistics that do nothing.

    In blocks, where ours have no frozen norms, an affine layer is multiplied into the conv before it. Their
    convs get biases.
    """
    fill_biases(draft)
    if draft.net.norm == "GN" or has_statistics(draft):
        return
    for name in inside_backbone(draft).values():
        norm = name.removesuffix(".weight")
        if norm != name and norm.endswith(".norm"):
            size = draft.entries[name].value.shape
            for leaf, value in NEUTRAL.items():
                draft.entries[f"{norm}.{leaf}"] = Entry(torch.full(size, value), "", _NEUTRAL_HOW)
    for prefix in list(draft.block_norms):
        _fold_affine(prefix, draft)
        del draft.block_norms[prefix]


def _fold_affine(prefix: str, draft: Draft) -> None:
    parts = draft.blocks[prefix]
    needed = [f"w_z.{leaf}" for leaf in ("weight", "bias", "norm.weight", "norm.bias")]
    for part in needed:
        if part not in parts:
            raise CheckpointError(f"the block {prefix!r} has an affine layer, and no {part}")
    weight, bias, gamma, beta = (parts[part] for part in needed)
    if not weight.value.shape[0] == bias.value.numel() == gamma.value.numel() == beta.value.numel():
        raise CheckpointError(f"the affine layer of the block {prefix!r} has another size than its conv")
    how = f"times {gamma.origin}"
    factor = gamma.value.view(-1, *[1] * (weight.value.dim() - 1))
    parts["w_z.weight"] = weight.changed(weight.value * factor, how)
    parts["w_z.bias"] = bias.changed(bias.value * gamma.value + beta.value, f"{how}, plus {beta.origin}")
    for part in needed[2:]:
        why = "an affine layer without statistics, taken into the conv before it"
        draft.skipped[parts.pop(part).origin] = why


CAFFE2 = Source(
    name="caffe2",
    skips={r"(fc1000|pred)_[wb]": "ImageNet's classifier", **TRAINING_STATE},
    net=Net(CAFFE_PIXELS),
    prepare=_prepare,
    finish=fill_gaps,
)
