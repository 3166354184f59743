"""The conversion of a weight file: read, sort, fit to a config's model, write."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from detectron2.config import CfgNode
from torch import Tensor, nn

from nonlocal_det import get_config
from nonlocal_det.checkpoint.checkpointer import compile_allow_missing
from nonlocal_det.checkpoint.load_report import NO_STATISTICS, compare
from nonlocal_det.checkpoint.reading import read_checkpoint, read_onnx
from nonlocal_det.config.loading import find_config
from nonlocal_det.convert.conversion_report import ConversionReport, Move, Setting
from nonlocal_det.convert.draft import (
    COUNTER,
    SUMMED,
    Draft,
    Entry,
    Source,
    inside_backbone,
    read_draft,
)
from nonlocal_det.convert.output import SUFFIXES, config_text, write_all
from nonlocal_det.convert.settings import (
    check_architecture,
    config_places,
    decide_settings,
    get_value,
    place_named,
)
from nonlocal_det.convert.sources import SOURCES
from nonlocal_det.convert.targets import baseline_settings, strip_blocks, to_mmcv
from nonlocal_det.errors import CheckpointError
from nonlocal_det.layers import NonLocalBlock
from nonlocal_det.modeling.build import build_on_meta

__all__ = ["TARGETS", "convert_checkpoint"]

TARGETS = ("nonlocal_det", "detectron2", "mmcv")
# Where trainers keep the weights, among other things.
_WRAPPERS = ("model", "state_dict", "model_state", "model_state_dict", "blobs", "net")


def convert_checkpoint(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    config_file: str | os.PathLike[str],
    opts: Sequence[Any] = (),
    *,
    source: str = "auto",
    target: str = "nonlocal_det",
    places: Mapping[str, str] | None = None,
    base: str | os.PathLike[str] | None = None,
    skip: str = "",
    blocks_only: bool = False,
    allow_missing: str = "",
    unpadded_pool: bool = False,
    allow_moved: bool = False,
    strip_trained: bool = False,
    overwrite: bool = False,
) -> ConversionReport:
    """Convert a weight file to a checkpoint for a config's model, and write the config that goes with it.

    Args:
        path: what is converted: ``.pth``, ``.pkl``, ``.safetensors`` or ``.onnx``.
        out: what is written: ``.pth`` or ``.safetensors``; the config gets the same name with ``.yaml``.
        config_file: the config that the weights are meant for, as for :func:`nonlocal_det.get_config`.
        opts: overrides of it.
        source: whose weights they are, a key of ``SOURCES``; "auto" finds out.
        target: "nonlocal_det"; "detectron2" for a baseline without blocks; "mmcv" for the blocks alone, with
            the names of mmcv's NonLocal2d.
        places: prefix of a block in the file -> its place, such as "res4.5". Blocks whose names do not say
            where they are go to the config's places in order, if there are as many.
        base: another weight file, which gives what this one lacks.
        skip: regular expression; tensors of the file in whose names it is found are not needed.
        blocks_only: take the non-local blocks alone.
        allow_missing: regular expression; what is missing is allowed if it is found in the name of each.
        unpadded_pool: make the config's stem that of the authors, see :mod:`nonlocal_det.modeling.stem`.
        allow_moved: put blocks that work inside a residual branch after the residual block.
        strip_trained: with target "detectron2", leave out blocks that do something.
        overwrite: replace ``out`` and its config.

    Returns:
        Where every tensor went, and what was set.

    Raises:
        CheckpointError: the file cannot be read safely, is not the source's, or does not fit the config.
        ConfigError: the config is wrong.
        OSError: a file cannot be read or written.
    """
    path, out = Path(path), Path(out)
    _check_paths([path, find_config(config_file), *map(Path, [base] if base else [])], out, overwrite, target)
    allowed = compile_allow_missing(allow_missing)
    cfg = get_config(config_file, opts)
    found, draft = _read(path, source, skip)
    if blocks_only:
        _drop_entries(draft)
    try:
        if base is not None:
            draft = _over(draft, _read(Path(base), "auto", skip)[1], Path(base).name)
        check_architecture(cfg, draft)
        _place_blocks(draft, cfg, places or {}, allow_moved)
        settings, notes = decide_settings(cfg, draft, unpadded_pool=unpadded_pool)
    except CheckpointError as error:
        raise CheckpointError(f"weights {path}: {error}") from None
    cfg = get_config(config_file, [*opts, *_flat(settings)])
    said = [*draft.net_notes, *draft.notes, *notes]
    report = ConversionReport(str(path), found.title, settings=settings, notes=said)

    model = build_on_meta(cfg)
    tensors = _fit(draft, model, report, allowed)
    if target == "nonlocal_det":
        config_values = {key: setting.value for key, setting in settings.items()}
    else:
        tensors, config_values = _to_target(target, tensors, model, cfg, report, strip_trained)
    author = f"nonlocal_det, from {found.title}"
    text = None
    if target != "mmcv":
        given = {key: get_value(cfg, key) for key in opts[0::2]}
        values = given | config_values | {"MODEL.WEIGHTS": str(out.resolve())}
        text = config_text(
            find_config(config_file).resolve(), values, f"What the weights {out.name} assume ({author})."
        )
    report.written = write_all(out, tensors, author, text)
    return report


def _check_paths(inputs: list[Path], out: Path, overwrite: bool, target: str) -> None:
    if out.suffix not in SUFFIXES:
        raise CheckpointError(f"{out}: the suffix says what is written; give {' or '.join(SUFFIXES)}")
    for file in (out, out.with_suffix(".yaml")) if target != "mmcv" else (out,):
        if not file.exists():
            continue
        if any(path.exists() and file.samefile(path) for path in inputs):
            raise CheckpointError(f"{file}: is read for the conversion; write to another")
        if file.is_dir() or not overwrite:
            raise CheckpointError(f"{file}: exists; write to another, or add --overwrite")


def _read(path: Path, name: str, skip: str) -> tuple[Source, Draft]:
    """Read a weight file and sort its tensors."""
    try:
        unwanted = re.compile(skip or "(?!)")
    except re.error as error:
        raise CheckpointError(f"--skip {skip!r}: not a regular expression ({error})") from None
    if path.suffix == ".onnx":
        source = SOURCES["onnx"]
        if name not in ("auto", source.name):
            raise CheckpointError(f"weights {path}: an ONNX network; leave --from out, or write --from onnx")
        weights, rest = {}, {"graph": read_onnx(path).graph}
    else:
        content = read_checkpoint(path)
        weights, rest = _unwrap(path, content)
        source = _recognise(path, list(weights), name)
    wanted = {key: value for key, value in weights.items() if not unwanted.search(key)}
    try:
        draft = read_draft(source, wanted, rest)
    except CheckpointError as error:
        raise CheckpointError(f"weights {path}: {error}") from None
    draft.skipped.update(dict.fromkeys(weights.keys() - wanted.keys(), "asked for by --skip"))
    return source, draft


def _unwrap(path: Path, content: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the weights of a file, and what else it holds."""
    weights, rest = content, {}
    for key in _WRAPPERS:
        if isinstance(content.get(key), Mapping):
            weights, rest = content[key], {name: value for name, value in content.items() if name != key}
            break
    if not weights or not all(isinstance(name, str) for name in weights):
        raise CheckpointError(
            f"weights {path}: no weights by name inside, alone or under {', '.join(_WRAPPERS)}"
        )
    if all(name.startswith("module.") for name in weights):  # DataParallel
        weights = {name.removeprefix("module."): value for name, value in weights.items()}
    return dict(weights), rest


