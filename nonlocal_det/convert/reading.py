"""Reading of a weight file for a conversion: whose it is, its tensors, and another's for what it lacks."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nonlocal_det.checkpoint.fingerprints import likely_sources
from nonlocal_det.checkpoint.reading import read_checkpoint, read_onnx
from nonlocal_det.convert.draft import COUNTER, Draft, Net, Source, ends, inside_backbone, read_draft
from nonlocal_det.convert.sources import SOURCES
from nonlocal_det.errors import CheckpointError

# Where trainers keep the weights, among other things.
_WRAPPERS = ("model", "state_dict", "model_state", "model_state_dict", "blobs", "net")


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put the name of a weight file before messages that lack it."""
    try:
        yield
    except CheckpointError as error:
        if str(error).startswith("weights "):
            raise
        raise CheckpointError(f"weights {path}: {error}") from None


def read_weights(path: Path, name: str, skip: re.Pattern[str] | None) -> Draft:
    """Read a weight file and sort its tensors, without those in whose names ``skip`` is found.

    Raises:
        CheckpointError: it cannot be read safely, or is not the source's of this name ("auto" finds one).
    """
    with naming(path):
        if path.suffix == ".onnx":
            source = SOURCES["onnx"]
            if name not in ("auto", source.name):
                raise CheckpointError("an ONNX network; leave --from out, or write --from onnx")
            weights, rest = {}, {"graph": read_onnx(path).graph}
        else:
            weights, rest = _unwrap(read_checkpoint(path))
            source = _recognise(list(weights), name)
        wanted = {key: value for key, value in weights.items() if not (skip and skip.search(key))}
        draft = read_draft(source, wanted, rest)
    draft.skipped.update({name: "asked for by --skip" for name in weights if name not in wanted})
    return draft


def _unwrap(content: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the weights of a file, and what else it holds."""
    weights, rest = content, {}
    for key in _WRAPPERS:
        if isinstance(content.get(key), Mapping):
            weights, rest = content[key], {name: value for name, value in content.items() if name != key}
            break
    if not weights or not all(isinstance(name, str) for name in weights):
        raise CheckpointError(f"no weights by name inside, alone or under {', '.join(_WRAPPERS)}")
    if all(name.startswith("module.") for name in weights):  # DataParallel
        weights = {name.removeprefix("module."): value for name, value in weights.items()}
    return dict(weights), rest


def _recognise(names: list[str], name: str) -> Source:
    likely = likely_sources(names)
    if name == "auto":
        if likely:
            return SOURCES[likely[0]]
        raise CheckpointError(
            f"whose they are cannot be told by their names ({', '.join(names[:3])}, ...); "
            f"known are {', '.join(SOURCES)}"
        )
    source = SOURCES[name]
    if name not in likely:
        hint = f"they look like {SOURCES[likely[0]].title}: --from {likely[0]}" if likely else "see --from"
        raise CheckpointError(f"their names are not those of {source.title}; {hint}")
    return source


def drop_net(draft: Draft) -> None:
    """Leave the blocks alone in a draft."""
    why = "not in a block (--blocks-only)"
    draft.skipped.update({entry.origin: why for entry in draft.entries.values() if entry.origin})
    draft.skipped.update(dict.fromkeys(draft.leftovers, why))
    draft.entries, draft.leftovers, draft.net = {}, [], Net()


def over_base(draft: Draft, base: Draft, file: str) -> Draft:
    """Return a draft with what it lacks outside of blocks taken from another, of the file of ``--base``."""
    # Names may be those inside the backbone or those inside the model: the one is an end of the other.
    known = {end for name in draft.entries for end in ends(name)}
    taken = {
        name: replace(entry, origin=entry.origin and f"{file}: {entry.origin}")
        for name, entry in base.entries.items()
        if name not in known and not any(end in draft.entries for end in ends(name))
    }
    unused = [entry.origin for name, entry in base.entries.items() if name not in taken]
    unused += [entry.origin for parts in base.blocks.values() for entry in parts.values()]
    why = "of --base, which gives what the other lacks outside of blocks"
    skipped = {**dict.fromkeys(filter(None, unused), why), **base.skipped}
    net = base.net
    if inside_backbone(draft):
        net = draft.net
        both = inside_backbone(replace(base, entries=taken))
        if lacking := [name for name in both if not name.endswith(COUNTER)]:
            raise CheckpointError(
                f"a part of the ResNet ({lacking[0]}) would come from --base {file} and the rest from the "
                "other file; a net of two files is none: leave --base out, or add --blocks-only"
            )
        taken = {name: entry for name, entry in taken.items() if name not in both.values()}
    return replace(
        draft,
        net=net,
        entries={**taken, **draft.entries},
        skipped={**{f"{file}: {name}": why for name, why in skipped.items()}, **draft.skipped},
        leftovers=[*draft.leftovers, *(f"{file}: {name}" for name in base.leftovers)],
    )
