"""Whose weights a file holds, by the names of its tensors."""

import pytest

from nonlocal_det.checkpoint.fingerprints import FINGERPRINTS, likely_sources


@pytest.mark.parametrize(
    ("names", "likely"),
    [
        (["conv1_w", "res2_0_branch2a_w", "nonlocal_conv4_5_theta_w"], ["authors", "caffe2"]),
        (["conv1_w", "res2_0_branch2a_w", "res2_0_branch2a_bn_s"], ["caffe2"]),
        (["backbone.layer1.0.conv1.conv.weight"], ["mmaction2"]),
        (["backbone.layer1.0.conv1.weight", "backbone.bn1.weight"], ["mmdetection"]),
        (["g.conv.weight", "conv_out.conv.weight"], ["mmdetection"]),
        (["s2.pathway0_res0.branch2.a.weight"], ["slowfast"]),
        (
            ["layer1.0.conv1.weight", "bn1.weight", "g.0.weight", "W.0.bias"],
            ["nonlocal_pytorch", "torchvision"],
        ),
        (["layer1.0.conv1.weight", "bn1.weight"], ["torchvision"]),
        (["backbone.bottom_up.res2.0.conv1.weight"], ["detectron2"]),
        (["keypoint_head.non_local_2.g.weight"], ["detectron2"]),
        (["a", "b.weight"], []),
        ([], []),
    ],
)
def test_the_likeliest_is_first(names, likely):
    assert likely_sources(names) == likely


def test_every_source_of_the_converter_has_one():
    from nonlocal_det.convert.sources import SOURCES

    assert list(SOURCES) == list(FINGERPRINTS)
    assert all(source.title == FINGERPRINTS[name].title for name, source in SOURCES.items())
