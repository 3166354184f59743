"""Detection on data in COCO's format: boxes, masks, keypoints. Importing it registers heads and data sets."""

from nonlocal_det.detection.modeling import keypoint_head  # noqa: F401
from nonlocal_det.detection.synthetic.datasets import register_builtin_datasets
from nonlocal_det.detection.task import Detection
from nonlocal_det.engine.task import register_task

register_builtin_datasets()
register_task(Detection())
