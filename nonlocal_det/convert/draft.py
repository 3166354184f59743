"""What a source makes of a file: tensors under our names, blocks, and what it knows about the net."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nonlocal_det.errors import CheckpointError

__all__ = ["Draft", "Entry", "Pixels", "Source", "inside_backbone", "read_draft"]

# A counter of batch norms, which plays no part in what they compute.
COUNTER = "num_batches_tracked"
STATISTICS = ("running_mean", "running_var")
SUMMED = "summed over its"
# What batch norms add to the variance, in Detectron2 and in every source.
EPS = 1e-5
# Statistics that do nothing.
NEUTRAL = {"running_mean": 0.0, "running_var": 1 - EPS}
_NEUTRAL_HOW = "neutral, for an affine layer without statistics"
_CONVS = ("theta", "phi", "g", "w_z")
_POOLED = ("g", "phi")
_LEAVES = rf"(?P<leaf>weight|bias|running_mean|running_var|{COUNTER})"
_BACKBONE = re.compile(r"(?:.*\.)?((?:stem|res[2-5])\..*)")


@dataclass(frozen=True)
class Pixels:
    """What a net was trained to see.

    Attributes:
        order: "RGB" or "BGR"; "" where that is not known.
        mean: of each channel, in that order, for values from 0 to 255; None where that is not known.
        std: what a channel is divided by after that; None where that is not known.
    """

    order: str
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None


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
        net_notes: the same, of the ResNet.
        pixels: what the net sees, if that is known.
        stride_in_1x1: where the stride of a stage is, if that is known.
        unpadded_pool: whether the stem's max pool has no padding at the top and left; None where not known.
        norm: what the ResNet's norms are: "BN" (frozen or not), "GN", or "" where that is not known.
        block_norms: prefix of a block that has a norm -> "BN" or "GN", which is any group norm.
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
    net_notes: list[str] = field(default_factory=list)
    pixels: Pixels | None = None
    stride_in_1x1: bool | None = None
    unpadded_pool: bool | None = None
    norm: str = ""
    block_norms: dict[str, str] = field(default_factory=dict)
    pool: tuple[str, ...] = ()
    scale: Mapping[str, tuple[bool, ...]] = field(default_factory=dict)

    def forget_net(self) -> None:
        """Forget what is said of a ResNet, as the file has none."""
        self.net_notes, self.norm = [], ""
        self.pixels = self.stride_in_1x1 = self.unpadded_pool = None


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
        block_norms: a block's module that is a norm -> its kind, see :class:`Draft`. The kind of others is
            told by whether they have running statistics.
        followed: a block's module -> modules of which the source always has one after it.
        bias_free: whether all convs of all blocks of a file may be without biases.
        bias_before_norm: whether a block's last conv has a bias where a norm follows.
        affine_norms: whether all norms of a file may be a factor and a summand alone, without statistics.
        norm: see :class:`Draft`.
        pixels: see :class:`Draft`.
        stride_in_1x1: see :class:`Draft`.
        unpadded_pool: see :class:`Draft`.
        net_notes: see :class:`Draft`.
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
    block_norms: Mapping[str, str] = field(default_factory=dict)
    followed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    bias_free: bool = True
    bias_before_norm: bool = True
    affine_norms: bool = False
    norm: str = ""
    pixels: Pixels | None = None
    stride_in_1x1: bool | None = None
    unpadded_pool: bool | None = None
    net_notes: tuple[str, ...] = ()
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
        CheckpointError: two tensors have one name of ours, a tensor has a shape or numbers that cannot be, or
            a block lacks what the source's always have.
    """
    draft = Draft(
        pixels=source.pixels,
        stride_in_1x1=source.stride_in_1x1,
        unpadded_pool=source.unpadded_pool,
        norm=source.norm,
        net_notes=list(source.net_notes),
        scale=source.scale,
        pool=source.pool if isinstance(source.pool, tuple) else (),
    )
    tensors: dict[str, Tensor] = {}
    for name, value in weights.items():
        why = next((why for mark, why in source.skips.items() if re.fullmatch(mark, name)), None)
        if why is not None:
            draft.skipped[name] = why
        elif (tensor := as_weight(name, value)) is None:
            draft.leftovers.append(name)
        else:
            tensors[name] = tensor
    origins = {name: name for name in tensors}
    if source.prepare is not None:
        tensors, origins = source.prepare(tensors, rest, draft)
    blocks = _find_blocks(source, tensors)
    modules: dict[str, set[str]] = {}
    for name, value in tensors.items():
        entry = _flatten_time(Entry(value, origins[name], "" if origins[name] else "made for a folded norm"))
        if name in blocks:
            prefix, module, leaf = blocks[name]
            modules.setdefault(prefix, set()).add(module)
            parts = draft.blocks.setdefault(prefix, {})
            _put(parts, f"{source.modules[module]}.{leaf}", _shaped(entry, source.modules[module], leaf))
        elif (target := _translate(source.rules, name)) is not None:
            _put(draft.entries, target, entry)
        else:
            draft.leftovers.append(origins[name])
    for prefix in draft.blocks:
        if (place := _translate(source.places, prefix)) is not None:
            draft.places[prefix] = place
        if source.inside_branch and re.fullmatch(source.inside_branch, prefix):
            draft.inside_branch.add(prefix)
        _read_block(source, prefix, modules[prefix], draft)
    _check_variances(draft)
    _fill_biases(source, draft)
    if source.affine_norms and draft.norm != "GN" and not _has_statistics(draft):
        _fill_statistics(draft)
    _absorb_biases(draft)
    if not inside_backbone(draft):
        draft.forget_net()
    return draft


