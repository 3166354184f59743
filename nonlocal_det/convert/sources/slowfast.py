"""SlowFast's nets of one pathway (C2D, I3D, Slow) and its Nonlocal block."""

from __future__ import annotations

from nonlocal_det.convert.draft import KINETICS_PIXELS, Net, Source

_BLOCK = r"s(?P<stage>[2-5])\.pathway0_res(?P<i>\d+)\."

SLOWFAST = Source(
    name="slowfast",
    rules={
        r"s1\.pathway0_stem\.(?:conv|(?P<norm>bn))": "stem.conv1",
        _BLOCK + r"branch2\.(?P<abc>[abc])(?P<norm>_bn)?": "res{stage}.{i}.conv{n}",
        _BLOCK + r"branch1(?P<norm>_bn)?": "res{stage}.{i}.shortcut",
    },
    modules={
        "conv_theta": "theta",
        "conv_phi": "phi",
        "conv_g": "g",
        "conv_out": "w_z",
        "bn": "w_z.norm",
        "norm": "w_z.norm",
    },
    places={r"s(?P<stage>[2-5])\.pathway0_nonlocal(?P<after>\d+)": "res{stage}.non_local_{place}"},
    skips={r"head\..*": "the classifier of videos"},
    # The pool has no weights; SlowFast's own configs have one.
    pool=("input", "none"),
    scale={"embedded_gaussian": (True,)},
    block_norms={"bn": "BN", "norm": "BN"},
    followed={"conv_out": ("bn", "norm")},
    net=Net(
        KINETICS_PIXELS,
        stride_in_1x1=False,
        unpadded_pool=False,
        norm="BN",
        notes=("the stride of a stage is taken to be in the 3x3 conv (SlowFast's STRIDE_1X1 False)",),
    ),
)
