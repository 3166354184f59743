"""The programs whose weights can be converted; one module for each."""

from __future__ import annotations

from nonlocal_det.convert.sources.authors import AUTHORS
from nonlocal_det.convert.sources.caffe2 import CAFFE2
from nonlocal_det.convert.sources.detectron2_zoo import DETECTRON2
from nonlocal_det.convert.sources.mmaction2 import MMACTION2
from nonlocal_det.convert.sources.mmdetection import MMDETECTION
from nonlocal_det.convert.sources.nonlocal_pytorch import NONLOCAL_PYTORCH
from nonlocal_det.convert.sources.onnx_resnet import ONNX
from nonlocal_det.convert.sources.slowfast import SLOWFAST
from nonlocal_det.convert.sources.torchvision_resnet import TORCHVISION

__all__ = ["SOURCES"]

_NETS = (AUTHORS, CAFFE2, MMACTION2, MMDETECTION, SLOWFAST, NONLOCAL_PYTORCH, TORCHVISION, DETECTRON2)
#: By the value of ``--from``, in the order of ``FINGERPRINTS``.
SOURCES = {source.name: source for source in (*_NETS, ONNX)}