def inside_backbone(draft: Draft) -> dict[str, str]:
    """Return name inside the ResNet, such as "res2.0.conv1.weight" -> name in the draft, for all it has."""
    return {match[1]: name for name in draft.entries if (match := _BACKBONE.fullmatch(name))}


def as_weight(name: str, value: Any) -> Tensor | None:
    """Return a tensor of float32, or a counter as it is; None for what is no tensor."""
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        value = torch.from_numpy(np.array(value))
    if not isinstance(value, Tensor) or value.is_complex() or value.is_quantized or value.is_sparse:
        return None
    value = value.detach()
    if name.endswith(COUNTER):
        return value.long()
    if not value.is_floating_point() or value.dtype.itemsize < 2:
        raise CheckpointError(
            f"{name} holds numbers of {str(value.dtype).removeprefix('torch.')}, as quantised weights do; "
            "take the weights from before that, or leave out what is no weight by --skip REGEX"
        )
    value = value.float()
    if not value.isfinite().all():
        raise CheckpointError(
            f"{name} holds {'NaN' if value.isnan().any() else 'infinity'} (as float32); take an earlier "
            "checkpoint of that training, or leave the tensor out by --skip REGEX"
        )
    return value


def _flatten_time(entry: Entry) -> Entry:
    """Take the time axis out of a 3-D conv's weight [C_out, C_in, T, H, W]."""
    if entry.value.dim() != 5:
        return entry
    frames = entry.value.shape[2]
    how = "time axis of 1 dropped" if frames == 1 else f"{SUMMED} {frames} frames"
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


def _read_block(source: Source, prefix: str, modules: set[str], draft: Draft) -> None:
    """Tell what a block pools and what its norm is from the names of its modules."""
    for module, others in source.followed.items():
        if module in modules and not modules.intersection(others):
            raise CheckpointError(
                f"the block {prefix!r} has no {' or '.join(others)}, which {source.title} has after {module}"
            )
    if source.pool == "by name":
        # Where g and phi are pooled, each is the first of a Sequential: g.0, phi.0.
        pooled = {
            module.partition(".")[2].startswith("0")
            for module in modules
            if source.modules[module] in _POOLED
        }
        if len(pooled) > 1:
            raise CheckpointError(f"the block {prefix!r} pools one of g and phi and not the other")
        draft.pool = tuple({*draft.pool, *("embedding" if each else "none" for each in pooled)})
    for module in sorted(modules):
        if source.modules[module] == "w_z.norm":
            leaves = (*STATISTICS, COUNTER)
            counts = any(f"w_z.norm.{leaf}" in draft.blocks[prefix] for leaf in leaves)
            draft.block_norms[prefix] = source.block_norms.get(module, "BN" if counts else "GN")


