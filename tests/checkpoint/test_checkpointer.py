from __future__ import annotations

import pickle
import re

import pytest
import torch

pytest.importorskip("detectron2")

from detectron2.modeling import build_model

from nonlocal_det import get_config
from nonlocal_det.checkpoint.checkpointer import NonLocalCheckpointer
from nonlocal_det.errors import CheckpointError

MASK = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x"
C4 = "Ablations/mask_rcnn_R_50_C4_1x"
RETINANET = "Ablations/retinanet_R_50_FPN_1x"
KEYPOINT = "COCO-Keypoints/keypoint_rcnn_R_101_FPN_3x"

BACKBONE_BLOCK = "backbone.bottom_up.res4.non_local_5"
HEAD_BLOCKS = [f"roi_heads.keypoint_head.non_local_{i}" for i in (2, 4, 6, 8)]

# baseline, model with blocks, the names of its blocks
PAIRS = [
    pytest.param(MASK, MASK + "_nl", [BACKBONE_BLOCK], id="mask"),
    pytest.param(C4, C4 + "_nl", ["backbone.res4.non_local_5"], id="c4"),
    pytest.param(RETINANET, RETINANET + "_nl", [BACKBONE_BLOCK], id="retinanet"),
    pytest.param(KEYPOINT, KEYPOINT + "_nl_head_backbone", [*HEAD_BLOCKS, BACKBONE_BLOCK], id="keypoint"),
]


@pytest.fixture(scope="module")
def make(small_options):
    """A function: a small detector in evaluation mode, its weights drawn with the seed."""

    def build(name: str, seed: int = 0, **changes):
        options = {key.replace("__", "."): value for key, value in changes.items()}
        if name.startswith(KEYPOINT):
            options.setdefault("MODEL.RESNETS.DEPTH", 50)
        if name.startswith(C4):
            options.setdefault("MODEL.RPN.PRE_NMS_TOPK_TEST", 100)
        torch.manual_seed(seed)
        return build_model(get_config(name + ".yaml", small_options(options))).eval()

    return build


def file_of(path, weights: dict, **entries):
    """Write a file in Detectron2's zoo layout."""
    arrays = {name: value.numpy() for name, value in weights.items()}
    path.write_bytes(pickle.dumps({"model": arrays, "__author__": "test", **entries}))
    return str(path)


def detect(model, seed: int = 0):
    image = torch.randint(0, 256, (3, 64, 96), generator=torch.Generator().manual_seed(seed)).float()
    with torch.no_grad():
        return model([{"image": image}])[0]["instances"]


def assert_same_detections(ours, theirs):
    assert len(theirs) > 0
    for field, value in theirs.get_fields().items():
        other = ours.get(field)
        a, b = (x.tensor if hasattr(x, "tensor") else x for x in (other, value))
        assert torch.isfinite(b.float()).all()
        assert torch.equal(a, b), field


def backbone_state(baseline) -> dict[str, torch.Tensor]:
    """The tensors of an ImageNet net under the names of its file: the bottom-up net's, res5 included."""
    found = {}
    for name, value in baseline.state_dict().items():
        short = re.sub(r"^(backbone\.bottom_up|backbone|roi_heads(?=\.res5))\.", "", name)
        if re.match(r"(stem|res[2-5])\.", short):
            found[short] = value
    return found


@pytest.mark.parametrize(("baseline", "ours", "blocks"), PAIRS)
def test_zoo_file_loads_every_tensor_and_keeps_the_outputs(make, tmp_path, baseline, ours, blocks):
    baseline, model = make(baseline, seed=1), make(ours, seed=2)
    path = file_of(tmp_path / "zoo.pkl", baseline.state_dict(), matching_heuristics=True)

    checkpointer = NonLocalCheckpointer(model)
    checkpointer.load(path)

    state = model.state_dict()
    for name, value in baseline.state_dict().items():
        assert torch.equal(state[name], value), name
    assert sorted(checkpointer.fresh_blocks) == sorted(blocks)
    report = checkpointer.report
    assert not report.unexpected
    assert not report.leftovers
    assert not report.untrained
    new = {name for names in report.expected.values() for name in names}
    assert new == {name for name in state if ".non_local_" in name}
    assert_same_detections(detect(model), detect(baseline))


