"""What only a detector knows of where blocks look: those of a keypoint head see one instance at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from detectron2.modeling.roi_heads.keypoint_head import BaseKeypointRCNNHead
from detectron2.structures import Instances
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from nonlocal_det.attention.recording import AttentionRecorder, Box, Frame, Place, Point, Region, Sight
from nonlocal_det.layers import NonLocalBlock


def record_attention(model: nn.Module) -> AttentionRecorder:
    """Make the recorder for the blocks in a detector's ResNet and keypoint head.

    A block of the head is asked about the highest-scoring instance whose box holds the point.

    Raises:
        ValueError: it has no such block.
    """
    places = {}
    for head_name, head in model.named_modules():
        if isinstance(head, BaseKeypointRCNNHead):
            place = _HeadPlace(head)
            for name, block in head.named_modules(prefix=head_name):
                if isinstance(block, NonLocalBlock):
                    places[name] = place
    return AttentionRecorder(model, places)


class _HeadPlace(Place):
    """A place in a keypoint head, whose samples are the instances that were detected."""

    def __init__(self, head: nn.Module) -> None:
        self._head = head
        self._instances: Instances | None = None

    def watch(self) -> list[RemovableHandle]:
        self._instances = None
        return [self._head.register_forward_pre_hook(self._keep_instances)]

    def _keep_instances(self, _: nn.Module, args: tuple[Tensor, list[Instances]]) -> None:
        # A copy: Detectron2 scales the boxes in place afterwards, and drops the empty ones.
        instances = args[1][0]
        self._instances = Instances(instances.image_size)
        self._instances.pred_boxes = instances.pred_boxes.clone()
        self._instances.scores = instances.scores.clone()

    def look(self, points: Sequence[Point], frame: Frame, size: Sequence[int]) -> Sight:
        if not self._instances:
            return Sight([], None, ["no instance was detected"])
        scale = [a / b for a, b in zip(frame.picture, frame.network, strict=True)]
        boxes = self._instances.pred_boxes.tensor.cpu().double()
        boxes = (boxes * torch.tensor(scale[::-1] * 2, dtype=torch.float64)).tolist()
        order = self._instances.scores.argsort(descending=True, stable=True).tolist()
        regions = [Region(k, tuple(boxes[k]), tuple(boxes[k])) for k in order]
        seen, notes = [], []
        for point in points:
            region = next((region for region in regions if _holds(region.area, point)), None)
            if region is None:
                notes.append(f"no detected instance holds the pixel {int(point[0])},{int(point[1])}")
            else:
                seen.append((region, [point]))
        return Sight(seen, regions[0], notes)


def _holds(box: Box, point: Point) -> bool:
    return box[0] <= point[0] <= box[2] and box[1] <= point[1] <= box[3]
