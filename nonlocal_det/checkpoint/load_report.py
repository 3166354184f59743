"""What a weight file did to a model: every tensor of the two falls into one group of a report."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import nn

from nonlocal_det.errors import CheckpointError, counted, listed
from nonlocal_det.layers import NonLocalBlock

# Last layers whose shape follows the number of classes or keypoints, with the dimension of their weight
# that does: 1 for the transposed conv of the keypoint head, 0 elsewhere.
_PREDICTORS = (
    (re.compile(r"(^|\.)box_predictor(\.\d+)?\.(cls_score|bbox_pred)\.(weight|bias)$"), 0),
    (re.compile(r"(^|\.)mask_head\.predictor\.(weight|bias)$"), 0),
    (re.compile(r"(^|\.)head\.cls_score\.(weight|bias)$"), 0),  # RetinaNet
    (re.compile(r"(^|\.)keypoint_head\.score_lowres\.(weight|bias)$"), 1),
)
# ImageNet's classifier under the names of Caffe2, torchvision and pycls; the conv1 bias of MSRA's nets,
# which is zero; counters of batch norms that are frozen here.
_USUAL_LEFTOVERS = re.compile(r"(^|\.)(fc|fc1000|pred|linear)\.(weight|bias)$|^stem\.conv1\.bias$")
_COUNTER = ".num_batches_tracked"
_STATISTICS = (".running_mean", ".running_var")
_BLOCK = re.compile(r"^(?P<block>.*?(?:^|\.)(?:non_local|residual)_(?P<place>\d+))\.")
# What MODEL.NONLOCAL.BLOCK "residual" inserts is of Detectron2's own classes, so its name tells.
_RESIDUAL_INSERTED = re.compile(r"(^|\.)res[2-5]\.residual_\d+$")
_Shapes = tuple[tuple[int, ...], tuple[int, ...]]  # in the file, in the model
_RESIDUAL = re.compile(r"^(?P<block>.*?(?:^|\.)(?P<stage>res[2-5])\.(?P<place>\d+))\.")

NEW_BLOCK = "in inserted blocks, which start as an identity"
NOT_IN_BACKBONE_FILE = "outside the backbone, as the file holds a backbone alone"
OTHER_COUNT = "in last layers, whose shape follows the number of classes or keypoints"
NO_STATISTICS = "batch-norm statistics and counters, which the file does not carry"


@dataclass
class LoadReport:
    """The outcome of loading a weight file, by the names of tensors."""

    path: str
    total: int  # how many tensors the model has
    loaded: list[str] = field(default_factory=list)  # names that were found in the file with the right shape
    #: reason -> names that keep their initial values, as they should
    expected: dict[str, list[str]] = field(default_factory=dict)
    #: name -> why it keeps its initial value although a complete file would hold it
    unexpected: dict[str, str] = field(default_factory=dict)
    #: the same as ``unexpected``, for the names that the user allowed
    allowed: dict[str, str] = field(default_factory=dict)
    #: other names in the file that the model has no place for
    leftovers: list[str] = field(default_factory=list)
    #: name of a non-local or residual block in the file -> those of its tensors that the model has no place
    #: for, although it has the net that the block is part of
    lost_blocks: dict[str, list[str]] = field(default_factory=dict)
    #: names of the model's blocks of which no tensor was in the file
    fresh_blocks: list[str] = field(default_factory=list)

    @property
    def untrained(self) -> list[str]:
        """Names of tensors that hold random values now: neither loaded nor part of an identity block."""
        return [
            *self.expected.get(NOT_IN_BACKBONE_FILE, ()),
            *self.expected.get(OTHER_COUNT, ()),
            *self.unexpected,
            *self.allowed,
        ]

    @property
    def surprising(self) -> bool:
        """Whether somebody should look at it, although it may be meant."""
        return bool(
            self.unexpected
            or self.allowed
            or self.lost_blocks
            or not all(map(_USUAL_LEFTOVERS.search, self.leftovers))
        )

    def __str__(self) -> str:
        lines = [f"Weights of {self.path}: {len(self.loaded)} of the model's {self.total} tensors loaded"]
        for reason, names in self.expected.items():
            lines.append(f"new, expected: {len(names)} {reason}: {_modules(names)}")
        for title, names in (("unexpected", self.unexpected), ("allowed", self.allowed)):
            for why in sorted(set(names.values())):
                found = [name for name in names if names[name] == why]
                lines.append(f"missing, {title}: {len(found)} {why}: {_modules(found)}")
        usual = [name for name in self.leftovers if _USUAL_LEFTOVERS.search(name)]
        other = [name for name in self.leftovers if name not in usual]
        if usual:
            lines.append(f"in the file, not used, expected: {len(usual)}: {_modules(usual)}")
        if other:
            lines.append(f"in the file, not used, no place in the model: {len(other)}: {_modules(other)}")
        if self.lost_blocks:
            count = sum(map(len, self.lost_blocks.values()))
            lines.append(f"in the file, not used, in trained blocks: {count}: {', '.join(self.lost_blocks)}")
        return "\n  ".join(lines)

    def refuse(self) -> None:
        """Stop where the model would not be what the file's author trained.

        Raises:
            CheckpointError: the model lacks a trained block of the file, or a tensor of the model that a
                complete file would hold is missing or has another shape.
        """
        if self.lost_blocks:
            raise CheckpointError(
                f"weights {self.path}: {counted(len(self.lost_blocks), 'trained block')} "
                f"({listed(self.lost_blocks)}) would be dropped in part or whole, which changes the outputs: "
                f"set {self._keys_of_lost_blocks()}, or allow it by --allow-missing REGEX"
            )
        if self.unexpected:
            names = listed((f"{name}: {why}" for name, why in self.unexpected.items()), between="; ")
            raise CheckpointError(
                f"weights {self.path}: {len(self.unexpected)} of the model's {self.total} tensors are "
                f"missing or have another shape ({names}): use weights and config that belong together, or "
                "allow it by --allow-missing REGEX, found in every such name"
            )

    def allow(self, pattern: re.Pattern[str] | None) -> None:
        """Allow what is missing or would be dropped, if ``pattern`` is found in every such name."""
        lost = [name for names in self.lost_blocks.values() for name in names]
        if pattern and all(map(pattern.search, [*self.unexpected, *lost])):
            self.leftovers += lost
            self.allowed, self.unexpected, self.lost_blocks = self.unexpected, {}, {}

    def _keys_of_lost_blocks(self) -> str:
        places: dict[str, list[int]] = {}
        keys: list[str] = []
        inserted = {block: found for block in self.lost_blocks if (found := _BLOCK.match(f"{block}."))}
        for block, found in inserted.items():
            if any(name.startswith(block + ".") for name in [*self.loaded, *self.unexpected]):
                # The model has the block but not all of its tensors.
                keys = ["MODEL.NONLOCAL.PAIRWISE and NORM as they were in training"]
                continue
            stage = re.search(r"(?:^|\.)(res[2-5])\.(?:non_local|residual)_\d+$", block)
            key = stage[1].upper() if stage else "KEYPOINT_HEAD"
            places.setdefault(key, []).append(int(found["place"]))
        for key, found in sorted(places.items()):
            # In the head the first block's number says after how many convs each one comes.
            value = str(sorted(found)).replace(" ", "") if key.startswith("RES") else min(found)
            keys.append(f"MODEL.NONLOCAL.{key} {value}")
        if any(re.search(r"\.residual_\d+$", block) for block in self.lost_blocks):
            keys.append("MODEL.NONLOCAL.BLOCK residual")
        if any(key.startswith("RES") for key in places):
            keys.append("MODEL.BACKBONE.NAME build_nonlocal_backbone")
        if "KEYPOINT_HEAD" in places:
            keys.append("MODEL.ROI_KEYPOINT_HEAD.NAME NonLocalKeypointHead")
        if len(inserted) < len(self.lost_blocks):
            keys.append("MODEL.RESNETS.DEPTH to that of the file's net, which is deeper")
        return ", ".join(keys)


def inserted_blocks(model: nn.Module) -> list[str]:
    """Return the names of a model's non-local blocks, and of the residual blocks inserted instead of them."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, NonLocalBlock) or _RESIDUAL_INSERTED.search(name)
    ]


