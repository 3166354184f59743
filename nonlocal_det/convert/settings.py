"""The config that goes with converted weights: what they assume, against what a config says."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

from detectron2.config import CfgNode

from nonlocal_det.config.keys import WRAPPER
from nonlocal_det.config.messages import get_value
from nonlocal_det.convert.conversion_report import Setting
from nonlocal_det.convert.draft import COUNTER, STATISTICS, Draft, inside_backbone
from nonlocal_det.convert.placement import DEPTHS, config_positions, count_blocks
from nonlocal_det.detection.config import KEYPOINT_HEAD
from nonlocal_det.errors import CheckpointError
from nonlocal_det.modeling.stem import UNPADDED

# Norms of one family have the same tensors and, in evaluation, do the same.
BATCH_NORMS = ("BN", "SyncBN", "naiveSyncBN")
RESNET_BATCH_NORMS = ("FrozenBN", *BATCH_NORMS, "nnSyncBN", "naiveSyncBN_N")
NORMS = {"BN": BATCH_NORMS, "GN": ("GN", "LN")}


def check_architecture(cfg: CfgNode, draft: Draft) -> None:
    """Check that a file's ResNet is the config's, before names are compared one by one.

    Raises:
        CheckpointError: it is another; the message has the keys to set.
    """
    found = _architecture(draft)
    wrong = {key: value for key, value in found.items() if get_value(cfg, key) != value}
    if wrong:
        said = ", ".join(f"{key} {get_value(cfg, key)}" for key in wrong)
        right = " ".join(f"{key} {value}" for key, value in wrong.items())
        raise CheckpointError(
            f"the weights are not of the config's ResNet, which has {said}; "
            f"take the config they belong to, or add --opts {right}"
        )


def decide_settings(
    cfg: CfgNode, draft: Draft, *, unpadded_pool: bool
) -> tuple[dict[str, Setting], list[str]]:
    """Return the settings that the weights assume and the config lacks, and notes on what they leave open.

    Every block has its place. ``unpadded_pool`` asks for a stem whose max pool is not padded.

    Raises:
        CheckpointError: the blocks differ in their options, the stem cannot be changed, or neither the
            weights nor the config say what the weights are.
    """
    chosen = _Choices(cfg)
    _set_pixels(chosen, cfg, draft)
    if draft.net.stride_in_1x1 is not None:
        chosen.set("MODEL.RESNETS.STRIDE_IN_1X1", draft.net.stride_in_1x1, "where the net has its strides")
    elif "res3.0.conv3.weight" in inside_backbone(draft):
        chosen.notes.append(
            "the file does not say where the net has its strides, nor whether its stem's max pool is padded; "
            f"the config's are kept: MODEL.RESNETS.STRIDE_IN_1X1 {cfg.MODEL.RESNETS.STRIDE_IN_1X1}, backbone "
            f"{_backbone_name(cfg)[1]}"
        )
    _set_norm(chosen, cfg, draft)
    _set_placement(chosen, cfg, draft)
    _set_block_options(chosen, draft)
    _set_stem(chosen, cfg, draft, unpadded_pool)
    return chosen.settings, chosen.notes


class _Choices:
    """Collects settings that differ from a config."""

    def __init__(self, cfg: CfgNode) -> None:
        self.cfg = cfg
        self.settings: dict[str, Setting] = {}
        self.notes: list[str] = []

    def set(self, key: str, value: Any, why: str) -> None:
        before = get_value(self.cfg, key)
        if value == (list(before) if isinstance(value, list) else before):
            self.settings.pop(key, None)
        else:
            self.settings[key] = Setting(before, value, why)

    def choose(self, key: str, allowed: Sequence[Any], why: str) -> Any:
        """Take what the weights allow: the config's value where that leaves a choice."""
        before = get_value(self.cfg, key)
        if len(allowed) == 1:
            self.set(key, allowed[0], why)
            return allowed[0]
        if before not in allowed:
            values = " or ".join(map(repr, allowed))
            raise CheckpointError(
                f"{key} is {before!r}, and the weights are of {values}, which they do not tell apart; "
                f"say which, such as --opts {key} {allowed[0]}"
            )
        others = ", ".join(repr(other) for other in allowed if other != before)
        self.notes.append(f"{key}: the weights do not tell {before!r} from {others}; the config's is taken")
        return before


