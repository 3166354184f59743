"""What a source makes of a file: tensors under our names, blocks, and what it knows about the net."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nonlocal_det.checkpoint.report import CheckpointError

__all__ = ["Draft", "Entry", "Pixels", "Source", "read_draft"]

# A counter of batch norms, which plays no part in what they compute.
COUNTER = "num_batches_tracked"
_SUMMED = "summed over its"
_LEAVES = rf"(?P<leaf>weight|bias|running_mean|running_var|{COUNTER})"


@dataclass(frozen=True)
class Pixels:
    """What a net was trained to see.

    Attributes:
        order: "RGB" or "BGR".
        mean: of each channel, in that order, for values from 0 to 255.
        std: what a channel is divided by after that.
    """

    order: str
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


# torchvision's statistics, in the units of Detectron2.
TORCHVISION_PIXELS = Pixels("RGB", (123.675, 116.28, 103.53), (58.395, 57.12, 57.375))
KINETICS_PIXELS = Pixels("RGB", (114.75,) * 3, (57.375,) * 3)


@dataclass(frozen=True)
class Entry:
    """A tensor of ours.

    Attributes:
        value: the tensor.
        origin: its name in the file; "" where it was not in the file.
        how: what was done to it, besides renaming.
    """

    value: Tensor
    origin: str
    how: str = ""

    def changed(self, value: Tensor, how: str) -> Entry:
        """Return the entry with another value; ``how`` says what was done."""
        return replace(self, value=value, how=f"{self.how}, {how}" if self.how else how)


@dataclass
class Draft:
    """A file's tensors under our names, before they are fitted to a model.

    Attributes:
        entries: name inside the backbone, or inside the model -> tensor; blocks are not among them.
        blocks: prefix of a block in the file -> its parts, such as "theta.weight".
        places: prefix -> our name of the block, such as "res4.non_local_5".
        inside_branch: the prefixes of blocks that work inside a residual branch, before the sum.
        skipped: name in the file -> why it is not needed.
        leftovers: names in the file that nobody knows.
        notes: what the user should know.
        pixels: what the net sees, if that is known.
        stride_in_1x1: where the stride of a stage is, if that is known.
        unpadded_pool: whether the stem's max pool has no padding at the top and left; None where not known.
        pool: POOL settings that the blocks' names leave open.
        scale: PAIRWISE setting -> SCALE settings that the source has for it.
    """

    entries: dict[str, Entry] = field(default_factory=dict)
    blocks: dict[str, dict[str, Entry]] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    inside_branch: set[str] = field(default_factory=set)
    skipped: dict[str, str] = field(default_factory=dict)
    leftovers: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    pixels: Pixels | None = None
    stride_in_1x1: bool | None = None
    unpadded_pool: bool | None = None
    pool: tuple[str, ...] = ()
    scale: Mapping[str, tuple[bool, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Source:
    """A program whose weights can be read, as tables of its names.

    Patterns are matched against whole names, without the prefix of data-parallel wrappers. Named groups fill
    the fields of the target, and besides: ``layer`` and ``level`` count stages from 1 and 0 where ours are
    res2 and on, {next} is ``i`` and one, ``abc`` names convs by letters, and ``after`` is the residual block
    that a non-local block follows.

    Attributes:
        name: the value of ``--from``.
        title: its name in messages.
        marks: patterns; a file is this source's if each of them is found in some name.
        rules: pattern -> our name.
        modules: a block's module in the file -> ours: theta, phi, g, w_z, w_z.norm or w_f. A prefix is a
            block if it has a g.
        places: pattern of a block's prefix -> our name of the block.
        inside_branch: pattern of the prefixes of blocks that work before the sum of a residual block.
        skips: pattern -> why that tensor is not needed.
        pool: POOL settings that the names cannot tell apart; "by name" where a pooled conv is module 0.
        scale: PAIRWISE setting -> SCALE settings that the source has for it.
        pixels: see :class:`Draft`.
        stride_in_1x1: see :class:`Draft`.
        unpadded_pool: see :class:`Draft`.
        notes: see :class:`Draft`.
        prepare: called with (weights, what else the file holds, the draft): may set what the draft knows, and
            returns (weights by names that the rules know, those names -> names in the file).
    """

    name: str
    title: str
    marks: tuple[str, ...]
    rules: Mapping[str, str] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)
    places: Mapping[str, str] = field(default_factory=dict)
    inside_branch: str = ""
    skips: Mapping[str, str] = field(default_factory=dict)
    pool: tuple[str, ...] | str = ()
    scale: Mapping[str, tuple[bool, ...]] = field(default_factory=dict)
    pixels: Pixels | None = None
    stride_in_1x1: bool | None = None
    unpadded_pool: bool | None = None
    notes: tuple[str, ...] = ()
    prepare: Callable[[dict, Mapping, Draft], tuple[dict, dict]] | None = None

    def recognises(self, names: list[str]) -> bool:
        """Tell whether these names look like this source's."""
        return all(any(re.search(mark, name) for name in names) for mark in self.marks)


