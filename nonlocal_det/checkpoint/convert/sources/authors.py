"""The paper's authors' Caffe2 nets for videos (C2D and I3D)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nonlocal_det.checkpoint.convert.draft import KINETICS_PIXELS, Draft, Source
from nonlocal_det.checkpoint.convert.sources.caffe2 import TRAINING_STATE, rename


def _prepare(
    tensors: dict[str, Any], rest: Mapping[str, Any], draft: Draft
) -> tuple[dict[str, Any], dict[str, str]]:
    renamed, origins = rename(tensors)
    for prefix in [name.removesuffix(".g.weight") for name in renamed if name.endswith(".g.weight")]:
        if f"{prefix}.norm.weight" in renamed and f"{prefix}.norm.running_mean" not in renamed:
            _fold_affine(prefix, renamed, origins, draft)
    return renamed, origins


def _fold_affine(prefix: str, tensors: dict[str, Any], origins: dict[str, str], draft: Draft) -> None:
    """Multiply what stands for a frozen batch norm, a factor and a summand, into the conv before it."""
    weight, bias = f"{prefix}.out.weight", f"{prefix}.out.bias"
    gamma, beta = tensors.pop(f"{prefix}.norm.weight"), tensors.pop(f"{prefix}.norm.bias")
    tensors[weight] = tensors[weight] * gamma.view(-1, *[1] * (tensors[weight].dim() - 1))
    tensors[bias] = tensors[bias] * gamma + beta if bias in tensors else beta
    origins.setdefault(bias, origins[f"{prefix}.norm.bias"])
    for part in ("weight", "bias"):
        why = "an affine layer without statistics, taken into the conv before it"
        draft.skipped[origins[f"{prefix}.norm.{part}"]] = why


AUTHORS = Source(
    name="authors",
    title="the authors' Caffe2 nets",
    marks=(r"^conv1_w$", r"^res2_0_branch2a_w$", r"^nonlocal_conv\d_\d+_theta_w$|_bn_riv$"),
    rules={r".*": "{0}"},
    modules={"theta": "theta", "phi": "phi", "g": "g", "out": "w_z", "norm": "w_z.norm"},
    places={r"nonlocal\.conv(?P<stage>[2-5])\.(?P<after>\d+)": "res{stage}.non_local_{place}"},
    skips={r"pred_[wb]": "the classifier of videos", **TRAINING_STATE},
    pool=("input", "none"),
    scale={"embedded_gaussian": (True, False)},
    pixels=KINETICS_PIXELS,
    stride_in_1x1=False,
    unpadded_pool=True,
    prepare=_prepare,
)
