"""What a source makes of a file: tensors under our names, blocks, and what it knows about the net."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nonlocal_det.checkpoint.fingerprints import FINGERPRINTS
from nonlocal_det.convert.time_axis import fit_time
from nonlocal_det.errors import CheckpointError

# A counter of batch norms, which plays no part in what they compute.
COUNTER = "num_batches_tracked"
STATISTICS = ("running_mean", "running_var")
# What batch norms add to the variance, in Detectron2 and in every source.
EPS = 1e-5
# Statistics that do nothing.
NEUTRAL = {"running_mean": 0.0, "running_var": 1 - EPS}
_CONVS = ("theta", "phi", "g", "w_z")
# Group of a pattern -> field of its target, and what is added.
_SUMS = {"layer": ("stage", 1), "level": ("stage", 2), "i": ("next", 1), "after": ("place", 1)}
_LEAVES = rf"(?P<leaf>weight|bias|running_mean|running_var|{COUNTER})"
_BACKBONE = re.compile(r"(?:.*\.)?((?:stem|res[2-5])\..*)")


@dataclass(frozen=True)
class Pixels:
    """What a net was trained to see."""

    order: str  # "RGB" or "BGR"; "" where that is not known
    #: of each channel, in that order, for values from 0 to 255; None where that is not known
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None  # what a channel is divided by after that; None where that is not known


# torchvision's statistics, in the units of Detectron2.
TORCHVISION_PIXELS = Pixels("RGB", (123.675, 116.28, 103.53), (58.395, 57.12, 57.375))
CAFFE_PIXELS = Pixels("BGR", (103.53, 116.28, 123.675), (1.0, 1.0, 1.0))
KINETICS_PIXELS = Pixels("RGB", (114.75,) * 3, (57.375,) * 3)


@dataclass(frozen=True)
class Net:
    """What is known of a ResNet besides its tensors; None and "" where it is not."""

    pixels: Pixels | None = None
    stride_in_1x1: bool | None = None  # whether the stride of a stage is in a 1x1 conv
    unpadded_pool: bool | None = None  # whether the stem's max pool has no padding at the top and left
    norm: str = ""  # what its norms are: "BN" (frozen or not) or "GN"
    notes: tuple[str, ...] = ()  # what the user should know


@dataclass(frozen=True)
class Entry:
    """A tensor of ours."""

    value: Tensor
    origin: str  # its name in the file; "" where it was not in the file
    how: str = ""  # what was done to it, besides renaming

    def changed(self, value: Tensor, how: str) -> Entry:
        """Return the entry with another value; ``how`` says what was done."""
        return replace(self, value=value, how=f"{self.how}, {how}" if self.how else how)

    def fitted(self, shape: Sequence[int]) -> Entry:
        """Return the entry with the time axis that a shape has."""
        value, how = fit_time(self.value, shape)
        return replace(self, value=value, how=", ".join(filter(None, (how, self.how))))


@dataclass
class Draft:
    """A file's tensors under our names, before they are fitted to a model."""

    source: Source  # whose weights they are
    net: Net = Net()  # what is known of the ResNet
    #: name inside the backbone, or inside the model -> tensor; blocks are not among them
    entries: dict[str, Entry] = field(default_factory=dict)
    #: prefix of a block in the file -> its parts, such as "theta.weight"
    blocks: dict[str, dict[str, Entry]] = field(default_factory=dict)
    #: prefix -> our name of the block, such as "res4.non_local_5"
    places: dict[str, str] = field(default_factory=dict)
    #: the prefixes of blocks that work inside a residual branch, before the sum
    inside_branch: set[str] = field(default_factory=set)
    #: prefix of a block that has a norm -> "BN" or "GN", which is any group norm
    block_norms: dict[str, str] = field(default_factory=dict)
    pool: tuple[str, ...] = ()  # POOL settings that the blocks' names leave open
    skipped: dict[str, str] = field(default_factory=dict)  # name in the file -> why it is not needed
    leftovers: list[str] = field(default_factory=list)  # names in the file that nobody knows
    notes: list[str] = field(default_factory=list)  # what the user should know, besides the net's

    def every(self) -> Iterator[tuple[str, Entry]]:
        """Yield all tensors, by their names in the model or in their block."""
        return chain.from_iterable(parts.items() for parts in (self.entries, *self.blocks.values()))

    def know(self, **facts: Any) -> None:
        """Set what is known of the net."""
        self.net = replace(self.net, **facts)


#: Weights by names that a source's rules know, and those names -> names in the file.
Prepared = tuple[dict[str, Tensor], dict[str, str]]


