"""Drawing detections so that boxes, masks, keypoints and text can be read on a picture of any size."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from detectron2.data.catalog import Metadata
from detectron2.structures import Boxes, Instances, pairwise_iou
from detectron2.utils.colormap import colormap
from detectron2.utils.visualizer import VisImage, Visualizer
from matplotlib.colors import rgb_to_hsv
from PIL import Image

#: The longer side, in pixels, up to which a smaller picture is enlarged before it is drawn on.
LEGIBLE_SIDE = 800
#: The longer side, in pixels, down to which a larger one is reduced: matplotlib draws at most 65535.
LARGEST_SIDE = 8192
# In points of 100 / 72 pixels. The base class goes down to 5 on small objects.
_LEAST_FONT_SIZE = 9
_GOLDEN_RATIO = (5**0.5 - 1) / 2
# Frames for which an instance that is not detected keeps its colour.
_PATIENCE = 8


class InstanceColors:
    """Colours for instances: the same from run to run, and kept by an instance from frame to frame.

    An instance takes over the colour of the one of its class in the frames before whose box overlaps its
    own most, from an intersection over union of 0.5 on. Others get the next colour.
    """

    def __init__(self) -> None:
        colors = colormap(rgb=True, maximum=1)
        # Bright colours alone: a dark or gray outline is lost on a photograph.
        colors = colors[(colors.max(axis=1) > 0.8) & (np.ptp(colors, axis=1) > 0.6)]
        # One after the other they are far apart in hue.
        by_hue = colors[np.argsort(rgb_to_hsv(colors)[:, 0], kind="stable")]
        self._palette = by_hue[np.argsort(np.arange(len(by_hue)) * _GOLDEN_RATIO % 1)]
        self._next = 0
        self._known: list[tuple[Boxes, int, np.ndarray, int]] = []  # box, class, colour, frames left

    def __call__(self, instances: Instances) -> list[np.ndarray]:
        """Choose the colours of a frame's instances.

        Args:
            instances: N instances with ``pred_boxes`` and ``pred_classes``, on the CPU.

        Returns:
            N colours, each an array (3,) of RGB in [0, 1].
        """
        classes = instances.pred_classes.tolist()
        colors: list[np.ndarray | None] = [None] * len(classes)
        missed = []
        for box, category, color, left in self._known:
            overlap = pairwise_iou(box, instances.pred_boxes)[0]
            for index, other in enumerate(classes):
                if other != category or colors[index] is not None:
                    overlap[index] = 0
            if len(overlap) and overlap.max() >= 0.5:
                colors[int(overlap.argmax())] = color
            elif left > 0:
                missed.append((box, category, color, left - 1))
        for index, color in enumerate(colors):
            if color is None:
                colors[index] = self._palette[self._next % len(self._palette)]
                self._next += 1
        boxes = (instances.pred_boxes[index] for index in range(len(classes)))
        self._known = [(*found, _PATIENCE) for found in zip(boxes, classes, colors, strict=True)] + missed
        return colors


def draw_instances(
    image: np.ndarray,
    instances: Instances,
    metadata: Metadata | None = None,
    colors: InstanceColors | None = None,
) -> np.ndarray:
    """Draw detections on a picture with Detectron2's ``Visualizer``.

    A picture whose longer side is below :data:`LEGIBLE_SIDE` is enlarged to it first, so that text, lines
    and keypoints have room; one above :data:`LARGEST_SIDE` is reduced to that.

    Args:
        image: array (H, W, 3), uint8, BGR.
        instances: detections in the picture's coordinates: ``pred_boxes``, ``pred_classes``, ``scores`` and,
            if there, ``pred_masks`` (N, H, W) and ``pred_keypoints`` (N, K, 3). Not changed.
        metadata: the names of classes and keypoints, if known.
        colors: gives the colours; one object for all frames of a video.

    Returns:
        Array (H', W', 3), uint8, BGR.
    """
    image, instances = _fit(image, instances.to("cpu"))
    drawer = _Visualizer(image[:, :, ::-1], metadata)
    if len(instances):
        drawer.draw(instances, (colors or InstanceColors())(instances))
    return np.ascontiguousarray(drawer.output.get_image()[:, :, ::-1])


class _Visualizer(Visualizer):
    """Detectron2's, with given colours, text of a least size, and keypoints that grow with the picture."""

    def draw(self, instances: Instances, colors: list[np.ndarray]) -> None:
        self._colors = colors
        self.draw_instance_predictions(instances)

    def overlay_instances(self, **kwargs: Any) -> VisImage:
        kwargs["assigned_colors"] = self._colors
        return super().overlay_instances(**kwargs)

    def draw_text(self, text: str, position: Any, *, font_size: Any = None, **kwargs: Any) -> VisImage:
        font_size = max(font_size or self._default_font_size, _LEAST_FONT_SIZE)
        if kwargs.get("horizontal_alignment") == "left":  # a box's label: keep it in the picture
            length = 0.6 * len(text) * font_size * self.output.dpi / 72
            position = max(0.0, min(float(position[0]), self.output.width - length)), position[1]
        return super().draw_text(text, position, font_size=font_size, **kwargs)

    def draw_circle(self, circle_coord: Any, color: Any, radius: float = 3) -> VisImage:
        return super().draw_circle(circle_coord, color, radius * max(1.0, self._default_font_size / 10))


def _fit(image: np.ndarray, instances: Instances) -> tuple[np.ndarray, Instances]:
    height, width = image.shape[:2]
    scale = min(max(height, width, LEGIBLE_SIDE), LARGEST_SIDE) / max(height, width)
    if scale == 1:
        return image, instances
    size = max(1, round(height * scale)), max(1, round(width * scale))
    resized = Image.fromarray(image).resize(size[::-1], Image.Resampling.BICUBIC)
    fitted = Instances(size)
    for name, value in instances.get_fields().items():
        if name == "pred_boxes":
            value = Boxes(value.tensor * scale)
        elif name == "pred_masks":
            # One at a time, and smooth: copied pixels would show as steps.
            masks = [F.interpolate(m[None, None].float(), size, mode="bilinear")[0, 0] >= 0.5 for m in value]
            value = torch.stack(masks) if masks else value.new_zeros((0, *size))
        elif name == "pred_keypoints":
            value = value * value.new_tensor([scale, scale, 1])
        fitted.set(name, value)
    return np.asarray(resized), fitted