def _set_pixels(chosen: _Choices, cfg: CfgNode, draft: Draft) -> None:
    pixels = draft.net.pixels
    if pixels is None:
        if draft.entries:
            chosen.notes.append(
                "the file does not say what pixels the net was trained with; the config's are kept: "
                f"{cfg.INPUT.FORMAT}, mean {list(cfg.MODEL.PIXEL_MEAN)}, "
                f"standard deviation {list(cfg.MODEL.PIXEL_STD)}"
            )
        return
    order, channels = pixels.order, len(cfg.MODEL.PIXEL_MEAN)
    found = {"pixel_mean": pixels.mean, "pixel_std": pixels.std}
    found = {key: list(values) for key, values in found.items() if values is not None}
    for key, values in found.items():
        if len(values) != channels:
            raise CheckpointError(
                f"{key} has {len(values)} channels and the config's MODEL.PIXEL_MEAN {channels}; take the "
                "config that they belong to"
            )
    why = "the pixels that the net was trained with"
    if not order:
        order = cfg.INPUT.FORMAT
        if pixels.mean and not _close(pixels.mean, cfg.MODEL.PIXEL_MEAN):
            if order in ("RGB", "BGR") and _close(pixels.mean[::-1], cfg.MODEL.PIXEL_MEAN):
                order = order[::-1]
            else:
                chosen.notes.append(
                    "INPUT.FORMAT: the file does not say the order of its channels; "
                    f"the config's {order} is kept"
                )
    chosen.set("INPUT.FORMAT", order, why)
    for key, values in found.items():
        if not _close(values, cfg.MODEL[key.upper()]):
            chosen.set(f"MODEL.{key.upper()}", values, why)
    mean, std = (list(found.get(key, cfg.MODEL[key.upper()])) for key in ("pixel_mean", "pixel_std"))
    chosen.notes.append(
        f"the net was trained with {order} pixels of mean {mean} and standard deviation {std}, "
        f"{'not ' if chosen.settings else ''}as the config says"
    )


def _close(values: Sequence[float], others: Sequence[float]) -> bool:
    """Tell whether numbers are the same as float32."""
    return len(values) == len(others) and all(map(partial(math.isclose, rel_tol=1e-6), values, others))


def _set_norm(chosen: _Choices, cfg: CfgNode, draft: Draft) -> None:
    """Set the kind of the ResNet's norms, whose tensors frozen batch norms and group norms have in common."""
    key = "MODEL.RESNETS.NORM"
    before = get_value(cfg, key)
    norms = [name for name in inside_backbone(draft).values() if ".norm." in name]
    statistics = [name for name in norms if name.endswith((*STATISTICS, COUNTER))]
    kind = draft.net.norm or ("BN" if statistics else "GN" if norms else "")
    if not norms or not kind:
        return
    if kind == "BN":
        if before not in RESNET_BATCH_NORMS:
            chosen.set(key, "FrozenBN", "the net has batch norms")
        elif before != "FrozenBN" and not all(draft.entries[name].origin for name in statistics):
            chosen.notes.append(
                f"{key} is {before}, and the weights are of frozen norms, whose statistics are in their "
                "factors: the net is the same until it is trained; FrozenBN keeps them frozen"
            )
    elif draft.net.norm == "GN":
        chosen.set(key, "GN", "the net has group norms")
    elif before in RESNET_BATCH_NORMS:
        raise CheckpointError(
            f"{key} is {before}, and the file has no running statistics, such as "
            f"{norms[0].rpartition('.')[0]}.running_mean: if its norms are group norms, add --opts {key} GN, "
            "else the file is not whole"
        )
    else:
        chosen.notes.append(
            f"{key}: the file's norms have no statistics; they are taken to be the config's {before}"
        )


def _set_placement(chosen: _Choices, cfg: CfgNode, draft: Draft) -> None:
    if not draft.places:
        return
    why = "where the blocks of the file are"
    found: dict[str, list[int]] = {}
    for place in draft.places.values():
        part, position = re.fullmatch(r"(.+)\.non_local_(\d+)", place).groups()
        found.setdefault(part, []).append(int(position))
    every = sorted(found.pop("keypoint_head", ()))
    if every:
        convs = len(cfg.MODEL.ROI_KEYPOINT_HEAD.CONV_DIMS)
        if every != list(range(every[0], convs + 1, every[0])):
            raise CheckpointError(
                f"the head's blocks are after the convs {every} of {convs}; ours are after every k of them "
                "(MODEL.NONLOCAL.KEYPOINT_HEAD k), so one is missing or has another place"
            )
        chosen.set("MODEL.NONLOCAL.KEYPOINT_HEAD", every[0], why)
        chosen.set("MODEL.ROI_KEYPOINT_HEAD.NAME", KEYPOINT_HEAD, why)
    if not found:
        return
    for stage, positions in config_positions(cfg, draft).items():
        if sorted(positions) != sorted(found.get(stage, [])):
            chosen.set(f"MODEL.NONLOCAL.{stage.upper()}", sorted(found.get(stage, [])), why)
    if cfg.MODEL.BACKBONE.NAME != WRAPPER:
        chosen.set("MODEL.NONLOCAL.BACKBONE", cfg.MODEL.BACKBONE.NAME, "the backbone that gets the blocks")
        chosen.set("MODEL.BACKBONE.NAME", WRAPPER, "the backbone gets blocks")


