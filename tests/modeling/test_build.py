"""Common faults of configs that Detectron2 finds are one line; those of other code keep their traceback."""

import re
from contextlib import contextmanager

import detectron2.layers  # its operators are a part of the package once it is imported
import pytest
from detectron2.modeling import ROI_BOX_HEAD_REGISTRY

from nonlocal_det import get_config
from nonlocal_det.errors import ConfigError
from nonlocal_det.modeling.build import build_model, build_on_meta

MASK = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x_nl.yaml"
RETINANET = "Ablations/retinanet_R_50_FPN_1x.yaml"


@contextmanager
def registered(head):
    ROI_BOX_HEAD_REGISTRY._do_register(head.__name__, head)
    try:
        yield
    finally:
        del ROI_BOX_HEAD_REGISTRY._obj_map[head.__name__]


def config(file, *opts):
    return get_config(file, [*opts, "MODEL.DEVICE", "meta"])


RPN, ROI, FPN = (f"MODEL.{part}.IN_FEATURES" for part in ("RPN", "ROI_HEADS", "FPN"))


@pytest.mark.parametrize(
    ("opts", "line"),
    [
        ([RPN, ["p2", "p9"]], f"{RPN} is ['p2', 'p9']: nothing makes 'p9'; write names that the backbone"),
        ([ROI, ["p9"]], f"{ROI} is ['p9']: nothing makes 'p9'"),
        # The pyramid ends earlier; what reads its last level is named.
        ([FPN, ["res2", "res3"]], f"{RPN} is ['p2', 'p3', 'p4', 'p5', 'p6']:"),
        (["MODEL.RESNETS.OUT_FEATURES", ["res2"]], f"{FPN} is ['res2', 'res3', 'res4', 'res5']:"),
        # Defaults that stayed, of a model without a pyramid.
        ([RPN, ["res4"]], f"{RPN} is ['res4']: nothing makes 'res4'"),
        ([ROI, ["res4"]], f"{ROI} is ['res4']: nothing makes 'res4'"),
        (["MODEL.ROI_MASK_HEAD.NAME", "Foo"], "'Foo' is not registered in ROI_MASK_HEAD"),
    ],
)
def test_what_detectron2_cannot_build_is_one_line(opts, line):
    with pytest.raises(ConfigError, match=re.escape(line)) as error:
        build_model(config(MASK, *opts))
    assert "\n" not in str(error.value)


@pytest.mark.skipif(hasattr(detectron2, "_C"), reason="Detectron2 has its compiled operators")
def test_compiled_operators_that_are_not_there():
    opts = ["MODEL.RESNETS.DEFORM_ON_PER_STAGE", [False, True, True, True]]
    with pytest.raises(ConfigError, match=r"cannot be built: Cannot import 'detectron2\._C'.*'DeformConv'"):
        build_model(config(MASK, *opts))


def test_features_of_retinanet():
    why = r"MODEL\.RETINANET\.IN_FEATURES is \['p3', 'p9'\]: nothing makes 'p9'"
    with pytest.raises(ConfigError, match=why):
        build_model(config(RETINANET, "MODEL.RETINANET.IN_FEATURES", ["p3", "p9"]))


@pytest.mark.parametrize("error", [KeyError("p2"), ImportError("mine"), AssertionError(), ValueError("mine")])
def test_faults_of_other_code_pass_through(error):
    def broken_head(cfg, shape):
        raise error

    with registered(broken_head), pytest.raises(type(error)) as found:
        build_model(config(MASK, "MODEL.ROI_BOX_HEAD.NAME", "broken_head"))
    assert found.value is error


def test_a_model_without_memory_and_its_config():
    cfg = get_config(MASK, ["MODEL.DEVICE", "cpu"])
    cfg.freeze()
    assert {parameter.device.type for parameter in build_on_meta(cfg).parameters()} == {"meta"}
    assert cfg.MODEL.DEVICE == "cpu"
