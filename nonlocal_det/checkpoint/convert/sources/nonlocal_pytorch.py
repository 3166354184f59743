"""The block of Non-local_pytorch, in any net or in a ResNet with torchvision's names."""

from __future__ import annotations

from nonlocal_det.checkpoint.convert.draft import Source
from nonlocal_det.checkpoint.convert.sources.torchvision_resnet import RESNET_RULES

NONLOCAL_PYTORCH = Source(
    name="nonlocal_pytorch",
    title="Non-local_pytorch",
    marks=(r"(^|\.)g\.(0\.)?weight$", r"(^|\.)W\.(0\.)?weight$"),
    rules=RESNET_RULES,
    modules={
        "theta": "theta",
        "phi": "phi",
        "phi.0": "phi",
        "g": "g",
        "g.0": "g",
        "W": "w_z",
        "W.0": "w_z",
        "W.1": "w_z.norm",
        "concat_project.0": "w_f",
    },
    skips={r"fc\.(weight|bias)": "the classifier"},
    pool="by name",
    scale={"embedded_gaussian": (False,), "gaussian": (False,)},
)