def fill_biases(draft: Draft) -> None:
    """Give the convs of blocks biases of 0, which ours need, if none in the file has one."""
    convs = [(parts, conv) for parts in draft.blocks.values() for conv in _CONVS if f"{conv}.weight" in parts]
    if convs and not any(f"{conv}.bias" in parts for parts, conv in convs):
        for parts, conv in convs:
            fill_bias(parts, conv)
        draft.notes.append("no conv of the file's blocks has a bias; zeros were filled in")


def fill_bias(parts: dict[str, Entry], conv: str) -> None:
    """Give a conv of a block a bias of 0."""
    zeros = torch.zeros(parts[f"{conv}.weight"].value.shape[0])
    parts[f"{conv}.bias"] = Entry(zeros, "", "zero, for a conv without bias")


@dataclass(frozen=True)
class Source:
    """A program whose weights can be read, as tables of its names.

    Patterns are matched against whole names, without the prefix of data-parallel wrappers. Named groups fill
    the fields of the target, and besides: ``layer`` and ``level`` count stages from 1 and 0 where ours are
    res2 and on, {next} is ``i`` and one, ``abc`` names convs by letters, and ``after`` is the residual block
    that a non-local block follows.
    """

    name: str  # the value of ``--from``, and the name of its fingerprint
    #: pattern of a module -> ours; its norm where the group ``norm`` matches. Without any, names are ours.
    rules: Mapping[str, str] = field(default_factory=dict)
    #: a block's module in the file -> ours: theta, phi, g, w_z, w_z.norm or w_f. A prefix is a block if it
    #: has a g.
    modules: Mapping[str, str] = field(default_factory=dict)
    #: pattern of a block's prefix -> our name of the block
    places: Mapping[str, str] = field(default_factory=dict)
    skips: Mapping[str, str] = field(default_factory=dict)  # pattern -> why that tensor is not needed
    #: POOL settings that the names cannot tell apart; none where a pooled conv is module 0
    pool: tuple[str, ...] = ()
    #: PAIRWISE setting -> SCALE settings that the source has for it
    scale: Mapping[str, tuple[bool, ...]] = field(default_factory=dict)
    #: a block's module that is a norm -> its kind, see :class:`Draft`. The kind of others is told by whether
    #: they have running statistics.
    block_norms: Mapping[str, str] = field(default_factory=dict)
    #: a block's module -> modules of which the source always has one after it
    followed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    net: Net = Net()  # what all nets of the source have in common
    #: called with (weights, what else the file holds, the draft) before names are translated: may set what
    #: the draft knows, and returns the weights under names that the rules know
    prepare: Callable[[dict[str, Any], Mapping[str, Any], Draft], Prepared] | None = None
    #: called with the draft when all tensors are in it: fills in what the source leaves out
    finish: Callable[[Draft], None] = fill_biases

    @property
    def title(self) -> str:
        """Its name in messages."""
        return FINGERPRINTS[self.name].title


def read_draft(source: Source, weights: Mapping[str, Any], rest: Mapping[str, Any]) -> Draft:
    """Sort a file's weights (tensors, arrays and numbers by name) by a source's tables.

    Raises:
        CheckpointError: two tensors have one name of ours, a tensor has a shape or numbers that cannot be, or
            a block lacks what the source's always have.
    """
    draft = Draft(source, source.net, pool=source.pool)
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
    for name, value in tensors.items():
        entry = Entry(value, origins[name], "" if origins[name] else "made for a folded norm")
        if name in blocks:
            prefix, module, leaf = blocks[name]
            part = source.modules[module]
            _put(draft.blocks.setdefault(prefix, {}), f"{part}.{leaf}", _shaped(entry, part, leaf))
        elif (target := _our_name(source, name)) is not None:
            _put(draft.entries, target, entry)
        else:
            draft.leftovers.append(origins[name])
    for prefix in draft.blocks:
        if (place := _translate(source.places, prefix)) is not None:
            draft.places[prefix] = place
        _read_block(draft, prefix, {module for block, module, _ in blocks.values() if block == prefix})
    for name, entry in draft.every():
        if name.endswith("running_var") and (entry.value + EPS <= 0).any():
            raise CheckpointError(f"{entry.origin} is a variance, and has numbers below 0")
    source.finish(draft)
    _absorb_biases(draft)
    if not inside_backbone(draft):
        draft.net = Net()
    return draft


def inside_backbone(draft: Draft) -> dict[str, str]:
    """Return name inside the ResNet, such as "res2.0.conv1.weight" -> name in the draft, for all it has."""
    return {match[1]: name for name in draft.entries if (match := _BACKBONE.fullmatch(name))}


