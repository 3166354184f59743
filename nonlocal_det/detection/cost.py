"""What a detector costs for one image, whatever it would find there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from detectron2.modeling import GeneralizedRCNN, RetinaNet
from detectron2.modeling.roi_heads import CascadeROIHeads, Res5ROIHeads, StandardROIHeads
from torch import Tensor, nn

from nonlocal_det.errors import ConfigError
from nonlocal_det.modeling.flops import Flops, count_flops

PROPOSALS = 1000
DETECTIONS = 100


def count_detector_flops(
    model: nn.Module, height: int, width: int, proposals: int = PROPOSALS, detections: int = DETECTIONS
) -> Flops:
    """Count the multiply-adds of a detector for one image, whatever it would find there.

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
        name, head, features = "head", model.head, model.head_in_features
    elif isinstance(model, GeneralizedRCNN) and hasattr(model.proposal_generator, "rpn_head"):
        rpn = model.proposal_generator
        name, head, features = "rpn_head", rpn.rpn_head, rpn.in_features
    else:
        raise ConfigError(
            f"MODEL.META_ARCHITECTURE makes a {type(model).__name__}, whose parts are not known; write "
            '"GeneralizedRCNN" (with a RPN) or "RetinaNet"'
        )

    def find(image: Tensor) -> Any:
        maps = model.backbone(image)
        return head([maps[feature] for feature in features])

    device = next(model.parameters()).device
    dense = _Part(find, backbone=model.backbone, **{name: head})
    flops = count_flops(dense, torch.zeros(1, 3, height, width, device=device))
    if isinstance(model, GeneralizedRCNN):
        for name, (part, shape) in _region_parts(model).items():
            one = count_flops(part, torch.zeros(1, *shape, device=device))
            flops.parts[name] = one.total * (proposals if name == "box_head" else detections)
            flops.uncounted |= one.uncounted
    return flops


class _Part(nn.Module):
    """A part of a model: its modules, and how they are called."""

    def __init__(self, call: Callable[[Tensor], Any], **modules: nn.Module) -> None:
        super().__init__()
        self._call = call
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, features: Tensor) -> Any:
        return self._call(features)


def _region_parts(model: GeneralizedRCNN) -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """The heads that see regions, by name, with the shape (C, H, W) of what they get for one."""
    heads = model.roi_heads

    def shape(features: list[str], pooler: nn.Module) -> tuple[int, ...]:
        size = pooler.output_size
        sides = (size, size) if isinstance(size, int) else tuple(size)
        return (model.backbone.output_shape()[features[0]].channels, *sides)

    if isinstance(heads, Res5ROIHeads):
        res5, predictor, mask_head = heads.res5, heads.box_predictor, getattr(heads, "mask_head", None)
        parts = {
            "box_head": _Part(lambda x: predictor(res5(x).mean(dim=[2, 3])), res5=res5, predictor=predictor)
        }
        if heads.mask_on:
            parts["mask_head"] = _Part(lambda x: mask_head.layers(res5(x)), res5=res5, head=mask_head)
        return {name: (part, shape(heads.in_features, heads.pooler)) for name, part in parts.items()}
    if isinstance(heads, CascadeROIHeads) or not isinstance(heads, StandardROIHeads):
        raise ConfigError(
            f"MODEL.ROI_HEADS.NAME is {type(heads).__name__!r}, whose parts are not known; write "
            '"StandardROIHeads" or "Res5ROIHeads"'
        )
    box_head, predictor = heads.box_head, heads.box_predictor
    box = _Part(lambda x: predictor(box_head(x)), head=box_head, predictor=predictor)
    found = {"box_head": (box, shape(heads.box_in_features, heads.box_pooler))}
    for name in ("mask", "keypoint"):
        if getattr(heads, f"{name}_on"):
            head = getattr(heads, f"{name}_head")
            size = shape(getattr(heads, f"{name}_in_features"), getattr(heads, f"{name}_pooler"))
            found[f"{name}_head"] = _Part(head.layers, head=head), size
    return found
