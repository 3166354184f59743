"""What one block costs beside the plain matrix formulation, and how that grows with the map."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from nonlocal_det.benchmark.plain import plain_block
from nonlocal_det.benchmark.process import compare_steps
from nonlocal_det.benchmark.ratio import StepCost
from nonlocal_det.layers import PAIRWISE_FUNCTIONS, NonLocalBlock

#: What a case measures no longer than, once it has a few rounds.
_BUDGET_S = 15.0
_LEAST_ROUNDS = 3
_WARM_UP_SIZE = 8


@dataclass(frozen=True)
class BlockCase:
    """One block, its input and a pass."""

    stage: str  # name of the input: whose output it is in a ResNet-50
    channels: int  # C; C' is half of it
    height: int  # of the input, cells
    width: int  # of the input, cells
    pairwise: str  # f of Eq. 1
    pool: str
    backward: bool = True

    @property
    def input(self) -> str:
        """The shape [1, C, H, W] as text."""
        return f"1x{self.channels}x{self.height}x{self.width}"


@dataclass(frozen=True)
class BlockCost(StepCost):
    """What a step of a block takes beside another; memory is that above what was held before."""

    case: BlockCase


def block_cases(height: int, width: int) -> list[BlockCase]:
    """Return the blocks that are compared with the matrix form, for an image with sides of 32 k pixels."""
    maps = [
        ("res4", 1024, 16, "input", PAIRWISE_FUNCTIONS),
        ("res3", 512, 8, "input", PAIRWISE_FUNCTIONS),
        # Where the matrix is largest. Without pooling the other two functions have little to show.
        ("res3", 512, 8, "none", ("embedded_gaussian", "gaussian")),
    ]
    return [
        BlockCase(stage, channels, height // stride, width // stride, pairwise, pool, backward)
        for stage, channels, stride, pool, functions in maps
        for pairwise in functions
        for backward in (False, True)
    ]


def growth_cases(height: int, width: int) -> list[BlockCase]:
    """Return the blocks whose cost is compared with that on a map of twice the height; arguments as above."""
    cases = block_cases(height, width)
    return [case for case in cases if (case.stage, case.pool) == ("res3", "input") and case.backward]


def measure_block(case: BlockCase, device: str, rounds: int) -> BlockCost:
    """Measure the block against the plain matrix formulation, each in a process of its own, in turn.

    Each runs ``rounds`` times; fewer if that takes long, but at least 3.

    Raises:
        MeasurementError: memory ran out.
    """
    return _measure(case, (MatrixStep, case, device), (BlockStep, case, device), rounds)


def measure_growth(case: BlockCase, device: str, rounds: int) -> BlockCost:
    """Measure the block on a map of twice the height against itself on the map of the case, as above."""
    doubled = replace(case, height=2 * case.height)
    return _measure(case, (BlockStep, case, device), (BlockStep, doubled, device), rounds)


def _measure(case: BlockCase, reference: tuple, step: tuple, rounds: int) -> BlockCost:
    cost, _ = compare_steps(step, reference, rounds, _LEAST_ROUNDS, _BUDGET_S)
    return BlockCost(**vars(cost), case=case)


class BlockStep:
    """The block as users run it, in training: its input needs a gradient, too."""

    def __init__(self, case: BlockCase, device: str) -> None:
        torch.manual_seed(0)
        self.device = torch.device(device)
        self.info = {"held": 0}  # only what is above it counts
        self._block = NonLocalBlock(case.channels, pairwise=case.pairwise, pool=case.pool).to(self.device)
        nn.init.kaiming_normal_(self._block.w_z.weight)  # it starts with zeros
        self._case = case
        self._inputs = self._make_inputs(case.height, case.width)

    def warm_up(self) -> None:
        """Run on a small map."""
        self._run(*self._make_inputs(_WARM_UP_SIZE, _WARM_UP_SIZE))
        self._block.zero_grad()

    def __call__(self) -> None:
        """Run once."""
        self._run(*self._inputs)

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._block(x)

    def _make_inputs(self, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the input and the gradient of the output, both [1, C, height, width]."""
        shape = (1, self._case.channels, height, width)
        x = torch.randn(shape, device=self.device, requires_grad=self._case.backward)
        return x, torch.randn(shape, device=self.device)

    def _run(self, x: torch.Tensor, dz: torch.Tensor) -> None:
        if not self._case.backward:
            with torch.no_grad():
                self._forward(x)
            return
        x.grad = None
        self._block.zero_grad()
        self._forward(x).backward(dz)


class MatrixStep(BlockStep):
    """The same block by the plain matrix formulation."""

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        return plain_block(self._block, x)
