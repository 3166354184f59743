"""Small detectors: real depths and names, few channels, so that a whole one trains in a second."""

import pytest
import torch
from detectron2.structures import BitMasks, Boxes, Instances, Keypoints

from nonlocal_det import get_config

SMALL = [
    *("MODEL.WEIGHTS", "", "MODEL.DEVICE", "cpu", "MODEL.BACKBONE.FREEZE_AT", 0, "MODEL.RESNETS.NORM", "BN"),
    *("MODEL.RESNETS.STEM_OUT_CHANNELS", 8, "MODEL.RESNETS.RES2_OUT_CHANNELS", 16),
    *("MODEL.RESNETS.WIDTH_PER_GROUP", 8, "MODEL.RESNETS.DEPTH", 50, "MODEL.FPN.OUT_CHANNELS", 16),
    *("MODEL.ROI_BOX_HEAD.FC_DIM", 32, "MODEL.ROI_MASK_HEAD.CONV_DIM", 16),
    *("MODEL.ROI_KEYPOINT_HEAD.CONV_DIMS", (12, 12, 16, 16, 16, 16, 8, 8)),
    *("MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", 16, "MODEL.RPN.POST_NMS_TOPK_TRAIN", 50),
    *("MODEL.RPN.POST_NMS_TOPK_TEST", 20, "MODEL.ROI_HEADS.NUM_CLASSES", 3, "MODEL.RETINANET.NUM_CLASSES", 3),
]


@pytest.fixture
def small_config():
    """A function (config file, *overrides) -> config of a small detector on the CPU."""
    return lambda config_file, *opts: get_config(config_file, [*SMALL, *opts])


@pytest.fixture
def batch():
    """Two images with two objects each: boxes, classes, masks and keypoints."""
    generator = torch.Generator().manual_seed(0)
    inputs = []
    for _ in range(2):
        boxes = torch.tensor([[8.0, 10.0, 50.0, 60.0], [30.0, 20.0, 60.0, 62.0]])
        masks = torch.zeros(2, 64, 64, dtype=torch.bool)
        masks[0, 10:60, 8:50] = True
        masks[1, 20:62, 30:60] = True
        points = boxes[:, None, :2] + torch.rand(2, 17, 2, generator=generator) * 29
        keypoints = torch.cat([points, torch.full((2, 17, 1), 2.0)], dim=2)
        instances = Instances((64, 64))
        instances.gt_boxes = Boxes(boxes)
        instances.gt_classes = torch.tensor([0, 0])
        instances.gt_masks = BitMasks(masks)
        instances.gt_keypoints = Keypoints(keypoints)
        image = (torch.rand(3, 64, 64, generator=generator) * 255).to(torch.uint8)
        inputs.append({"image": image, "instances": instances, "height": 64, "width": 64})
    return inputs