def ends(name: str) -> list[str]:
    """Return a name, and what is left of it without its first part, its first two and so on."""
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


def has_statistics(draft: Draft) -> bool:
    """Tell whether a norm of the file has running statistics, or a counter of them."""
    return any(name.endswith((*STATISTICS, COUNTER)) for name, _ in draft.every())


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


def _find_blocks(source: Source, tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, str, str]]:
    """Return name -> (prefix of its block, module, leaf)."""
    if not source.modules:
        return {}
    modules = "|".join(re.escape(module) for module in source.modules)
    pattern = re.compile(rf"(?:(?P<prefix>.+)\.)?(?P<module>{modules})\.{_LEAVES}")
    matches = {name: match for name in tensors if (match := pattern.fullmatch(name))}
    found = {name: (match["prefix"] or "", match["module"], match["leaf"]) for name, match in matches.items()}
    with_g = {prefix for prefix, module, _ in found.values() if source.modules[module] == "g"}
    return {name: parts for name, parts in found.items() if parts[0] in with_g}


def _our_name(source: Source, name: str) -> str | None:
    """Return our name of a tensor outside of blocks; None if nobody knows it."""
    if not source.rules:
        return name
    module, _, leaf = name.rpartition(".")
    target = _translate(source.rules, module)
    known = target and (leaf in ("weight", "bias") or target.endswith(".norm"))
    return f"{target}.{leaf}" if known else None


def _translate(rules: Mapping[str, str], name: str) -> str | None:
    for pattern, target in rules.items():
        if match := re.fullmatch(pattern, name):
            fields = match.groupdict()
            for group, (target_field, more) in _SUMS.items():
                if fields.get(group):
                    fields[target_field] = int(fields[group]) + more
            if "abc" in fields:
                fields["n"] = "abc".index(fields["abc"]) + 1
            return target.format(**fields) + (".norm" if fields.get("norm") else "")
    return None


def _put(entries: dict[str, Entry], name: str, entry: Entry) -> None:
    if name in entries:
        raise CheckpointError(f"both {entries[name].origin} and {entry.origin} would become {name}")
    entries[name] = entry


def _shaped(entry: Entry, part: str, leaf: str) -> Entry:
    """Give a block's 1x1 conv the axes [C_out, C_in, 1, 1], with that of time if it has one; w_f [1, 2C']."""
    if leaf != "weight" or part == "w_z.norm":
        return entry
    shape = entry.value.shape
    time = shape[2:3] if len(shape) == 5 else ()
    if len(shape) < 2 or any(size != 1 for size in shape[2 + len(time) :]):
        raise CheckpointError(
            f"{entry.origin} has shape {list(shape)}; a block's convs are 1x1, [C_out, C_in, 1, 1]"
        )
    entry = replace(entry, value=entry.value.reshape(*shape[:2], *time, 1, 1))
    if part != "w_f":
        return entry
    entry = entry.fitted((*shape[:2], 1, 1))
    return replace(entry, value=entry.value.flatten(1))


def _read_block(draft: Draft, prefix: str, modules: set[str]) -> None:
    """Tell what a block pools and what its norm is from the names of its modules."""
    source = draft.source
    for module, others in source.followed.items():
        if module in modules and not modules.intersection(others):
            raise CheckpointError(
                f"the block {prefix!r} has no {' or '.join(others)}, which {source.title} has after {module}"
            )
    if not source.pool:
        # Where g and phi are pooled, each is the first of a Sequential: g.0, phi.0.
        keys = [module for module in modules if source.modules[module] in ("g", "phi")]
        pools = {"embedding" if re.search(r"\.0\b", module) else "none" for module in keys}
        if len(pools) > 1:
            raise CheckpointError(f"the block {prefix!r} pools one of g and phi and not the other")
        draft.pool = tuple({*draft.pool, *pools})
    for module in sorted(modules):
        if source.modules[module] == "w_z.norm":
            counts = any(f"w_z.norm.{leaf}" in draft.blocks[prefix] for leaf in (*STATISTICS, COUNTER))
            draft.block_norms[prefix] = source.block_norms.get(module, "BN" if counts else "GN")


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
        elif mean in draft.entries:
            entry = draft.entries[mean]
            if entry.value.shape != bias.value.shape:
                raise CheckpointError(f"{bias.origin} has another size than the norm after it")
            draft.entries[mean] = entry.changed(entry.value - bias.value, f"less the bias {bias.origin}")
            draft.skipped[bias.origin] = f"taken into {mean}"
        elif has_statistics(draft):
            raise CheckpointError(f"{mean} is not in the file, and the bias {bias.origin} belongs into it")
        else:
            continue
        del draft.entries[name]
