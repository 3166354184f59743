"""What a detector costs with its blocks beside the same detector without them."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data.detection_utils import annotations_to_instances
from detectron2.modeling import GeneralizedRCNN
from detectron2.solver import build_optimizer
from detectron2.structures import BoxMode
from detectron2.utils.events import EventStorage
from torch import nn

from nonlocal_det.benchmark.process import compare_steps
from nonlocal_det.benchmark.ratio import StepCost
from nonlocal_det.config.keys import STAGES
from nonlocal_det.detection.config import keys_without_blocks
from nonlocal_det.detection.cost import count_detector_flops
from nonlocal_det.errors import ConfigError
from nonlocal_det.modeling.build import build_model
from nonlocal_det.modeling.flops import Flops

#: Objects in the training image; COCO has 7 on average.
_OBJECTS = 8
_WARM_UP_SIZE = (128, 128)


@dataclass(frozen=True)
class DetectorCost:
    """A detector with blocks beside its baseline."""

    flops: Flops  # multiply-adds with blocks for 1,000 proposals and 100 detections
    baseline_flops: Flops  # those of the baseline
    parameters: int  # their number with blocks
    baseline_parameters: int  # that of the baseline
    training: StepCost  # forward, backward and optimizer. Memory is with weights, optimizer and activations
    inference: StepCost  # finding the objects in an image
    detections: int  # how many the timed inference found


def without_blocks(cfg: CfgNode) -> CfgNode:
    """Return a copy of a config that makes the same detector without its blocks.

    Raises:
        ConfigError: there are no blocks.
    """
    node = cfg.MODEL.NONLOCAL
    if not node.KEYPOINT_HEAD and not any(len(node[stage]) for stage in STAGES):
        raise ConfigError(
            "MODEL.NONLOCAL has no blocks (RES2 to RES5 are [], KEYPOINT_HEAD is 0), so there is nothing "
            "to compare; give a config with blocks, such as one ending in _nl.yaml"
        )
    baseline = cfg.clone()
    baseline.merge_from_list([word for item in keys_without_blocks(cfg).items() for word in item])
    return baseline


def compare_detectors(cfg: CfgNode, baseline: CfgNode, height: int, width: int, pairs: int) -> DetectorCost:
    """Measure a detector with blocks beside its baseline, for one image.

    Both get the same random weights, and the blocks start as identities, so both see the same proposals and
    detections. The learning rate is 0, so every step does the same.

    The device is MODEL.DEVICE; MODEL.WEIGHTS is not read. ``height`` and ``width`` are those of the image
    after resizing, multiples of 32 pixels. Each step runs ``pairs`` times.

    Raises:
        ConfigError: a model cannot be built or its parts are not known.
        MeasurementError: memory ran out.
    """
    with tempfile.TemporaryDirectory() as folder:
        weights = str(Path(folder) / "weights.pth")
        baseline_flops, baseline_parameters = _count(baseline, height, width, weights)
        flops, parameters = _count(cfg, height, width)
        inputs = (height, width, weights)
        (training, _), (inference, info) = (
            compare_steps((step, cfg, *inputs), (step, baseline, *inputs), pairs)
            for step in (TrainingStep, InferenceStep)
        )
    counts = (flops, baseline_flops, parameters, baseline_parameters)
    return DetectorCost(*counts, training, inference, info["detections"])


def _count(cfg: CfgNode, height: int, width: int, weights: str = "") -> tuple[Flops, int]:
    """Count a model's operations and parameters; write its random weights to a file if one is named."""
    torch.manual_seed(0)
    model = build_model(cfg).eval()
    if weights:
        torch.save(model.state_dict(), weights)
    return count_detector_flops(model, height, width), sum(p.numel() for p in model.parameters())


