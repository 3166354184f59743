"""The paper's authors' Caffe2 nets for videos (C2D and I3D)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nonlocal_det.convert.draft import KINETICS_PIXELS, Draft, Net, Prepared, Source
from nonlocal_det.convert.sources.caffe2 import TRAINING_STATE, fill_gaps, rename


def _prepare(tensors: dict[str, Any], rest: Mapping[str, Any], draft: Draft) -> Prepared:
    renamed, origins = rename(tensors)
    if any(name.endswith(".running_var") for name in renamed):
        # Blocks may be without norms there, so it is no fault, but it is rare.
        draft.notes += [
            f"the block {prefix!r} has no norm, although the net has batch norms with statistics"
            for name in renamed
            if (prefix := name.removesuffix(".g.weight")) != name and f"{prefix}.norm.weight" not in renamed
        ]
    return renamed, origins


AUTHORS = Source(
    name="authors",
    modules={"theta": "theta", "phi": "phi", "g": "g", "out": "w_z", "norm": "w_z.norm"},
    places={r"nonlocal\.conv(?P<stage>[2-5])\.(?P<after>\d+)": "res{stage}.non_local_{place}"},
    skips={r"pred_[wb]": "the classifier of videos", **TRAINING_STATE},
    pool=("input", "none"),
    scale={"embedded_gaussian": (True, False)},
    block_norms={"norm": "BN"},
    net=Net(KINETICS_PIXELS, stride_in_1x1=False, unpadded_pool=True, norm="BN"),
    prepare=_prepare,
    finish=fill_gaps,
)
