"""What is compared: arms, which are configs with overrides, by name or from the command line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from nonlocal_det.errors import ArmError

#: Files of a comparison's folder, beside the arms' folders.
RESULTS = ("table.md", "results.json", "curves.png", "distance.png")
_MOST_SEEDS = 1000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Arm:
    """One way to train, run once for each seed."""

    name: str  # its name on the command line and that of its folder
    label: str  # its name in tables and figures
    config: str
    opts: tuple[str, ...] = ()  # KEY, VALUE, ...
    #: names of the arms that it is compared with, as far as they are in the table
    against: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()  # () takes those of the command line


@dataclass(frozen=True)
class Comparison:
    """Arms that belong together."""

    description: str  # one line
    arms: Sequence[Arm]
    default: Sequence[str] = ()  # names of those that are run unless others are named; () is all


_SQUARES = "Quick/faster_rcnn_R_18_FPN_context"
_PEOPLE = "Quick/keypoint_rcnn_R_18_FPN_people"
_MASK = "COCO-InstanceSegmentation/mask_rcnn"
_POSES = "COCO-Keypoints/keypoint_rcnn_R_101_FPN_3x"
_FIVE = ("MODEL.NONLOCAL.RES3", "[1, 2]", "MODEL.NONLOCAL.RES4", "[0, 1, 2]")
_SYNC = ("MODEL.NONLOCAL.BLOCK", "residual", "MODEL.NONLOCAL.NORM", "SyncBN")
_BOTH = "NL, +4 in head, +1 in backbone"


def _arm(name: str, label: str, config: str, *against: str) -> Arm:
    return Arm(name, label, f"{config}.yaml", (), against)


def _nl(name: str, label: str, *opts: str) -> Arm:
    """Return an arm with one block; ``opts`` are keys of MODEL.NONLOCAL without that prefix, and values."""
    words = tuple(word if place % 2 else f"MODEL.NONLOCAL.{word}" for place, word in enumerate(opts))
    return Arm(name, label, f"{_SQUARES}_nl.yaml", words, ("baseline", "residual"))


#: Name of a comparison -> its arms. Arms of the user's own are compared with the first, the baseline.
COMPARISONS: dict[str, Comparison] = {
    "context": Comparison(
        "squares whose class is the colour of a distant disc (minutes an arm on 2 CPU cores)",
        [
            _arm("baseline", "R18 baseline", _SQUARES),
            _arm("residual", "+1 residual", f"{_SQUARES}_residual", "baseline"),
            _nl("nl", "+1 NL"),
            _nl("nl_gaussian", "+1 NL, Gaussian", "PAIRWISE", "gaussian"),
            _nl("nl_dot_product", "+1 NL, dot product", "PAIRWISE", "dot_product"),
            _nl("nl_concatenation", "+1 NL, concatenation", "PAIRWISE", "concatenation"),
            _nl("nl_BN", "+1 NL, BN", "NORM", "BN"),
            _nl("nl_normal_BN", "+1 NL, N(0, 0.01), BN", "INIT", "normal", "NORM", "BN"),
            _nl("nl_normal", "+1 NL, N(0, 0.01)", "INIT", "normal"),
            _nl("nl_pool_embedding", "+1 NL, pool after phi and g", "POOL", "embedding"),
            _nl("nl_pool_none", "+1 NL, no pool", "POOL", "none"),
            _nl("nl_no_scale", "+1 NL, no scale", "SCALE", "False"),
            Arm("residual_5blocks", "+5 residual", f"{_SQUARES}_residual.yaml", _FIVE, ("baseline",)),
            Arm("nl_5blocks", "+5 NL", f"{_SQUARES}_nl.yaml", _FIVE, ("baseline", "residual_5blocks", "nl")),
        ],
        ("baseline", "residual", "nl"),
    ),
    "people": Comparison(
        "drawn figures whose head alone tells left from right (a quarter of an hour an arm on a CPU core)",
        [
            _arm("baseline", "R18 baseline", _PEOPLE),
            _arm("nl_head", "NL, +4 in head", f"{_PEOPLE}_nl_head", "baseline"),
            _arm("nl_head_backbone", _BOTH, f"{_PEOPLE}_nl_head_backbone", "baseline", "nl_head"),
        ],
    ),
    "table5": Comparison(
        "the paper's Table 5: Mask R-CNN on COCO, with and without one block in res4",
        [
            _arm("R50", "R50 baseline", f"{_MASK}_R_50_FPN_1x"),
            _arm("R50_nl", "R50 +1 NL", f"{_MASK}_R_50_FPN_1x_nl", "R50", "R50_residual"),
            _arm("R101", "R101 baseline", f"{_MASK}_R_101_FPN_1x"),
            _arm("R101_nl", "R101 +1 NL", f"{_MASK}_R_101_FPN_1x_nl", "R101"),
            _arm("X152", "X152 baseline", f"{_MASK}_X_152_32x8d_FPN_1x"),
            _arm("X152_nl", "X152 +1 NL", f"{_MASK}_X_152_32x8d_FPN_1x_nl", "X152"),
            replace(_arm("R50_residual", "R50 +1 residual", f"{_MASK}_R_50_FPN_1x_nl", "R50"), opts=_SYNC),
        ],
        ("R50", "R50_nl", "R101", "R101_nl", "X152", "X152_nl"),
    ),
    "table6": Comparison(
        "the paper's Table 6: Keypoint R-CNN on COCO, with blocks in head and backbone",
        [
            _arm("R101", "R101 baseline", _POSES),
            _arm("R101_nl_head", "NL, +4 in head", f"{_POSES}_nl_head", "R101"),
            _arm("R101_nl_head_backbone", _BOTH, f"{_POSES}_nl_head_backbone", "R101", "R101_nl_head"),
        ],
    ),
}


def parse_seeds(text: str) -> tuple[int, ...]:
    """Read seeds: numbers and ranges with both ends, by commas: ``0-4``, ``0,1,7``.

    Raises:
        ArmError: it is not that, they are more than 1,000, or a seed is named twice.
    """
    seeds: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part.strip())
        if not found or (found[2] and int(found[2]) < int(found[1])):
            raise ArmError(f"seeds {text!r}: write numbers and ranges, such as 0-4 or 0,1,7")
        more = range(int(found[1]), int(found[2] or found[1]) + 1)
        if len(seeds) + len(more) > _MOST_SEEDS:
            raise ArmError(f"seeds {text!r}: more than {_MOST_SEEDS:,}; each is a training run of its own")
        seeds += more
    if len(set(seeds)) < len(seeds):
        raise ArmError(f"seeds {text!r}: one is named twice")
    return tuple(seeds)


def named_arms(task: str, names: Sequence[str] = ()) -> list[Arm]:
    """Return arms of a comparison of :data:`COMPARISONS` by their names, ``NAME`` or ``NAME:SEEDS``.

    Raises:
        ArmError: the comparison has no such arm.
    """
    known = {arm.name: arm for arm in COMPARISONS[task].arms}
    arms = []
    for word in names or COMPARISONS[task].default or known:
        name, sign, seeds = word.partition(":")
        if name not in known:
            raise ArmError(f"--arms {name}: the task {task} has {', '.join(known)}; or define it by --arm")
        arms.append(replace(known[name], seeds=parse_seeds(seeds)) if sign else known[name])
    return arms


def custom_arm(words: Sequence[str], against: tuple[str, ...] = ()) -> Arm:
    """Make an arm of the command line's ``NAME[:SEEDS]=CONFIG KEY VALUE ...``, by words.

    Raises:
        ArmError: it is not that.
    """
    name, sign, config = words[0].partition("=")
    name, colon, seeds = name.partition(":")
    if not (sign and config and _NAME.fullmatch(name)):
        raise ArmError(
            f"--arm {words[0]}: write NAME=CONFIG, a name of letters, digits and _.- and a config file, then "
            "KEY VALUE pairs"
        )
    if name in RESULTS:
        raise ArmError(f"--arm {name}: a result has that name in the folder; name the arm otherwise")
    opts = tuple(words[1:])
    check_overrides(opts, f"--arm {name}")
    return Arm(name, name, config, opts, against, parse_seeds(seeds) if colon else ())


def check_overrides(opts: Sequence[str], where: str) -> None:
    """Check overrides, KEY, VALUE, ..., of an arm or of all arms; ``where`` is the flag, for the message.

    Raises:
        ArmError: they are no pairs, or set what belongs to single runs.
    """
    if len(opts) % 2:
        raise ArmError(f"{where}: overrides come as KEY VALUE pairs, but {opts[-1]!r} stands alone")
    for key, option in (("SEED", "--seeds"), ("OUTPUT_DIR", "--output")):
        if key in opts[::2]:
            raise ArmError(f"{where} sets {key}, which is each run's own; use {option}")
