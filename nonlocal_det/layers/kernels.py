"""The kernels of a model's blocks, chosen before any forward pass."""

from __future__ import annotations

import torch
from torch import nn

from .forms import GaussianCase, settle
from .non_local import NonLocalBlock
from .pairwise import gaussian


def settle_kernels(model: nn.Module, *dtypes: torch.dtype) -> None:
    """Measure which kernels are the fastest for a model's non-local blocks on its GPU.

    Call it once before training or evaluation, when the model is where it will run. Several processes
    (torch.distributed's default group) must call it together: the first measures, and all take its choice,
    so that their forms round alike. Without it a process that is alone measures at the first forward pass,
    and each of several takes the kernels that fit every case. On a CPU there is nothing to measure.

    Args:
        model: a model, with or without blocks, the same in all processes.
        dtypes: types that autocast will give the blocks, besides that of the weights.
    """
    cases = []
    for block in model.modules():
        if isinstance(block, NonLocalBlock) and "gaussian" in block.pairwise and block.g.weight.is_cuda:
            device = block.g.weight.device
            compared = block.in_channels if block.pairwise == "gaussian" else block.inter_channels
            for dtype in (block.g.weight.dtype, *dtypes):
                cases.append(GaussianCase(device.type, dtype, compared, block.inter_channels))
    if cases and not torch.are_deterministic_algorithms_enabled():  # those leave no choice
        with torch.cuda.device(device):
            settle(cases, gaussian)