def _recognise(path: Path, names: list[str], name: str) -> Source:
    likely = [source for source in SOURCES.values() if source.recognises(names)]
    if name == "auto":
        if likely:
            return likely[0]
        shown = ", ".join(names[:3])
        raise CheckpointError(
            f"weights {path}: whose they are cannot be told by their names ({shown}, ...); "
            f"known are {', '.join(SOURCES)}"
        )
    if name not in SOURCES:
        raise CheckpointError(f"--from {name}: not known; write auto or one of {', '.join(SOURCES)}")
    source = SOURCES[name]
    if source not in likely:
        hint = f"they look like {likely[0].title}: --from {likely[0].name}" if likely else "see --from"
        raise CheckpointError(f"weights {path}: their names are not those of {source.title}; {hint}")
    return source


def _over(draft: Draft, base: Draft, file: str) -> Draft:
    """Return a draft with what it lacks outside of blocks taken from another, of the file of --base.

    Raises:
        CheckpointError: the net would be of two files.
    """
    # Names may be those inside the backbone or those inside the model: the one is an end of the other.
    ends = {end for name in draft.entries for end in _ends(name)}
    taken = {
        name: replace(entry, origin=entry.origin and f"{file}: {entry.origin}")
        for name, entry in base.entries.items()
        if name not in ends and not any(end in draft.entries for end in _ends(name))
    }
    unused = [entry.origin for name, entry in base.entries.items() if name not in taken]
    unused += [entry.origin for parts in base.blocks.values() for entry in parts.values()]
    why = "of --base, which gives what the other lacks outside of blocks"
    skipped = {**dict.fromkeys(filter(None, unused), why), **base.skipped}
    net = base
    if inside_backbone(draft):
        net = draft
        both = inside_backbone(replace(base, entries=taken))
        if lacking := [name for name in both if not name.endswith(COUNTER)]:
            raise CheckpointError(
                f"a part of the ResNet ({lacking[0]}) would come from --base {file} and the rest from the "
                "other file; a net of two files is none: leave --base out, or add --blocks-only"
            )
        taken = {name: entry for name, entry in taken.items() if name not in both.values()}
    return replace(
        draft,
        entries={**taken, **draft.entries},
        skipped={**{f"{file}: {name}": why for name, why in skipped.items()}, **draft.skipped},
        leftovers=[*draft.leftovers, *(f"{file}: {name}" for name in base.leftovers)],
        net_notes=net.net_notes,
        pixels=net.pixels,
        stride_in_1x1=net.stride_in_1x1,
        unpadded_pool=net.unpadded_pool,
        norm=net.norm,
    )


