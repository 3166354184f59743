"""Counting operations with fvcore, whose own counters see neither attention nor sorting.

As in fvcore, one multiply-add is one FLOP.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from detectron2.utils.analysis import FlopCountAnalysis
from fvcore.nn.jit_handles import get_shape
from torch import nn


@dataclass
class Flops:
    """Operations of a model."""

    parts: dict[str, int]  # multiply-adds of each
    uncounted: set[str]  # operators that no counter knows, missing in `parts`

    @property
    def total(self) -> int:
        """Return the multiply-adds of all parts."""
        return sum(self.parts.values())


def _attention(inputs: list[Any], outputs: list[Any]) -> int:
    """The two products of softmax attention: q [..., N, D], k [..., M, D], v [..., M, V]."""
    q, k, v = (get_shape(value) for value in inputs[:3])
    return math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


def _matmul(inputs: list[Any], outputs: list[Any]) -> int:
    """Any matrix product. fvcore's own counter forgets the batch of a vector times a batch of matrices."""
    return math.prod(get_shape(outputs[0])) * get_shape(inputs[0])[-1]


def _sort(inputs: list[Any], outputs: list[Any]) -> int:
    """N numbers take N log2(N) comparisons; the last axis is the sorted one."""
    shape = get_shape(inputs[0])
    return math.prod(shape) * math.ceil(math.log2(max(1, shape[-1])))


def _searchsorted(inputs: list[Any], outputs: list[Any]) -> int:
    """A binary search for every value."""
    return math.prod(get_shape(inputs[1])) * math.ceil(math.log2(get_shape(inputs[0])[-1] + 1))


def _one_each(inputs: list[Any], outputs: list[Any]) -> int:
    """One operation for every number that comes out."""
    return math.prod(get_shape(outputs[0]))


# The sums of the sorted concatenation: each gathered number is also multiplied and added once, which gather
# stands for, as products and sums of single numbers are not counted.
_HANDLES = {
    "aten::scaled_dot_product_attention": _attention,
    "aten::matmul": _matmul,
    "aten::sort": _sort,
    "aten::searchsorted": _searchsorted,
    "aten::cumsum": _one_each,
    "aten::gather": _one_each,
}
# Besides what Detectron2 leaves out: a view, a copy, and one addition a number in a C4 model's box head.
_FREE = ("aten::unflatten", "aten::pad", "aten::mean")


def count_flops(module: nn.Module, *inputs: Any) -> Flops:
    """Count the multiply-adds of ``module(*inputs)``, by child, and under "" what the module does itself.

    The call is traced, and traced blocks are made of plain operations: none hides in an autograd function.
    """
    analysis = FlopCountAnalysis(module, inputs)
    analysis.set_op_handle(**_HANDLES, **dict.fromkeys(_FREE))
    analysis.unsupported_ops_warnings(False).uncalled_modules_warnings(False)
    with torch.no_grad():
        by_module = analysis.by_module()  # the module is the child "model" of an adapter
    parts = {name: int(by_module[f"model.{name}"]) for name, _ in module.named_children()}
    own = int(by_module[""]) - sum(parts.values())
    if own:
        parts[""] = own
    return Flops(parts, set(analysis.unsupported_ops()))