class _DetectorStep:
    """A detector with the weights of the baseline, from a file, and an image of noise."""

    def __init__(self, cfg: CfgNode, height: int, width: int, weights: str) -> None:
        torch.manual_seed(0)
        self._cfg = cfg
        self.device = torch.device(cfg.MODEL.DEVICE)
        self._model = build_model(cfg)
        own = self._model.state_dict()
        saved = torch.load(weights, map_location=self.device, weights_only=True).items()
        shared = {name: value for name, value in saved if name in own and own[name].shape == value.shape}
        self._model.load_state_dict(shared, strict=False)
        _settle(self._model, _make_input(cfg, *_WARM_UP_SIZE))
        self._input = _make_input(cfg, height, width)
        self.info = {"held": 0, "detections": 0}

    def warm_up(self) -> None:
        """Run on a small image."""
        self._run(_make_input(self._cfg, *_WARM_UP_SIZE))
        self.info["held"] = sum(t.numel() * t.element_size() for t in self._held())

    def __call__(self) -> None:
        """Run once, with the same random choices every time."""
        torch.manual_seed(0)
        self._run(self._input)

    def _held(self) -> Iterator[torch.Tensor]:
        """Yield what is in memory between two steps."""
        yield from self._model.state_dict().values()

    def _run(self, batch: dict[str, Any]) -> None:
        raise NotImplementedError


class InferenceStep(_DetectorStep):
    """Find the objects in an image and paste their masks, as users call it."""

    def _run(self, batch: dict[str, Any]) -> None:
        self._model.eval()
        with torch.no_grad():
            instances = self._model([batch])[0]["instances"]
        self.info["detections"] = len(instances)


class TrainingStep(_DetectorStep):
    """A step of the optimizer, with the learning rate 0."""

    def __init__(self, cfg: CfgNode, height: int, width: int, weights: str) -> None:
        super().__init__(cfg, height, width, weights)
        cfg = cfg.clone()
        cfg.SOLVER.BASE_LR = 0.0
        self._optimizer = build_optimizer(cfg, self._model)

    def warm_up(self) -> None:
        """Run on a small image, which makes the optimizer's state, too.

        Raises:
            RuntimeError: the loss is not finite, so that the time would mean nothing.
        """
        super().warm_up()
        if not math.isfinite(self._loss):
            raise RuntimeError(f"the loss is {self._loss}")
        self._optimizer.zero_grad()

    def _held(self) -> Iterator[torch.Tensor]:
        yield from super()._held()
        for state in self._optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))

    def _run(self, batch: dict[str, Any]) -> None:
        self._model.train()
        with EventStorage():
            loss = sum(self._model([batch]).values())
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self._loss = loss.item()


def _make_input(cfg: CfgNode, height: int, width: int) -> dict[str, Any]:
    """Return an image of noise with a row of octagons on it, in Detectron2's format."""
    annotations = []
    for index in range(_OBJECTS):
        radius = min(width / _OBJECTS, height) * 0.45
        x, y = (index + 0.5) * width / _OBJECTS, height / 2
        corners = [
            (x + radius * math.cos(math.pi * k / 4), y + radius * math.sin(math.pi * k / 4)) for k in range(8)
        ]
        annotation = {
            "bbox": [x - radius, y - radius, x + radius, y + radius],
            "bbox_mode": BoxMode.XYXY_ABS,
            "category_id": 0,
            "segmentation": [[value for corner in corners for value in corner]],
        }
        if cfg.MODEL.KEYPOINT_ON:
            count = cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS
            annotation["keypoints"] = np.array([(*corners[k % 8], 2) for k in range(count)])
        annotations.append(annotation)
    generator = torch.Generator().manual_seed(0)
    return {
        "image": torch.randint(256, (3, height, width), generator=generator, dtype=torch.uint8),
        "instances": annotations_to_instances(annotations, (height, width), cfg.INPUT.MASK_FORMAT),
        "height": height,
        "width": width,
    }


@torch.no_grad()
def _settle(model: nn.Module, batch: dict[str, Any]) -> None:
    """Make random weights behave like trained ones, as far as the amount of work goes.

    Frozen norms do nothing without a checkpoint, and activations would overflow in a deep net: their
    statistics become those of the image. And the classifier gives its first class half of every region, so
    that as many objects are found as may be.
    """

    def set_statistics(norm: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        variance, mean = torch.var_mean(inputs[0], dim=(0, 2, 3))
        norm.running_mean.copy_(mean)
        norm.running_var.copy_(variance)

    norms = [module for module in model.backbone.modules() if hasattr(module, "running_mean")]
    hooks = [norm.register_forward_pre_hook(set_statistics) for norm in norms]
    model.eval()
    model.backbone(model.preprocess_image([batch]).tensor)
    for hook in hooks:
        hook.remove()
    if isinstance(model, GeneralizedRCNN):
        bias = model.roi_heads.box_predictor.cls_score.bias
        bias[0] = bias[-1] = 5.0  # the last is "no object"
