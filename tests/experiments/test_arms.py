"""Arms by name and of one's own; those of the tasks are what their labels say."""

import re

import pytest
import torch
from detectron2.modeling import build_model

from nonlocal_det import get_config
from nonlocal_det.errors import ArmError
from nonlocal_det.experiments.arms import COMPARISONS, custom_arm, named_arms, parse_seeds
from nonlocal_det.layers import NonLocalBlock


@pytest.mark.parametrize(
    ("text", "seeds"), [("0-4", (0, 1, 2, 3, 4)), ("0,1,7", (0, 1, 7)), ("3", (3,)), ("5, 0-1", (5, 0, 1))]
)
def test_seeds(text, seeds):
    assert parse_seeds(text) == seeds


@pytest.mark.parametrize(
    ("text", "why"),
    [
        *((text, "write numbers and ranges") for text in ("", "-1", "4-0", "a")),
        ("0-3,2", "named twice"),
        ("0-999999999", "more than 1,000"),
    ],
)
def test_wrong_seeds_are_one_line(text, why):
    with pytest.raises(ArmError, match=why) as error:
        parse_seeds(text)
    assert "\n" not in str(error.value)


def test_arms_by_name():
    assert [arm.name for arm in named_arms("context")] == ["baseline", "residual", "nl"]
    nl, base = named_arms("context", ["nl:0-2", "baseline"])
    assert (nl.name, nl.seeds, base.name, base.seeds) == ("nl", (0, 1, 2), "baseline", ())
    with pytest.raises(ArmError, match="--arms nll: the task context has baseline, residual, nl,"):
        named_arms("context", ["nll"])
    with pytest.raises(ArmError, match="seeds '': write numbers"):
        named_arms("context", ["nl:"])


def test_an_arm_of_ones_own():
    arm = custom_arm(["mine:0,3=a/b=c.yaml", "SOLVER.MAX_ITER", "7"], ("baseline",))
    assert (arm.name, arm.label, arm.config) == ("mine", "mine", "a/b=c.yaml")
    assert (arm.opts, arm.against, arm.seeds) == (("SOLVER.MAX_ITER", "7"), ("baseline",), (0, 3))
    for word in ("a.yaml", "=a.yaml", "x=", "../x=a.yaml", "a b=a.yaml", ":0=a.yaml"):
        with pytest.raises(ArmError, match="write NAME=CONFIG"):
            custom_arm([word])
    with pytest.raises(ArmError, match=r"KEY VALUE pairs, but 'SOLVER\.MAX_ITER' stands alone"):
        custom_arm(["mine=a.yaml", "SOLVER.MAX_ITER"])
    with pytest.raises(ArmError, match="seeds '': write numbers"):
        custom_arm(["mine:=a.yaml"])
    for name in ("table.md", "results.json", "curves.png", "distance.png"):
        with pytest.raises(ArmError, match=f"--arm {name}: a result has that name"):
            custom_arm([f"{name}=a.yaml"])


def blocks_of(arm):
    """Names of the blocks that the arm puts into the stock model."""
    with torch.device("meta"):
        model = build_model(get_config(arm.config, [*arm.opts, "MODEL.DEVICE", "meta"]))
    return {
        re.sub(r".*(keypoint_head|bottom_up)\.", "", name)
        for name, module in model.named_modules()
        if isinstance(module, NonLocalBlock) or re.search(r"\.residual_\d+$", name)
    }


HEAD = {"non_local_1", "non_local_2", "non_local_3", "non_local_4"}
BLOCKS = {
    "context": {
        "baseline": set(),
        "residual": {"res4.residual_1"},
        "residual_5blocks": {
            *(f"res3.residual_{i}" for i in (1, 2)),
            *(f"res4.residual_{i}" for i in range(3)),
        },
        "nl_5blocks": {*(f"res3.non_local_{i}" for i in (1, 2)), *(f"res4.non_local_{i}" for i in range(3))},
        None: {"res4.non_local_1"},
    },
    "people": {"baseline": set(), "nl_head": HEAD, "nl_head_backbone": {*HEAD, "res3.non_local_1"}},
    "table5": {"R50_residual": {"res4.residual_5"}},
}


@pytest.mark.parametrize("task", BLOCKS)
def test_arms_are_what_they_are_called(task):
    for arm in COMPARISONS[task].arms:
        if task != "table5" or arm.opts:  # else a config file as it stands, which has its own test
            expected = BLOCKS[task].get(arm.name, BLOCKS[task].get(None))
            assert blocks_of(arm) == expected, arm.name


def test_tables_5_and_6_are_the_papers():
    files = [arm.config.rpartition("_rcnn_")[2] for arm in named_arms("table5")]
    nets = ("R_50", "R_101", "X_152_32x8d")
    assert files == [f"{net}_FPN_1x{ending}.yaml" for net in nets for ending in ("", "_nl")]
    files = [arm.config.rpartition("_rcnn_")[2] for arm in named_arms("table6")]
    assert files == [f"R_101_FPN_3x{ending}.yaml" for ending in ("", "_nl_head", "_nl_head_backbone")]


@pytest.mark.parametrize("task", COMPARISONS)
def test_arms_are_compared_with_arms_of_their_task(task):
    arms = {arm.name: arm for arm in COMPARISONS[task].arms}
    assert len(arms) == len(COMPARISONS[task].arms)
    assert set(COMPARISONS[task].default) <= set(arms)
    for arm in arms.values():
        assert set(arm.against) <= set(arms) - {arm.name}
