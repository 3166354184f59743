"""The config of a small detector: a ResNet-50 with the channels of the nets in source_nets."""

from source_nets import STEM, WIDTH

R50 = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x.yaml"
R50_NL = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x_nl.yaml"
SMALL = [
    *("MODEL.DEVICE", "cpu", "MODEL.FPN.OUT_CHANNELS", 8),
    *("MODEL.RESNETS.STEM_OUT_CHANNELS", STEM, "MODEL.RESNETS.WIDTH_PER_GROUP", WIDTH),
    *("MODEL.RESNETS.RES2_OUT_CHANNELS", 4 * WIDTH),
    *("MODEL.ROI_BOX_HEAD.FC_DIM", 8, "MODEL.ROI_MASK_HEAD.CONV_DIM", 8),
]