def _check_variances(draft: Draft) -> None:
    for parts in (draft.entries, *draft.blocks.values()):
        for name, entry in parts.items():
            if name.endswith("running_var") and (entry.value + EPS <= 0).any():
                raise CheckpointError(f"{entry.origin} is a variance, and has numbers below 0")


def _has_statistics(draft: Draft) -> bool:
    parts = (draft.entries, *draft.blocks.values())
    return any(name.endswith((*STATISTICS, COUNTER)) for entries in parts for name in entries)


def _fill_biases(source: Source, draft: Draft) -> None:
    """Give convs of blocks that have no bias, as the source has it, one of 0; ours have biases."""
    convs = [(parts, conv) for parts in draft.blocks.values() for conv in _CONVS if f"{conv}.weight" in parts]
    lacking = [(parts, conv) for parts, conv in convs if f"{conv}.bias" not in parts]
    bias_free = source.bias_free and len(lacking) == len(convs)
    for parts, conv in lacking:
        if bias_free or (conv == "w_z" and not source.bias_before_norm and "w_z.norm.weight" in parts):
            zeros = torch.zeros(parts[f"{conv}.weight"].value.shape[0])
            parts[f"{conv}.bias"] = Entry(zeros, "", "zero, for a conv without bias")
    if bias_free and convs:
        draft.notes.append("no conv of the file's blocks has a bias; zeros were filled in")


def _fill_statistics(draft: Draft) -> None:
    """Give affine layers, which stand for frozen batch norms, statistics that do nothing.

    In blocks, where ours have no frozen norms, an affine layer is multiplied into the conv before it.
    """
    for name in inside_backbone(draft).values():
        norm = name.removesuffix(".weight")
        if norm != name and norm.endswith(".norm"):
            size = draft.entries[name].value.shape
            for leaf, value in NEUTRAL.items():
                draft.entries[f"{norm}.{leaf}"] = Entry(torch.full(size, value), "", _NEUTRAL_HOW)
    needed = [f"w_z.{leaf}" for leaf in ("weight", "bias", "norm.weight", "norm.bias")]
    for prefix in list(draft.block_norms):
        parts = draft.blocks[prefix]
        for part in needed:
            if part not in parts:
                raise CheckpointError(f"the block {prefix!r} has an affine layer, and no {part}")
        weight, bias, gamma, beta = (parts[part] for part in needed)
        if not weight.value.shape[0] == bias.value.numel() == gamma.value.numel() == beta.value.numel():
            raise CheckpointError(f"the affine layer of the block {prefix!r} has another size than its conv")
        how = f"times {gamma.origin}"
        parts["w_z.weight"] = weight.changed(weight.value * gamma.value[:, None, None, None], how)
        parts["w_z.bias"] = bias.changed(bias.value * gamma.value + beta.value, f"{how}, plus {beta.origin}")
        for part in needed[2:]:
            why = "an affine layer without statistics, taken into the conv before it"
            draft.skipped[parts.pop(part).origin] = why
        del draft.block_norms[prefix]


def _absorb_biases(draft: Draft) -> None:
    """Move a conv's bias into the mean of the batch norm after it: Detectron2's convs have none."""
    for name in [name for name in draft.entries if name.endswith(".bias")]:
        conv = name.removesuffix(".bias")
        mean = f"{conv}.norm.running_mean"
        if f"{conv}.norm.weight" not in draft.entries:
            continue
        bias = draft.entries[name]
        if not bias.value.any():
            draft.skipped[bias.origin] = "a bias of zero"
        elif mean not in draft.entries:
            if _has_statistics(draft):
                raise CheckpointError(
                    f"{mean} is not in the file, and the bias {bias.origin} belongs into it"
                )
            continue
        else:
            if draft.entries[mean].value.shape != bias.value.shape:
                raise CheckpointError(f"{bias.origin} has another size than the norm after it")
            draft.entries[mean] = draft.entries[mean].changed(
                draft.entries[mean].value - bias.value, f"less the bias {bias.origin}"
            )
            draft.skipped[bias.origin] = f"taken into {mean}"
        del draft.entries[name]
