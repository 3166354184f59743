"""Fitting of a draft to a config's model, whose shapes decide what becomes of a time axis."""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from nonlocal_det.checkpoint.load_report import NO_STATISTICS, compare
from nonlocal_det.convert.conversion_report import ConversionReport, Move
from nonlocal_det.convert.draft import COUNTER, Draft, Entry, ends
from nonlocal_det.convert.time_axis import SUMMED
from nonlocal_det.errors import CheckpointError, listed


def fit(
    draft: Draft, model: nn.Module, report: ConversionReport, allowed: re.Pattern[str] | None
) -> dict[str, Tensor]:
    """Give a draft's tensors a model's names, shapes and order, and write what is done into a report.

    Every block has its place. What is missing is allowed if ``allowed`` is found in the name of each.

    Raises:
        CheckpointError: a tensor has no place, the place of another one or another shape, or one is missing.
    """
    state = model.state_dict()
    found = {name: entry.fitted(state[name].shape) for name, entry in _match(draft, state, report).items()}
    shapes = {name: (tuple(entry.value.shape), tuple(state[name].shape)) for name, entry in found.items()}
    wrong = [(name, theirs, ours) for name, (theirs, ours) in shapes.items() if theirs != ours]
    shaped = {name: entry for name, entry in found.items() if len({*shapes[name]}) == 1}
    # Batch norms' counters compute nothing.
    for name in state:
        if name.endswith(COUNTER) and name not in shaped and f"{name.removesuffix(COUNTER)}weight" in shaped:
            shaped[name] = Entry(torch.zeros((), dtype=torch.int64), "", "counter")
    missing = [name for name in state if name not in found and name not in shaped]
    if not draft.entries:
        missing = [name for name in missing if ".non_local_" in name]
        report.notes.append(
            "the file holds blocks alone, and so does what was written; --base FILE adds a net's weights"
        )
    fitted = compare(model, report.path, missing, wrong, ())
    # A training can start without statistics; a conversion that lacks them is not what was trained.
    fitted.unexpected.update(dict.fromkeys(fitted.expected.pop(NO_STATISTICS, ()), "not in the file"))
    fitted.allow(allowed)
    fitted.refuse()
    report.expected.update(fitted.expected)
    if fitted.allowed:
        report.expected["allowed by --allow-missing"] = list(fitted.allowed)
    for name, theirs, ours in wrong:
        report.skipped[found[name].origin] = f"shape {list(theirs)}, the model's has {list(ours)}"
    report.moves = [
        Move(each.origin, name, tuple(each.value.shape), each.how) for name, each in shaped.items()
    ]
    if not any(move.origin for move in report.moves):
        raise CheckpointError("nothing of the file is left to be written")
    if summed := sum(SUMMED in move.how for move in report.moves):
        report.notes.append(
            f"{summed} convs over time were summed over their frames: exact for a still clip, but for frames "
            "so near its ends that the padding shows"
        )
    return {name: shaped[name].value for name in state if name in shaped}


def _match(draft: Draft, state: Mapping[str, Tensor], report: ConversionReport) -> dict[str, Entry]:
    """Return name in the model -> tensor of the draft, by the ends of the names."""
    by_end: dict[str, list[str]] = {}
    for name in state:
        for end in ends(name):
            by_end.setdefault(end, []).append(name)
    entries = list(draft.entries.items())
    for prefix, parts in draft.blocks.items():
        entries += [(f"{draft.places[prefix]}.{part}", entry) for part, entry in parts.items()]
    found: dict[str, Entry] = {}
    leftovers = list(draft.leftovers)
    report.skipped.update(draft.skipped)
    for name, entry in entries:
        targets = by_end.get(name, [])
        if len(targets) > 1:
            raise CheckpointError(f"{entry.origin} fits more than one tensor: {targets[:2]}")
        if targets and targets[0] in found:
            raise CheckpointError(
                f"both {found[targets[0]].origin} and {entry.origin} would become {targets[0]}; "
                "leave one of them out by --skip REGEX"
            )
        if targets:
            found[targets[0]] = entry
        elif name.endswith(COUNTER):
            report.skipped[entry.origin] = "a counter, which frozen norms have none of"
        else:
            leftovers.append(entry.origin or name)
    if leftovers:
        raise CheckpointError(
            f"{len(leftovers)} of their tensors have no place in the config's model ({listed(leftovers)}): "
            "take the config that they belong to, or leave them out by --skip REGEX"
        )
    return found
