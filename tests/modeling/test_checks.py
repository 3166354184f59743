"""What must hold once a model has its weights."""

import pytest
from detectron2.modeling import build_model

from nonlocal_det.errors import ConfigError
from nonlocal_det.modeling.checks import check_loaded

MASK = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x_nl.yaml"
BLOCK = "backbone.bottom_up.res2.{}_2"


@pytest.mark.parametrize("kind", ["non_local", "residual"])
def test_new_block_in_a_frozen_stage(small_config, kind):
    opts = ["MODEL.NONLOCAL.RES2", [-1], "MODEL.BACKBONE.FREEZE_AT", 2, "MODEL.NONLOCAL.BLOCK", kind]
    cfg = small_config(MASK, *opts)
    model, name = build_model(cfg), BLOCK.format(kind)
    with pytest.raises(ConfigError) as raised:
        check_loaded(cfg, model, [name])
    message = str(raised.value)
    assert message.startswith(
        "MODEL.BACKBONE.FREEZE_AT is 2: it freezes res2 and the new " + kind.replace("_", "-")
    )
    assert name in message
    assert "write MODEL.BACKBONE.FREEZE_AT 1 or less" in message
    # A file gave it weights, or it can still learn.
    check_loaded(cfg, model, [])
    check_loaded(cfg, model, [name.replace("res2", "res4").replace("_2", "_5")])


def test_new_block_that_was_frozen_elsewhere(small_config):
    cfg = small_config("COCO-Keypoints/keypoint_rcnn_R_101_FPN_3x_nl_head.yaml")
    model, name = build_model(cfg), "roi_heads.keypoint_head.non_local_2"
    model.roi_heads.keypoint_head.non_local_2.requires_grad_(False)
    with pytest.raises(ConfigError, match=f"the new block {name} is frozen"):
        check_loaded(cfg, model, [name])


def test_frozen_norm_without_weights_is_warned_of(small_config, caplog):
    def warned(norm: str, weights: str = "", resumed: bool = False) -> bool:
        caplog.clear()
        cfg = small_config(MASK, "MODEL.RESNETS.NORM", norm)
        cfg.MODEL.WEIGHTS = weights
        check_loaded(cfg, build_model(cfg), [], resumed=resumed)
        return "deep nets overflow" in caplog.text

    assert warned("FrozenBN")
    assert not warned("BN")
    assert not warned("FrozenBN", weights="a.pth")
    assert not warned("FrozenBN", resumed=True)