def _set_block_options(chosen: _Choices, draft: Draft) -> None:
    if not draft.blocks:
        return
    kinds = {prefix: _block_options(prefix, draft) for prefix in draft.blocks}
    first, options = next(iter(kinds.items()))
    for prefix, other in kinds.items():
        if other != options:
            raise CheckpointError(
                f"the blocks {first!r} and {prefix!r} differ: {options} and {other}; "
                "a model of ours has one set of options for all its blocks"
            )
    pairwise, norms, reduction = options
    why = "the blocks' tensors"
    chosen.set("MODEL.NONLOCAL.BLOCK", "non_local", why)
    pairwise = chosen.choose("MODEL.NONLOCAL.PAIRWISE", pairwise, why)
    if norms == BATCH_NORMS:  # which of them makes no difference to the weights
        norm = chosen.cfg.MODEL.NONLOCAL.NORM
        norms = (norm if norm in norms else norms[0],)
    chosen.choose("MODEL.NONLOCAL.NORM", norms, why)
    chosen.set("MODEL.NONLOCAL.REDUCTION", reduction, why)
    if set(draft.pool) == {"embedding", "none"}:
        raise CheckpointError("some blocks of the file pool and some do not; ours are all alike")
    chosen.choose("MODEL.NONLOCAL.POOL", draft.pool, "what the source's blocks pool")
    if scale := draft.source.scale.get(pairwise):
        chosen.choose("MODEL.NONLOCAL.SCALE", scale, "whether the source's blocks scale")


def _block_options(prefix: str, draft: Draft) -> tuple[tuple[str, ...], tuple[str, ...], int]:
    """Return the possible PAIRWISE and NORM of a block, and its REDUCTION."""
    parts, norm = draft.blocks[prefix], draft.block_norms.get(prefix)
    if "w_f.weight" in parts:
        pairwise: tuple[str, ...] = ("concatenation",)
    elif any(part.startswith(("theta.", "phi.")) for part in parts):
        pairwise = ("embedded_gaussian", "dot_product")
    else:
        pairwise = ("gaussian",)
    norms = NORMS[norm] if norm else ("",)
    inner, channels = parts["g.weight"].value.shape[:2] if "g.weight" in parts else (0, 0)
    if not inner:
        raise CheckpointError(f"the block {prefix!r} has no weight of g")
    reduction = channels // inner
    if reduction < 1 or max(1, channels // reduction) != inner:
        raise CheckpointError(
            f"the block {prefix!r} has {channels} channels and {inner} inside; ours have C // REDUCTION"
        )
    return pairwise, norms, reduction


def _backbone_name(cfg: CfgNode) -> tuple[str, str]:
    """Return the key of the builder that makes the ResNet, and its value."""
    key = "MODEL.NONLOCAL.BACKBONE" if cfg.MODEL.BACKBONE.NAME == WRAPPER else "MODEL.BACKBONE.NAME"
    return key, get_value(cfg, key)


def _set_stem(chosen: _Choices, cfg: CfgNode, draft: Draft, unpadded_pool: bool) -> None:
    inner, name = _backbone_name(cfg)
    if "MODEL.BACKBONE.NAME" in chosen.settings:
        inner = "MODEL.NONLOCAL.BACKBONE"  # the wrapper takes its name
    if unpadded_pool and draft.net.unpadded_pool is False:
        raise CheckpointError(
            "--unpadded-pool: the stem of these weights pads its max pool; leave the flag out"
        )
    if name in UNPADDED.values():
        if draft.net.unpadded_pool is False:
            padded = next(padded for padded, unpadded in UNPADDED.items() if unpadded == name)
            chosen.set(inner, padded, "the stem of these weights pads its max pool")
        return
    if not unpadded_pool:
        if draft.net.unpadded_pool:
            chosen.notes.append(
                "the max pool of their stem has no padding where Detectron2's has 1, so features lie a pixel "
                "off; --unpadded-pool makes a config whose stem is theirs"
            )
        return
    if name not in UNPADDED:
        raise CheckpointError(
            f"--unpadded-pool: {inner} is {name!r}; the stem can be changed of {', '.join(UNPADDED)}"
        )
    chosen.set(inner, UNPADDED[name], "a stem whose max pool is not padded was asked for")


def _architecture(draft: Draft) -> dict[str, Any]:
    """Return the config keys of a file's ResNet, as far as its tensors show them."""

    def shape(name: str) -> Sequence[int] | None:
        entry = draft.entries.get(names.get(name, ""))
        # Other shapes are found where all are compared.
        is_conv = entry is not None and entry.value.dim() in (4, 5) and entry.value.numel()
        return entry.value.shape if is_conv else None

    names = inside_backbone(draft)
    counts = tuple(count_blocks(draft, f"res{stage}") for stage in range(2, 6))
    found: dict[str, Any] = {}
    if stem := shape("stem.conv1.weight"):
        found["MODEL.RESNETS.STEM_OUT_CHANNELS"] = stem[0]
    if not (middle := shape("res2.0.conv2.weight")):
        return found
    last = shape("res2.0.conv3.weight")
    depths = [
        depth for depth, known in DEPTHS.items() if known == counts and (depth > 34) == (last is not None)
    ]
    if depths:
        found["MODEL.RESNETS.DEPTH"] = depths[0]
    if last is not None:
        found["MODEL.RESNETS.RES2_OUT_CHANNELS"] = last[0]
        found["MODEL.RESNETS.NUM_GROUPS"] = groups = middle[0] // middle[1]
        found["MODEL.RESNETS.WIDTH_PER_GROUP"] = middle[0] // groups
    return found
