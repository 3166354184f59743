"""What can be written besides our own checkpoint: a baseline without blocks, and mmcv's blocks."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from detectron2.config import CfgNode
from torch import Tensor

from nonlocal_det.config.messages import get_value
from nonlocal_det.convert.conversion_report import Move, Setting
from nonlocal_det.convert.settings import BATCH_NORMS
from nonlocal_det.detection.config import keys_without_blocks
from nonlocal_det.errors import CheckpointError

__all__ = ["baseline_settings", "strip_blocks", "to_mmcv"]


def strip_blocks(
    tensors: Mapping[str, Tensor],
    blocks: Mapping[str, Mapping[str, Tensor]],
    halves: Collection[str] = (),
    *,
    trained: bool,
) -> dict[str, Tensor]:
    """Leave out the non-local blocks, for a baseline.

    Args:
        tensors: a model's tensors.
        blocks: name of a block -> its tensors by their names inside it.
        halves: names of blocks some of whose tensors are not known, so that they may do something.
        trained: strip blocks that do something, too.

    Raises:
        CheckpointError: a block is no identity, and ``trained`` is False.
    """
    working = [name for name, block in blocks.items() if name in halves or not _is_identity(block)]
    if working and not trained:
        raise CheckpointError(
            f"{len(working)} of {len(blocks)} non-local blocks do something ({working[0]}), so the model "
            "without them is another; --strip-trained leaves them out all the same"
        )
    inside = {f"{name}.{part}" for name, block in blocks.items() for part in block}
    return {name: value for name, value in tensors.items() if name not in inside}


def _is_identity(block: Mapping[str, Tensor]) -> bool:
    """Tell whether a block adds nothing to its input, whatever that is."""
    last = "w_z.norm" if "w_z.norm.weight" in block else "w_z"
    return not (block[f"{last}.weight"].any() or block[f"{last}.bias"].any())


def baseline_settings(cfg: CfgNode) -> dict[str, Setting]:
    """Return the config keys that make a baseline of a config with blocks."""
    why = "a model without blocks"
    changes = keys_without_blocks(cfg)
    return {key: Setting(get_value(cfg, key), value, why) for key, value in changes.items()}


def to_mmcv(
    blocks: Mapping[str, Mapping[str, Tensor]], cfg: CfgNode
) -> tuple[dict[str, Tensor], list[Move], list[str]]:
    """Give blocks the names of mmcv's NonLocal2d.

    Args:
        blocks: name of a block -> its tensors by their names inside it.
        cfg: the config that they belong to.

    Returns:
        The tensors, where each came from, and how to construct each block there.

    Raises:
        CheckpointError: NonLocal2d cannot compute what the blocks do.
    """
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
    pooled = node.POOL == "embedding"
    norm = "bn" if node.NORM in BATCH_NORMS else "gn"
    modules = {
        "theta": "theta.conv",
        "phi": "phi.0.conv" if pooled else "phi.conv",
        "g": "g.0.conv" if pooled else "g.conv",
        "w_z": "conv_out.conv",
        "w_z.norm": f"conv_out.{norm}",
        "w_f": "concat_project.conv",
    }
    written: dict[str, Tensor] = {}
    moves: list[Move] = []
    notes: list[str] = []
    for name, block in blocks.items():
        channels = block["g.weight"].shape[1]
        parts = dict(block)
        how = {}
        if node.NORM:  # mmcv's conv before a norm has no bias
            bias = parts.pop("w_z.bias")
            if node.NORM in BATCH_NORMS:
                parts["w_z.norm.running_mean"] = parts["w_z.norm.running_mean"] - bias
                how["w_z.norm.running_mean"] = "less the bias of w_z, which mmcv's conv_out lacks"
            elif bias.any():
                raise CheckpointError(
                    f"{name}.w_z.bias is not zero, and mmcv's conv_out has no bias before a group norm"
                )
        for part, value in parts.items():
            module, leaf = part.rsplit(".", 1)
            target = f"{name}.{modules[module]}.{leaf}"
            written[target] = value[..., None, None] if module == "w_f" else value
            moves.append(Move(f"{name}.{part}", target, written[target].shape, how.get(part, "")))
        groups = {"GN": math.gcd(32, channels), "LN": 1}.get(node.NORM)
        norm_cfg = (
            f"dict(type='GN', num_groups={groups})" if groups else "dict(type='BN')" if node.NORM else None
        )
        notes.append(
            f"{name} is NonLocal2d({channels}, reduction={node.REDUCTION}, use_scale={bool(node.SCALE)}, "
            f"sub_sample={pooled}, mode={node.PAIRWISE!r}, norm_cfg={norm_cfg})"
        )
    return written, moves, notes