def _ends(name: str) -> list[str]:
    """Return a name, and what is left of it without its first part, its first two and so on."""
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


def _drop_entries(draft: Draft) -> None:
    why = "not in a block (--blocks-only)"
    draft.skipped.update({entry.origin: why for entry in draft.entries.values() if entry.origin})
    draft.skipped.update(dict.fromkeys(draft.leftovers, why))
    draft.entries, draft.leftovers = {}, []
    draft.forget_net()


def _place_blocks(draft: Draft, cfg: CfgNode, places: Mapping[str, str], allow_moved: bool) -> None:
    """Give every block of the file its place."""
    for prefix, place in places.items():
        if prefix not in draft.blocks:
            known = ", ".join(repr(name) for name in draft.blocks) or "none"
            raise CheckpointError(f"--place {prefix}={place}: no such block in the file; there are {known}")
        draft.places[prefix] = place_named(place, cfg, draft)
    homeless = [prefix for prefix in draft.blocks if prefix not in draft.places]
    if homeless:
        wanted = config_places(cfg, draft)
        if len(wanted) != len(homeless) or draft.places:
            raise CheckpointError(
                f"where the blocks {', '.join(map(repr, homeless))} belong is not in their names, and the "
                f"config asks for {len(wanted)}; say it by --place {homeless[0]}=res4.5 for each"
            )
        draft.places.update(zip(homeless, wanted, strict=True))
        draft.notes += [f"the block {name!r} was put at {place}" for name, place in draft.places.items()]
    doubles = {place for place in draft.places.values() if list(draft.places.values()).count(place) > 1}
    if doubles:
        raise CheckpointError(
            f"two blocks of the file would be {doubles.pop()}; give one of them another --place"
        )
    for prefix in sorted(draft.inside_branch - set(places)):
        _check_moved(draft, prefix, allow_moved)


def _check_moved(draft: Draft, prefix: str, allow_moved: bool) -> None:
    place = draft.places[prefix]
    stage = place.partition(".")[0]
    after = int(place.rpartition("_")[2]) - 1
    last = draft.entries.get(f"{stage}.{after}.conv3.weight")
    weight = draft.blocks[prefix].get("g.weight")
    channels = None if weight is None else weight.value.shape[1]
    if None not in (last, weight) and last.value.shape[0] != channels:
        raise CheckpointError(
            f"the block {prefix} works on {channels} channels inside the residual block, after its conv1 or "
            "conv2; ours work between residual blocks"
        )
    what = f"the block {prefix} works on the residual branch before the sum; ours works on the sum"
    if not allow_moved:
        raise CheckpointError(
            f"{what}, so the net would not compute the same; --allow-moved puts it after the residual block, "
            "for fine-tuning"
        )
    draft.notes.append(f"{what}: the net does not compute the same until it is fine-tuned")


