"""The block of Non-local_pytorch, in any net or in a ResNet with torchvision's names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from nonlocal_det.convert.draft import Draft, Net, Prepared, Source
from nonlocal_det.convert.sources.torchvision_resnet import RESNET_RULES

_MEMBER = re.compile(r"layer(?P<layer>[1-4])\.(?P<i>\d+)\.(?P<rest>.+)")


def _prepare(tensors: dict[str, Any], rest: Mapping[str, Any], draft: Draft) -> Prepared:
    """Number the residual blocks of a stage again where non-local blocks were put between them."""
    members = {name: match for name in tensors if (match := _MEMBER.fullmatch(name))}
    inserted = {
        (m["layer"], int(m["i"])) for m in members.values() if re.match(r"g\.(0\.)?(weight|bias)$", m["rest"])
    }
    renamed = {}
    for name in tensors:
        new = name
        if match := members.get(name):
            layer, i = match["layer"], int(match["i"])
            number = i - sum(other < i for where, other in inserted if where == layer)
            new = f"layer{layer}.{'before' if (layer, i) in inserted else ''}{number}.{match['rest']}"
        renamed[new] = name
    return {new: tensors[name] for new, name in renamed.items()}, renamed


NONLOCAL_PYTORCH = Source(
    name="nonlocal_pytorch",
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
    places={r"layer(?P<layer>[1-4])\.before(?P<place>\d+)": "res{stage}.non_local_{place}"},
    skips={r"fc\.(weight|bias)": "the classifier"},
    scale={"embedded_gaussian": (False,), "gaussian": (False,)},
    block_norms={"W.1": "BN"},
    followed={"W.0": ("W.1",)},
    net=Net(unpadded_pool=False),
    prepare=_prepare,
)