@pytest.mark.parametrize("norm", ["BN", "GN"])
def test_block_with_a_norm_is_new_and_an_identity(make, tmp_path, norm):
    baseline, model = make(MASK, seed=1), make(MASK + "_nl", seed=2, MODEL__NONLOCAL__NORM=norm)
    torch.save({"model": baseline.state_dict()}, tmp_path / "baseline.pth")
    checkpointer = NonLocalCheckpointer(model)
    checkpointer.load(str(tmp_path / "baseline.pth"))
    assert checkpointer.fresh_blocks == [BACKBONE_BLOCK]
    assert_same_detections(detect(model), detect(baseline))


@pytest.mark.parametrize(("baseline", "ours", "blocks"), PAIRS[:3])
def test_imagenet_file_under_detectron2_names(make, tmp_path, caplog, baseline, ours, blocks):
    source = make(baseline, seed=1)
    weights = backbone_state(source) | {
        "stem.fc.weight": torch.zeros(1000, 4),
        "stem.fc.bias": torch.zeros(1000),
    }
    path = file_of(tmp_path / "R-50.pkl", weights, matching_heuristics=True)
    model = make(ours, seed=2)
    checkpointer = NonLocalCheckpointer(model)
    with caplog.at_level("INFO", logger="fvcore"):
        checkpointer.load(path)

    # The backbone does not show which RoI heads or FPN it had: they keep their own random weights.
    fresh = make(ours, seed=2).state_dict()
    loaded = 0
    for name, value in model.state_dict().items():
        short = re.sub(r"^(backbone\.bottom_up|backbone|roi_heads(?=\.res5))\.", "", name)
        if short in weights:
            loaded += 1
            assert torch.equal(value, weights[short]), name
        else:
            assert torch.equal(value, fresh[name]), name
    # RetinaNet, too, has all of res2 to res5 in its ResNet.
    assert loaded == len(weights) - 2
    assert sorted(checkpointer.report.leftovers) == ["stem.fc.bias", "stem.fc.weight"]
    assert checkpointer.report.untrained
    assert "outside the backbone" in caplog.text
    assert checkpointer.fresh_blocks == blocks


