"""What can be written besides our own checkpoint: a baseline without blocks, and mmcv's blocks."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from detectron2.config import CfgNode
from torch import Tensor, nn

from nonlocal_det.config.messages import get_value
from nonlocal_det.convert.conversion_report import ConversionReport, Move, Setting
from nonlocal_det.convert.settings import BATCH_NORMS
from nonlocal_det.detection.config import keys_without_blocks
from nonlocal_det.errors import CheckpointError
from nonlocal_det.layers import NonLocalBlock

#: Name of a block -> its tensors by their names inside it.
Blocks = dict[str, dict[str, Tensor]]


def to_baseline(
    tensors: dict[str, Tensor], model: nn.Module, cfg: CfgNode, report: ConversionReport, strip_trained: bool
) -> dict[str, Tensor]:
    """Leave out the non-local blocks, for a baseline; the report and its settings follow.

    Raises:
        CheckpointError: a block is no identity, and ``strip_trained`` is False; or the blocks are residual.
    """
    if cfg.MODEL.NONLOCAL.BLOCK == "residual":
        raise CheckpointError(
            "the config has residual blocks in the place of non-local ones (MODEL.NONLOCAL.BLOCK), and "
            "those are not stripped"
        )
    blocks, lacking = _blocks(tensors, model)
    # One that is not whole may do something.
    working = [name for name, block in blocks.items() if name in lacking or not _is_identity(block)]
    if working and not strip_trained:
        raise CheckpointError(
            f"{len(working)} of {len(blocks)} non-local blocks do something ({working[0]}), so the model "
            "without them is another; --strip-trained leaves them out all the same"
        )
    inside = {f"{name}.{part}" for name, block in blocks.items() for part in block}
    stripped = [move.origin for move in report.moves if move.target in inside and move.origin]
    report.skipped.update(dict.fromkeys(stripped, "in a non-local block"))
    report.moves = [move for move in report.moves if move.target not in inside]
    for why, names in list(report.expected.items()):
        report.expected[why] = [name for name in names if ".non_local_" not in name]
    report.expected = {why: names for why, names in report.expected.items() if names}
    for key, value in keys_without_blocks(cfg).items():
        report.settings[key] = Setting(get_value(cfg, key), value, "a model without blocks")
    return {name: value for name, value in tensors.items() if name not in inside}


def to_mmcv(
    tensors: dict[str, Tensor], model: nn.Module, cfg: CfgNode, report: ConversionReport
) -> dict[str, Tensor]:
    """Give the blocks alone the names of mmcv's NonLocal2d; the report says how to construct each there.

    Raises:
        CheckpointError: a block is not whole, or NonLocal2d cannot compute what it does.
    """
    blocks, lacking = _blocks(tensors, model)
    for name, parts in lacking.items():
        raise CheckpointError(f"{name}.{parts[0]} is not in the file, and mmcv's block needs it")
    _check_mmcv(blocks, cfg)
    origins = {move.target: move.origin for move in report.moves}
    report.moves, report.expected = [], {}
    written: dict[str, Tensor] = {}
    for name, block in blocks.items():
        for part, target, value, how in _mmcv_parts(name, block, cfg):
            written[f"{name}.{target}"] = value
            report.moves.append(Move(origins[f"{name}.{part}"], f"{name}.{target}", value.shape, how))
        report.notes.append(_mmcv_call(name, block["g.weight"].shape[1], cfg))
    taken = {move.origin for move in report.moves}
    report.skipped.update({each: "not in a block" for each in origins.values() if each and each not in taken})
    return written


def _blocks(tensors: Mapping[str, Tensor], model: nn.Module) -> tuple[Blocks, dict[str, list[str]]]:
    """Return the blocks of which something is there, and of those that are not whole what is lacking."""
    blocks, lacking = {}, {}
    for name, module in model.named_modules():
        if isinstance(module, NonLocalBlock):
            parts = list(module.state_dict())
            if found := {part: tensors[f"{name}.{part}"] for part in parts if f"{name}.{part}" in tensors}:
                blocks[name] = found
                if absent := [part for part in parts if part not in found]:
                    lacking[name] = absent
    return blocks, lacking


def _is_identity(block: Mapping[str, Tensor]) -> bool:
    """Tell whether a block adds nothing to its input, whatever that is."""
    last = "w_z.norm" if "w_z.norm.weight" in block else "w_z"
    return not (block[f"{last}.weight"].any() or block[f"{last}.bias"].any())


def _check_mmcv(blocks: Collection[str], cfg: CfgNode) -> None:
    node = cfg.MODEL.NONLOCAL
    if not blocks:
        raise CheckpointError("there is no non-local block to write in mmcv's names")
    if node.POOL == "input":
        raise CheckpointError(
            'mmcv\'s NonLocal2d cannot pool the input (MODEL.NONLOCAL.POOL "input"): it pools after phi '
            'and g, which gives other values; train with POOL "embedding" or "none" for it'
        )
    if node.PAIRWISE == "gaussian" and node.SCALE:
        raise CheckpointError(
            "mmcv's NonLocal2d does not scale the gaussian form (MODEL.NONLOCAL.SCALE True); train with "
            "SCALE False for it"
        )


def _mmcv_parts(name: str, block: Mapping[str, Tensor], cfg: CfgNode) -> list[tuple[str, str, Tensor, str]]:
    """Return (our part, mmcv's, its value, what was done to it) of a block."""
    norm = cfg.MODEL.NONLOCAL.NORM
    first = ".0" if cfg.MODEL.NONLOCAL.POOL == "embedding" else ""
    modules = {
        "theta": "theta.conv",
        "phi": f"phi{first}.conv",
        "g": f"g{first}.conv",
        "w_z": "conv_out.conv",
        "w_z.norm": f"conv_out.{'bn' if norm in BATCH_NORMS else 'gn'}",
        "w_f": "concat_project.conv",
    }
    found = []
    for part, value in block.items():
        module, leaf = part.rsplit(".", 1)
        how = ""
        if part == "w_z.bias" and norm:  # mmcv's conv before a norm has no bias
            if norm not in BATCH_NORMS and value.any():
                raise CheckpointError(
                    f"{name}.{part} is not zero, and mmcv's conv_out has no bias before a group norm"
                )
            continue
        if part == "w_z.norm.running_mean":
            value, how = value - block["w_z.bias"], "less the bias of w_z, which mmcv's conv_out lacks"
        found.append(
            (part, f"{modules[module]}.{leaf}", value[..., None, None] if module == "w_f" else value, how)
        )
    return found


def _mmcv_call(name: str, channels: int, cfg: CfgNode) -> str:
    """Return how a block is constructed there."""
    node = cfg.MODEL.NONLOCAL
    groups = {"GN": math.gcd(32, channels), "LN": 1}.get(node.NORM)
    norm = f"dict(type='GN', num_groups={groups})" if groups else "dict(type='BN')" if node.NORM else None
    return (
        f"{name} is NonLocal2d({channels}, reduction={node.REDUCTION}, use_scale={bool(node.SCALE)}, "
        f"sub_sample={node.POOL == 'embedding'}, mode={node.PAIRWISE!r}, norm_cfg={norm})"
    )
