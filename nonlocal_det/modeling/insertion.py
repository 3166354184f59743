"""Places in the stages of a ResNet, and blocks put there under names that leave all others as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from nonlocal_det.errors import ConfigError


def resolve_positions(key: str, positions: Sequence[int], count: int) -> list[int]:
    """Return positions counted from 0, sorted.

    Args:
        key: the config key that they come from.
        positions: i means before residual block i; negative ones count from the end.
        count: the number of residual blocks in the stage.

    Raises:
        ConfigError: a position is outside the stage, or named twice.
    """
    resolved: list[int] = []
    for position in positions:
        if not -count <= position <= count:
            raise ConfigError(
                f"{key} is {list(positions)}: {position} is outside the stage, which has {count} blocks; "
                f"write {-count} to {count} (-1 is before the last block, {count} after it)"
            )
        index = position + count if position < 0 else position
        if index in resolved:
            raise ConfigError(
                f"{key} is {list(positions)}: place {index} is named twice (of {count} blocks "
                f"the last is -1 or {count - 1}, and the first {-count} or 0); write each place once"
            )
        resolved.append(index)
    return sorted(resolved)


def insert_blocks(
    stage: nn.Sequential, positions: Sequence[int], kind: str, make: Callable[[int], nn.Module]
) -> list[tuple[str, nn.Module]]:
    """Put blocks into a stage that has none yet; return their names in it and the blocks.

    Args:
        stage: its members have ``in_channels`` and ``out_channels``.
        positions: where, from :func:`resolve_positions`.
        kind: the block before residual block i is named ``{kind}_{i}``.
        make: makes a block for a number of channels.
    """
    residual = list(stage.named_children())
    inserted: list[tuple[str, nn.Module]] = []
    children: list[tuple[str, nn.Module]] = []
    for position in range(len(residual) + 1):
        if position in positions:
            # A block reads what the residual block before it made; the first one, the stage's input.
            channels = residual[position - 1][1].out_channels if position else residual[0][1].in_channels
            children.append((f"{kind}_{position}", make(channels)))
            inserted.append(children[-1])
        children += residual[position : position + 1]
    replace_children(stage, children)
    return inserted


def replace_children(parent: nn.Sequential, children: Sequence[tuple[str, nn.Module]]) -> None:
    """Give ``parent`` exactly these children in this order, under these names, by which checkpoints match.

    It stays the same object: a ResNet has its stages in a list too, and runs that.
    """
    for name in [name for name, _ in parent.named_children()]:
        delattr(parent, name)
    for name, child in children:
        parent.add_module(name, child)