def caffe2_names(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Rename an ImageNet net as Caffe2 did; its batch norms there are an affine map alone."""
    branch = {"shortcut": "branch1", "conv1": "branch2a", "conv2": "branch2b", "conv3": "branch2c"}
    found = {}
    for name, value in weights.items():
        if name.endswith(("running_mean", "running_var", "num_batches_tracked")):
            continue
        letter = "w" if name.endswith("weight") else "b"
        parts = name.split(".")
        if parts[0] == "stem":
            new = f"res_conv1_bn_{'s' if letter == 'w' else 'b'}" if "norm" in parts else f"conv1_{letter}"
        else:
            new = f"{parts[0]}_{parts[1]}_{branch[parts[2]]}"
            new += f"_bn_{'s' if letter == 'w' else 'b'}" if "norm" in parts else f"_{letter}"
        found[new] = value
    return found


@pytest.mark.parametrize("norm", ["FrozenBN", "BN"])
def test_imagenet_file_under_caffe2_names(make, tmp_path, norm):
    source = make(MASK, seed=1)
    weights = backbone_state(source)
    blobs = {name: value.numpy() for name, value in caffe2_names(weights).items()}
    blobs |= {"conv1_b": torch.zeros(8).numpy(), "fc1000_w": torch.zeros(1000, 4).numpy()}
    blobs |= {"fc1000_b": torch.zeros(1000).numpy(), "conv1_w_momentum": torch.zeros(8).numpy()}
    (tmp_path / "R-50.pkl").write_bytes(pickle.dumps({"blobs": blobs}))
    model = make(MASK + "_nl", seed=2, MODEL__RESNETS__NORM=norm)
    checkpointer = NonLocalCheckpointer(model)
    checkpointer.load(str(tmp_path / "R-50.pkl"))
    state = model.state_dict()
    for name, value in weights.items():
        if not name.endswith(("running_mean", "running_var", "num_batches_tracked")):
            assert torch.equal(state["backbone.bottom_up." + name], value), name
    assert sorted(checkpointer.report.leftovers) == ["fc1000.bias", "fc1000.weight", "stem.conv1.bias"]


def test_frozen_and_trained_batch_norms_exchange_weights(make, tmp_path):
    for theirs, ours in (("FrozenBN", "BN"), ("BN", "FrozenBN")):
        source = make(MASK, seed=1, MODEL__RESNETS__NORM=theirs)
        torch.save({"model": source.state_dict()}, tmp_path / "w.pth")
        checkpointer = NonLocalCheckpointer(make(MASK, MODEL__RESNETS__NORM=ours))
        checkpointer.load(str(tmp_path / "w.pth"))
        assert not checkpointer.report.surprising


@pytest.mark.parametrize(
    ("name", "changes", "resized"),
    [
        (MASK, {"MODEL__ROI_HEADS__NUM_CLASSES": 3}, {"cls_score", "bbox_pred", "predictor"}),
        (C4, {"MODEL__ROI_HEADS__NUM_CLASSES": 3}, {"cls_score", "bbox_pred", "predictor"}),
        (RETINANET, {"MODEL__RETINANET__NUM_CLASSES": 3}, {"cls_score"}),
        (KEYPOINT, {"MODEL__ROI_KEYPOINT_HEAD__NUM_KEYPOINTS": 4}, {"score_lowres"}),
    ],
)
@pytest.mark.parametrize("suffix", ["pth", "pkl"])
def test_other_class_or_keypoint_count_is_expected(make, tmp_path, name, changes, resized, suffix):
    source, model = make(name, seed=1), make(name, seed=2, **changes)
    path = tmp_path / f"w.{suffix}"
    if suffix == "pth":
        torch.save(source.state_dict(), path)
    else:
        file_of(path, source.state_dict(), matching_heuristics=True)
    checkpointer = NonLocalCheckpointer(model)
    checkpointer.load(str(path))
    names = checkpointer.report.untrained
    assert {name.split(".")[-2] for name in names} == resized
    assert not checkpointer.report.surprising


class TestRefused:
    """Files whose weights would silently not be what their author trained."""

    @pytest.fixture
    def ours(self, make):
        return make(MASK + "_nl", seed=2)

    def load(self, model, weights, tmp_path, allow_missing=""):
        torch.save({"model": weights}, tmp_path / "w.pth")
        checkpointer = NonLocalCheckpointer(model, allow_missing=allow_missing)
        checkpointer.load(str(tmp_path / "w.pth"))
        return checkpointer

    def test_missing_tensors(self, make, ours, tmp_path):
        weights = make(MASK).state_dict()
        del weights["proposal_generator.rpn_head.conv.weight"]
        del weights["roi_heads.box_head.fc1.bias"]
        with pytest.raises(
            CheckpointError, match=r"w\.pth: 2 of .*rpn_head\.conv\.weight: not in .*--allow-missing"
        ):
            self.load(ours, weights, tmp_path)
        with pytest.raises(CheckpointError, match="--allow-missing"):  # one name is not covered
            self.load(ours, weights, tmp_path, r"rpn_head")
        found = self.load(ours, weights, tmp_path, r"rpn_head|box_head\.fc1")
        assert set(found.report.untrained) == {
            "proposal_generator.rpn_head.conv.weight",
            "roi_heads.box_head.fc1.bias",
        }

    def test_wrong_shape(self, make, ours, tmp_path):
        weights = make(MASK, MODEL__ROI_BOX_HEAD__FC_DIM=24).state_dict()
        with pytest.raises(
            CheckpointError, match=r"box_head\.fc1\.bias: \(24,\) in the file, \(32,\) in the model"
        ):
            self.load(ours, weights, tmp_path)

    def test_predictor_of_another_width_is_not_another_count(self, make, ours, tmp_path):
        weights = make(MASK).state_dict()
        name = "roi_heads.box_predictor.cls_score.weight"
        weights[name] = weights[name][:, :-1]
        with pytest.raises(CheckpointError, match=re.escape(name)):
            self.load(ours, weights, tmp_path)

    def test_a_missing_head_is_not_another_count(self, make, tmp_path):
        weights = make(MASK).state_dict()
        model = make(MASK + "_nl", MODEL__KEYPOINT_ON=True)
        with pytest.raises(CheckpointError, match=r"roi_heads\.keypoint_head"):
            self.load(model, weights, tmp_path)
        self.load(model, weights, tmp_path, r"^roi_heads\.keypoint_head\.")

    def test_part_of_a_block(self, make, ours, tmp_path):
        weights = make(MASK + "_nl").state_dict()
        del weights[BACKBONE_BLOCK + ".phi.weight"]
        with pytest.raises(
            CheckpointError, match=r"non_local_5\.phi\.weight: not in the file, which has the rest"
        ):
            self.load(ours, weights, tmp_path)

    def test_block_of_another_width(self, make, ours, tmp_path):
        weights = make(MASK + "_nl", MODEL__NONLOCAL__REDUCTION=4).state_dict()
        with pytest.raises(CheckpointError, match=r"non_local_5\.\w+\.\w+: \(\d+"):
            self.load(ours, weights, tmp_path)

    def test_backbone_file_without_a_stage(self, make, ours, tmp_path):
        weights = {k: v for k, v in backbone_state(make(MASK)).items() if not k.startswith("res5")}
        path = file_of(tmp_path / "R.pkl", weights, matching_heuristics=True)
        with pytest.raises(CheckpointError, match=r"bottom_up\.res5"):
            NonLocalCheckpointer(ours).load(path)

    def test_nothing_fits(self, ours, tmp_path):
        with pytest.raises(CheckpointError, match="tensors are missing"):
            self.load(ours, {"encoder.weight": torch.zeros(3)}, tmp_path)

    @pytest.mark.parametrize("suffix", ["pth", "pkl"])
    def test_trained_block_that_the_model_lacks(self, make, tmp_path, suffix):
        weights = make(MASK + "_nl", MODEL__NONLOCAL__RES3=[1, -1]).state_dict()
        expected = (
            r"3 trained blocks .*MODEL\.NONLOCAL\.RES3 \[1,3\], MODEL\.NONLOCAL\.RES4 \[5\], "
            "MODEL.BACKBONE.NAME build_nonlocal_backbone"
        )
        path = tmp_path / f"w.{suffix}"
        if suffix == "pth":
            torch.save({"model": weights}, path)
        else:
            file_of(path, weights, matching_heuristics=True)
        with pytest.raises(CheckpointError, match=expected):
            NonLocalCheckpointer(make(MASK)).load(str(path))
        with pytest.raises(CheckpointError, match=r"1 trained block \("):
            self.load(
                make(MASK + "_nl", MODEL__NONLOCAL__RES3=[1, 3], MODEL__NONLOCAL__RES4=[0]), weights, tmp_path
            )
        self.load(make(MASK), weights, tmp_path, r"\.non_local_\d\.")

    @pytest.mark.parametrize("imagenet", [True, False])
    def test_a_deeper_net(self, make, ours, tmp_path, imagenet):
        deeper = make(MASK, MODEL__RESNETS__DEPTH=101)
        weights = backbone_state(deeper) if imagenet else deeper.state_dict()
        path = file_of(tmp_path / "R-101.pkl", weights, matching_heuristics=True)
        with pytest.raises(
            CheckpointError, match=r"17 trained blocks \(.*res4\.\d+, and 14 more\).*MODEL\.RESNETS\.DEPTH"
        ):
            NonLocalCheckpointer(ours).load(path)

    def test_trained_blocks_of_the_keypoint_head(self, make, tmp_path):
        weights = make(KEYPOINT + "_nl_head").state_dict()
        with pytest.raises(
            CheckpointError, match=r"4 trained.*MODEL\.NONLOCAL\.KEYPOINT_HEAD 2, .*NonLocalKeypointHead"
        ):
            self.load(make(KEYPOINT), weights, tmp_path)

    def test_trained_block_with_more_parts_than_the_models(self, make, tmp_path):
        weights = make(MASK + "_nl").state_dict()
        with pytest.raises(CheckpointError, match=r"non_local_5.*MODEL\.NONLOCAL\.PAIRWISE"):
            self.load(make(MASK + "_nl", MODEL__NONLOCAL__PAIRWISE="gaussian"), weights, tmp_path)


@pytest.fixture(scope="module")
def model(make):
    return make(MASK)


class TestNotACheckpoint:
    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("empty.pth", b"", "an empty file"),
            ("text.pth", b"not a checkpoint", "not a checkpoint, or damaged"),
            ("text.pkl", b"not a checkpoint", "not a checkpoint, or damaged"),
            ("list.pkl", pickle.dumps([1, 2]), "holds a list, not weights by name"),
            (
                "nested.pkl",
                pickle.dumps({"model": {"a": 1}}),
                "not in Detectron2's layout: 'model' is a dict",
            ),
            (
                "numbers.pkl",
                pickle.dumps({"model": {"a": 1}, "__author__": ""}),
                "'a' is a int, not a tensor",
            ),
            ("nothing.pkl", pickle.dumps({"model": {}, "__author__": ""}), "no weights inside"),
        ],
    )
    def test_content(self, model, tmp_path, name, content, message):
        (tmp_path / name).write_bytes(content)
        self.refuse(model, str(tmp_path / name), message)

    @pytest.mark.parametrize("suffix", ["pth", "pkl"])
    @pytest.mark.parametrize("kept", [0.01, 0.5, 0.99])
    def test_truncated(self, model, tmp_path, suffix, kept):
        path = tmp_path / f"w.{suffix}"
        if suffix == "pth":
            torch.save({"model": model.state_dict()}, path)
        else:
            file_of(path, model.state_dict())
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * kept)])
        self.refuse(model, str(path), "not a checkpoint, or damaged")

    def test_another_layout(self, model, tmp_path):
        torch.save({"state_dict": model.state_dict(), "meta": {}}, tmp_path / "mmdet.pth")
        self.refuse(model, str(tmp_path / "mmdet.pth"), "'state_dict' is a OrderedDict")

    def test_path(self, model, tmp_path):
        self.refuse(model, str(tmp_path / "none.pth"), "no such file")
        self.refuse(model, str(tmp_path), "a folder, not a file")
        self.refuse(model, "catalog://nobody/nothing", "cannot be fetched")

    def test_last_checkpoint_that_is_gone(self, model, tmp_path):
        (tmp_path / "last_checkpoint").write_text("model_0000009.pth")
        with pytest.raises(
            CheckpointError, match=r"last_checkpoint names 'model_0000009\.pth', which is not there"
        ):
            NonLocalCheckpointer(model, str(tmp_path)).resume_or_load("")
        assert NonLocalCheckpointer(model, str(tmp_path)).resume_or_load("", resume=False) == {}

    def test_names_that_match_twice(self, model, tmp_path):
        weights = {"bias": model.state_dict()["backbone.fpn_lateral2.bias"]}
        path = file_of(tmp_path / "w.pkl", weights, matching_heuristics=True)
        self.refuse(model, path, "cannot be matched")

    def refuse(self, model, path, message):
        checkpointer = NonLocalCheckpointer(model)
        with pytest.raises(CheckpointError) as raised:
            checkpointer.load(path)
        text = str(raised.value)
        assert path in text
        assert message in text
        assert "\n" not in text
        assert len(text) < len(path) + 250
        assert checkpointer.load("") == {}  # the failed load leaves it usable

    def test_regular_expression(self, model):
        with pytest.raises(CheckpointError, match=r"--allow-missing '\(': not a regular expression"):
            NonLocalCheckpointer(model, allow_missing="(")


@pytest.mark.parametrize("suffix", ["pth", "pkl"])
def test_code_in_a_file_does_not_run(make, tmp_path, suffix):
    class Touch:
        def __reduce__(self):
            return (open, (str(tmp_path / "touched"), "w"))

    path = tmp_path / f"w.{suffix}"
    if suffix == "pth":
        torch.save({"model": {"a": Touch()}}, path)
    else:
        path.write_bytes(pickle.dumps({"model": {"a": Touch()}, "__author__": "somebody"}))
    with pytest.raises(CheckpointError, match=rf"{path.name}: refused, as loading it would call io\.open"):
        NonLocalCheckpointer(make(MASK)).load(str(path))
    assert not (tmp_path / "touched").exists()