def compare(
    model: nn.Module,
    path: str,
    missing: Iterable[str],
    wrong_shapes: Iterable[tuple[str, Sequence[int], Sequence[int]]],
    leftovers: Iterable[str],
) -> LoadReport:
    """Sort every tensor of a model and of a weight file into the groups of a report; refuse nothing yet.

    The file lacks what is ``missing``, the model lacks the ``leftovers``, and ``wrong_shapes`` are (name,
    shape in the file, shape in the model).
    """
    names = list(model.state_dict())
    wrong = {name: (tuple(theirs), tuple(ours)) for name, theirs, ours in wrong_shapes}
    absent, leftovers = set(missing), list(leftovers)
    report = LoadReport(
        path, len(names), [name for name in names if name not in absent and name not in wrong]
    )
    block_of = {
        f"{block}.{key}": block
        for block in inserted_blocks(model)
        for key in model.get_submodule(block).state_dict()
    }
    # PyTorch itself supplies a counter that is missing, so it does not show whether a block was in the file.
    present = {block_of[name] for name in block_of if name not in absent and not name.endswith(_COUNTER)}
    report.fresh_blocks = [block for block in dict.fromkeys(block_of.values()) if block not in present]
    sort = _Sorter(model, report, wrong, leftovers)
    for name in names:
        if name in sort.loaded:
            continue
        block = block_of.get(name)
        if reason := sort.reason(name, block):
            report.expected.setdefault(reason, []).append(name)
        elif name in wrong:
            report.unexpected[name] = "{} in the file, {} in the model".format(*wrong[name])
        else:
            rest = ", which has the rest of the block" if block else ""
            report.unexpected[name] = f"not in the file{rest}"
    _sort_leftovers(report, names, leftovers)
    return report