def read_draft(source: Source, weights: Mapping[str, Any], rest: Mapping[str, Any]) -> Draft:
    """Sort a file's tensors by a source's tables.

    Args:
        source: whose names they are.
        weights: tensors, arrays and numbers by name.
        rest: what else the file holds.

    Raises:
        CheckpointError: two tensors have one name of ours, or a tensor has a shape that cannot be.
    """
    draft = Draft(
        pixels=source.pixels,
        stride_in_1x1=source.stride_in_1x1,
        unpadded_pool=source.unpadded_pool,
        notes=list(source.notes),
        scale=source.scale,
        pool=source.pool if isinstance(source.pool, tuple) else (),
    )
    tensors: dict[str, Tensor] = {}
    for name, value in weights.items():
        why = next((why for mark, why in source.skips.items() if re.fullmatch(mark, name)), None)
        if why is not None:
            draft.skipped[name] = why
        elif (tensor := _as_tensor(value)) is None:
            draft.leftovers.append(name)
        else:
            tensors[name] = tensor
    origins = {name: name for name in tensors}
    if source.prepare is not None:
        tensors, origins = source.prepare(tensors, rest, draft)
    blocks = _find_blocks(source, tensors)
    for name, value in tensors.items():
        entry = _flatten_time(Entry(value, origins[name]))
        if name in blocks:
            prefix, module, leaf = blocks[name]
            parts = draft.blocks.setdefault(prefix, {})
            _put(parts, f"{source.modules[module]}.{leaf}", _shaped(entry, source.modules[module], leaf))
            if source.pool == "by name" and module.startswith("g"):
                draft.pool = tuple({*draft.pool, "embedding" if module.startswith("g.0") else "none"})
        elif (target := _translate(source.rules, name)) is not None:
            _put(draft.entries, target, entry)
        else:
            draft.leftovers.append(origins[name])
    for prefix in draft.blocks:
        if (place := _translate(source.places, prefix)) is not None:
            draft.places[prefix] = place
        if source.inside_branch and re.fullmatch(source.inside_branch, prefix):
            draft.inside_branch.add(prefix)
    _absorb_biases(draft)
    parts = [*draft.entries.values(), *(part for block in draft.blocks.values() for part in block.values())]
    summed = sum(_SUMMED in entry.how for entry in parts)
    if summed:
        draft.notes.append(
            f"{summed} convs over time were summed over their frames: exact for a still clip, but for frames "
            "so near its ends that the padding shows"
        )
    return draft


def _as_tensor(value: Any) -> Tensor | None:
    """Return a tensor, floats as float32; None for what is no tensor."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        value = torch.from_numpy(np.array(value))
    if not isinstance(value, Tensor) or value.is_complex() or value.is_quantized or value.is_sparse:
        return None
    value = value.detach()
    return value.float() if value.is_floating_point() else value


def _flatten_time(entry: Entry) -> Entry:
    """Take the time axis out of a 3-D conv's weight [C_out, C_in, T, H, W]."""
    if entry.value.dim() != 5:
        return entry
    frames = entry.value.shape[2]
    how = "time axis of 1 dropped" if frames == 1 else f"{_SUMMED} {frames} frames"
    return entry.changed(entry.value.sum(2), how)


def _find_blocks(source: Source, tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, str, str]]:
    """Return name -> (prefix of its block, module, leaf)."""
    if not source.modules:
        return {}
    modules = "|".join(re.escape(module) for module in source.modules)
    pattern = re.compile(rf"(?:(?P<prefix>.+)\.)?(?P<module>{modules})\.{_LEAVES}")
    found = {}
    for name in tensors:
        if match := pattern.fullmatch(name):
            found[name] = (match["prefix"] or "", match["module"], match["leaf"])
    with_g = {prefix for prefix, module, _ in found.values() if source.modules[module] == "g"}
    return {name: parts for name, parts in found.items() if parts[0] in with_g}


def _translate(rules: Mapping[str, str], name: str) -> str | None:
    for pattern, target in rules.items():
        if match := re.fullmatch(pattern, name):
            fields = match.groupdict()
            if "layer" in fields:
                fields["stage"] = int(fields["layer"]) + 1
            if "level" in fields:
                fields["stage"] = int(fields["level"]) + 2
            if fields.get("i") is not None:
                fields["next"] = int(fields["i"]) + 1
            if "abc" in fields:
                fields["n"] = "abc".index(fields["abc"]) + 1
            if "after" in fields:
                fields["place"] = int(fields["after"]) + 1
            return target.format(name, **fields)
    return None


def _put(entries: dict[str, Entry], name: str, entry: Entry) -> None:
    if name in entries:
        raise CheckpointError(f"both {entries[name].origin} and {entry.origin} would become {name}")
    entries[name] = entry


def _shaped(entry: Entry, part: str, leaf: str) -> Entry:
    """Give a weight of a block the shape that a 2-D block has: [C_out, C_in, 1, 1], and [1, 2C'] for w_f."""
    value = entry.value
    if leaf != "weight" or part == "w_z.norm":
        return entry
    if value.dim() < 2 or value.numel() != value.shape[0] * value.shape[1]:
        raise CheckpointError(
            f"{entry.origin} has shape {list(value.shape)}; a block's convs are 1x1, [C_out, C_in, 1, 1]"
        )
    return replace(entry, value=value.flatten(1) if part == "w_f" else value.flatten(1)[..., None, None])


def _absorb_biases(draft: Draft) -> None:
    """Move a conv's bias into the mean of the batch norm after it: Detectron2's convs have none."""
    for name in [name for name in draft.entries if name.endswith(".bias")]:
        conv = name.removesuffix(".bias")
        if f"{conv}.norm.weight" not in draft.entries:
            continue
        bias = draft.entries.pop(name)
        if not bias.value.any():
            draft.skipped[bias.origin] = "a bias of zero"
            continue
        mean = f"{conv}.norm.running_mean"
        before = draft.entries.get(mean, Entry(torch.zeros_like(bias.value), ""))
        draft.entries[mean] = before.changed(before.value - bias.value, f"less the bias {bias.origin}")
        draft.skipped[bias.origin] = f"taken into {mean}"