def _fit(
    draft: Draft, model: nn.Module, report: ConversionReport, allowed: re.Pattern[str] | None
) -> dict[str, Tensor]:
    """Give a draft's tensors the model's names, and refuse what does not fit."""
    state = model.state_dict()
    by_end: dict[str, list[str]] = {}
    for name in state:
        for end in _ends(name):
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
            raise CheckpointError(
                f"weights {report.path}: {entry.origin} fits more than one tensor: {targets[:2]}"
            )
        if targets and targets[0] in found:
            raise CheckpointError(
                f"weights {report.path}: both {found[targets[0]].origin} and {entry.origin} would become "
                f"{targets[0]}; leave one of them out by --skip REGEX"
            )
        if targets:
            found[targets[0]] = entry
        elif name.endswith(COUNTER):
            report.skipped[entry.origin] = "a counter, which frozen norms have none of"
        else:
            leftovers.append(entry.origin or name)
    if leftovers:
        shown = ", ".join(leftovers[:3]) + (", ..." if len(leftovers) > 3 else "")
        raise CheckpointError(
            f"weights {report.path}: {len(leftovers)} of their tensors have no place in the config's model "
            f"({shown}): take the config that they belong to, or leave them out by --skip REGEX"
        )
    wrong = [
        (name, tuple(entry.value.shape), tuple(state[name].shape))
        for name, entry in found.items()
        if entry.value.shape != state[name].shape
    ]
    shaped = {name: entry for name, entry in found.items() if entry.value.shape == state[name].shape}
    shaped |= _counters(shaped, state)
    missing = [name for name in state if name not in found and name not in shaped]
    if not draft.entries:  # a file of blocks alone
        missing = [name for name in missing if ".non_local_" in name]
        report.notes.append(
            "the file holds blocks alone, and so does what was written; --base FILE adds a net's weights"
        )
    fitted = compare(model, report.path, missing, wrong, ())
    # A training can start without statistics; a conversion that lacks them is not what was trained.
    fitted.unexpected.update(dict.fromkeys(fitted.expected.pop(NO_STATISTICS, ()), "not in the file"))
    if allowed is not None:
        fitted.allow(allowed)
    fitted.refuse()
    report.expected.update(fitted.expected)
    if fitted.allowed:
        report.expected["allowed by --allow-missing"] = list(fitted.allowed)
    for name, theirs, ours in wrong:
        report.skipped[found[name].origin] = f"shape {list(theirs)}, the model's has {list(ours)}"
    report.moves = [
        Move(entry.origin, name, tuple(entry.value.shape), entry.how) for name, entry in shaped.items()
    ]
    if not any(move.origin for move in report.moves):
        raise CheckpointError(f"weights {report.path}: nothing of the file is left to be written")
    if summed := sum(SUMMED in move.how for move in report.moves):
        report.notes.append(
            f"{summed} convs over time were summed over their frames: exact for a still clip, but for frames "
            "so near its ends that the padding shows"
        )
    # In the order of the model, which is how checkpoints are usually listed.
    return {name: shaped[name].value for name in state if name in shaped}


def _counters(entries: Mapping[str, Entry], state: Mapping[str, Tensor]) -> dict[str, Entry]:
    """Return the counters that the model's batch norms have and the file does not; they compute nothing."""
    return {
        name: Entry(torch.zeros((), dtype=torch.int64), "", "counter")
        for name in state
        if name.endswith(COUNTER) and name not in entries and f"{name.removesuffix(COUNTER)}weight" in entries
    }


def _to_target(
    target: str,
    tensors: dict[str, Tensor],
    model: nn.Module,
    cfg: CfgNode,
    report: ConversionReport,
    strip_trained: bool,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return what is written instead of our checkpoint, and the keys of its config."""
    blocks: dict[str, dict[str, Tensor]] = {}
    halves: dict[str, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, NonLocalBlock):
            parts = list(module.state_dict())
            found = {part: tensors[f"{name}.{part}"] for part in parts if f"{name}.{part}" in tensors}
            if found:
                blocks[name] = found
            if lacking := [part for part in parts if part not in found and found]:
                halves[name] = lacking
    origins = {move.target: move.origin for move in report.moves}
    try:
        if target == "mmcv":
            if halves:
                block, lacking = next(iter(halves.items()))
                raise CheckpointError(f"{block}.{lacking[0]} is not in the file, and mmcv's block needs it")
            written, moves, notes = to_mmcv(blocks, cfg)
            report.moves = [replace(move, origin=origins[move.origin]) for move in moves]
            taken = {move.origin for move in report.moves}
            report.skipped.update(
                {origin: "not in a block" for origin in origins.values() if origin and origin not in taken}
            )
            report.notes += notes
            report.expected = {}
            return written, {}
        if cfg.MODEL.NONLOCAL.BLOCK == "residual":
            raise CheckpointError(
                "the config has residual blocks in the place of non-local ones (MODEL.NONLOCAL.BLOCK), and "
                "those are not stripped"
            )
        written = strip_blocks(tensors, blocks, halves, trained=strip_trained)
    except CheckpointError as error:
        raise CheckpointError(f"weights {report.path}: {error}") from None
    report.moves = [move for move in report.moves if move.target in written]
    stripped = [origins[name] for name in tensors if name not in written]
    report.skipped.update(dict.fromkeys(filter(None, stripped), "in a non-local block"))
    for reason, names in list(report.expected.items()):
        report.expected[reason] = [name for name in names if ".non_local_" not in name]
    report.expected = {reason: names for reason, names in report.expected.items() if names}
    report.settings |= baseline_settings(cfg)
    return written, {key: setting.value for key, setting in report.settings.items()}


def _flat(settings: Mapping[str, Setting]) -> list[Any]:
    return [item for key, setting in settings.items() for item in (key, setting.value)]
