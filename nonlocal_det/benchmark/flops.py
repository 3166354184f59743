"""Counting operations with fvcore, whose own counters see neither attention nor sorting.

As in fvcore, one multiply-add is one FLOP.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from detectron2.modeling import GeneralizedRCNN, RetinaNet
from detectron2.modeling.roi_heads import CascadeROIHeads, Res5ROIHeads, StandardROIHeads
from detectron2.utils.analysis import FlopCountAnalysis
from fvcore.nn.jit_handles import get_shape
from torch import Tensor, nn

from nonlocal_det.config import ConfigError

__all__ = ["DETECTIONS", "PROPOSALS", "Flops", "count_detector_flops", "count_flops"]

PROPOSALS = 1000
DETECTIONS = 100


@dataclass
class Flops:
    """Operations of a model.

    Attributes:
        parts: multiply-adds of each part.
        uncounted: operators that no counter knows, whose cost is missing in `parts`.
    """

    parts: dict[str, int] = field(default_factory=dict)
    uncounted: set[str] = field(default_factory=set)

    @property
    def total(self) -> int:
        """Multiply-adds of all parts."""
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
    """Count the multiply-adds of one call.

    The call is traced, and traced blocks are made of plain operations, so that nothing hides in an autograd
    function.

    Args:
        module: what to call; its children are the parts of the result.
        inputs: its arguments.

    Returns:
        One part for each child, and "" for what the module itself does, if anything.
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


def count_detector_flops(
    model: nn.Module, height: int, width: int, proposals: int = PROPOSALS, detections: int = DETECTIONS
) -> Flops:
    """Count the multiply-adds of a detector for one image, whatever the detector would find there.

    The backbone and the dense head run on an image. The heads of regions run on one region, and are
    multiplied by how many there are: their cost is the same for each. Not counted, and the same with and
    without blocks: cropping regions out of maps, decoding and suppressing boxes.

    Args:
        model: a GeneralizedRCNN with a RPN, or a RetinaNet, in eval mode.
        height: of the image after resizing and padding, pixels.
        width: of the image, pixels.
        proposals: regions that the box head gets.
        detections: regions that the mask and keypoint heads get.

    Returns:
        The parts "backbone", "rpn_head" or "head", and "box_head", "mask_head", "keypoint_head" as far as
        the model has them.

    Raises:
        ConfigError: another kind of model.
    """
    if isinstance(model, RetinaNet):
        dense = _Dense(model.backbone, model.head_in_features, head=model.head)
    elif isinstance(model, GeneralizedRCNN) and hasattr(model.proposal_generator, "rpn_head"):
        rpn = model.proposal_generator
        dense = _Dense(model.backbone, rpn.in_features, rpn_head=rpn.rpn_head)
    else:
        raise ConfigError(
            f"MODEL.META_ARCHITECTURE makes a {type(model).__name__}, whose parts are not known; write "
            '"GeneralizedRCNN" (with a RPN) or "RetinaNet"'
        )
    device = next(model.parameters()).device
    flops = count_flops(dense, torch.zeros(1, 3, height, width, device=device))
    if isinstance(model, GeneralizedRCNN):
        for name, (part, shape) in _region_parts(model).items():
            one = count_flops(part, torch.zeros(1, *shape, device=device))
            flops.parts[name] = one.total * (proposals if name == "box_head" else detections)
            flops.uncounted |= one.uncounted
    return flops


class _Dense(nn.Module):
    """A backbone and one head on its maps."""

    def __init__(self, backbone: nn.Module, features: list[str], **head: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        (self._head_name,) = head
        self.add_module(self._head_name, head[self._head_name])
        self._features = features

    def forward(self, image: Tensor) -> Any:
        maps = self.backbone(image)
        return getattr(self, self._head_name)([maps[name] for name in self._features])


class _Region(nn.Module):
    """What a head does to the cropped features [R, C, H, W] of regions."""

    def __init__(self, call: Callable[[Tensor], Any], **modules: nn.Module) -> None:
        super().__init__()
        self._call = call
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, features: Tensor) -> Any:
        return self._call(features)


def _region_parts(model: GeneralizedRCNN) -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """The heads that see regions, by name, with the shape (C, H, W) of what they get for one."""
    heads, maps = model.roi_heads, model.backbone.output_shape()
    if isinstance(heads, Res5ROIHeads):
        shape = (maps[heads.in_features[0]].channels, *_size(heads.pooler))
        parts = {
            "box_head": _Region(
                lambda x: heads.box_predictor(heads.res5(x).mean(dim=[2, 3])),
                res5=heads.res5,
                predictor=heads.box_predictor,
            )
        }
        if heads.mask_on:
            parts["mask_head"] = _Region(
                lambda x: heads.mask_head.layers(heads.res5(x)), res5=heads.res5, head=heads.mask_head
            )
        return {name: (part, shape) for name, part in parts.items()}
    if isinstance(heads, CascadeROIHeads) or not isinstance(heads, StandardROIHeads):
        raise ConfigError(
            f"MODEL.ROI_HEADS.NAME is {type(heads).__name__!r}, whose parts are not known; write "
            '"StandardROIHeads" or "Res5ROIHeads"'
        )
    parts = {
        "box_head": (
            _Region(
                lambda x: heads.box_predictor(heads.box_head(x)),
                head=heads.box_head,
                predictor=heads.box_predictor,
            ),
            (maps[heads.box_in_features[0]].channels, *_size(heads.box_pooler)),
        )
    }
    for name in ("mask", "keypoint"):
        if getattr(heads, f"{name}_on"):
            head = getattr(heads, f"{name}_head")
            shape = (
                maps[getattr(heads, f"{name}_in_features")[0]].channels,
                *_size(getattr(heads, f"{name}_pooler")),
            )
            parts[f"{name}_head"] = _Region(head.layers, head=head), shape
    return parts


def _size(pooler: nn.Module) -> tuple[int, int]:
    size = pooler.output_size
    return (size, size) if isinstance(size, int) else tuple(size)