class _Sorter:
    """Tells of the tensors that a model did not get from a file which keep their initial values by right."""

    def __init__(
        self, model: nn.Module, report: LoadReport, wrong: Mapping[str, _Shapes], leftovers: list[str]
    ) -> None:
        self.fresh, self.loaded = set(report.fresh_blocks), set(report.loaded)
        self.wrong, self.leftovers = wrong, leftovers
        self.statistics = any(name.endswith(_STATISTICS) for name in self.loaded)
        self.backbone = _backbone_prefixes(model)
        # A file that holds a backbone and nothing else.
        self.alone = bool(self.loaded) and all(
            name.startswith(self.backbone) for name in [*self.loaded, *wrong]
        )

    def reason(self, name: str, block: str | None) -> str | None:
        """Return why a tensor, perhaps of a block, keeps its initial value; None if it should not."""
        if block in self.fresh:
            return NEW_BLOCK
        if name in self.wrong:
            if _follows_count(name, *self.wrong[name]):
                return OTHER_COUNT
        elif name.endswith(_COUNTER) or (name.endswith(_STATISTICS) and not self.statistics):
            if name.rpartition(".")[0] + ".weight" in self.loaded:
                return NO_STATISTICS
        elif _follows_count(name) and any(name.endswith("." + leftover) for leftover in self.leftovers):
            # Files that are matched by the end of the names keep a tensor of another shape as a leftover.
            return OTHER_COUNT
        outside = self.alone and block is None and not name.startswith(self.backbone)
        return NOT_IN_BACKBONE_FILE if outside else None


def _sort_leftovers(report: LoadReport, names: list[str], leftovers: list[str]) -> None:
    resized = report.expected.get(OTHER_COUNT, ())
    residual = {(found["stage"], found["place"]) for found in map(_RESIDUAL.match, names) if found}
    stages = {stage for stage, _ in residual}
    for name in leftovers:
        if name.endswith(_COUNTER) or any(other.endswith("." + name) for other in resized):
            continue
        found = _BLOCK.match(name)
        if found is None and (deeper := _RESIDUAL.match(name)) and deeper["stage"] in stages:
            found = deeper if (deeper["stage"], deeper["place"]) not in residual else None
        if found:
            report.lost_blocks.setdefault(found["block"], []).append(name)
        else:
            report.leftovers.append(name)


def _backbone_prefixes(model: nn.Module) -> tuple[str, ...]:
    backbone = getattr(model, "backbone", None)
    if backbone is None:
        return ()
    # FPN keeps the net that ImageNet trains as bottom_up; the res5 of a C4 model is in its RoI heads.
    return ("backbone.bottom_up." if hasattr(backbone, "bottom_up") else "backbone.", "roi_heads.res5.")


def _follows_count(name: str, theirs: Sequence[int] = (), ours: Sequence[int] = ()) -> bool:
    """Whether a tensor's shape follows a class or keypoint count, and only that differs."""
    for pattern, dim in _PREDICTORS:
        if pattern.search(name):
            dim = dim if name.endswith(".weight") else 0
            return len(theirs) == len(ours) and all(
                a == b for i, (a, b) in enumerate(zip(theirs, ours, strict=True)) if i != dim
            )
    return False


def _modules(names: Iterable[str]) -> str:
    """Name the modules of some tensors, each once, in order: a block or module instead of its tensors."""
    groups: dict[str, None] = {}
    for name in names:
        found = _BLOCK.match(name)
        groups[found["block"] if found else name.rpartition(".")[0] or name] = None
    return ", ".join(groups)
