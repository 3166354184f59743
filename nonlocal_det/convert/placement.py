"""Where the blocks of a file go."""

from __future__ import annotations

import re
from collections.abc import Mapping

from detectron2.config import CfgNode

from nonlocal_det.config.keys import STAGES
from nonlocal_det.convert.draft import Draft
from nonlocal_det.errors import CheckpointError

# Residual blocks of res2 to res5 by depth; the first two have blocks of two convs.
DEPTHS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


def place_blocks(draft: Draft, cfg: CfgNode, places: Mapping[str, str], *, allow_moved: bool) -> None:
    """Give every block its place: the one in ``places``, the one in its name, or the config's in order.

    Raises:
        CheckpointError: a place is none or is taken, a block has none, or one would be moved.
    """
    for prefix, place in places.items():
        if prefix not in draft.blocks:
            known = ", ".join(repr(name) for name in draft.blocks) or "none"
            raise CheckpointError(f"--place {prefix}={place}: no such block in the file; there are {known}")
        draft.places[prefix] = _named(place, cfg, draft)
    homeless = [prefix for prefix in draft.blocks if prefix not in draft.places]
    if homeless:
        wanted = _wanted(cfg, draft)
        if len(wanted) != len(homeless) or draft.places:
            raise CheckpointError(
                f"where the blocks {', '.join(map(repr, homeless))} belong is not in their names, and the "
                f"config asks for {len(wanted)}; say it by --place {homeless[0]}=res4.5 for each"
            )
        draft.places.update(zip(homeless, wanted, strict=True))
        draft.notes += [f"the block {name!r} was put at {place}" for name, place in draft.places.items()]
    taken = list(draft.places.values())
    if doubles := {place for place in taken if taken.count(place) > 1}:
        raise CheckpointError(
            f"two blocks of the file would be {doubles.pop()}; give one of them another --place"
        )
    for prefix in sorted(draft.inside_branch - set(places)):
        _check_moved(draft, prefix, allow_moved)


def config_positions(cfg: CfgNode, draft: Draft) -> dict[str, list[int]]:
    """Return stage -> positions of the blocks that a config asks for, counted from 0."""
    counts = {key: _count(key.lower(), cfg, draft) for key in STAGES}
    places = cfg.MODEL.NONLOCAL
    return {key.lower(): [at % n if at < 0 else at for at in places[key]] for key, n in counts.items()}


def count_blocks(draft: Draft, stage: str) -> int:
    """Return how many residual blocks a file has in a stage, by the highest number."""
    matches = (re.search(rf"(?:^|\.){stage}\.(\d+)\.", name) for name in draft.entries)
    return 1 + max((int(match[1]) for match in matches if match), default=-1)


def _count(stage: str, cfg: CfgNode, draft: Draft) -> int:
    return count_blocks(draft, stage) or DEPTHS[cfg.MODEL.RESNETS.DEPTH][int(stage[3]) - 2]


def _named(place: str, cfg: CfgNode, draft: Draft) -> str:
    """Return our name of a block from "res4.5", "res4.-1" or "keypoint_head.2"."""
    match = re.fullmatch(r"(res[2-5]|keypoint_head)\.(-?\d+)", place)
    if match is None:
        raise CheckpointError(
            f"{place!r} is no place for a block; write one such as res4.5 (before block 5 of res4), res4.-1 "
            "or keypoint_head.2 (after its second conv)"
        )
    position = int(match[2])
    if position < 0 and match[1] != "keypoint_head":
        position += _count(match[1], cfg, draft)
    return f"{match[1]}.non_local_{position}"


def _wanted(cfg: CfgNode, draft: Draft) -> list[str]:
    """Return our names of the blocks that a config asks for, in the order in which they run."""
    places = []
    for stage, positions in config_positions(cfg, draft).items():
        places += [f"{stage}.non_local_{position}" for position in sorted(positions)]
    if cfg.MODEL.KEYPOINT_ON and (every := cfg.MODEL.NONLOCAL.KEYPOINT_HEAD):
        convs = len(cfg.MODEL.ROI_KEYPOINT_HEAD.CONV_DIMS)
        places += [f"keypoint_head.non_local_{k}" for k in range(every, convs + 1, every)]
    return places


def _check_moved(draft: Draft, prefix: str, allow_moved: bool) -> None:
    stage, _, block = draft.places[prefix].partition(".")
    after = int(block.rpartition("_")[2]) - 1
    last = draft.entries.get(f"{stage}.{after}.conv3.weight")
    weight = draft.blocks[prefix].get("g.weight")
    if last and weight and last.value.shape[0] != (channels := weight.value.shape[1]):
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
