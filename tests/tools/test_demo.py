"""The demo tool, from its command line to its files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from detectron2.modeling import META_ARCH_REGISTRY, build_model, detector_postprocess
from detectron2.structures import Boxes, Instances
from PIL import Image
from pycocotools.coco import COCO

from nonlocal_det import get_config
from nonlocal_det.media.image import read_image
from nonlocal_det.tools.demo import main

cv2 = pytest.importorskip("cv2")

MASK_RCNN = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x_nl.yaml"
KEYPOINT_RCNN = "COCO-Keypoints/keypoint_rcnn_R_101_FPN_3x_nl_head_backbone.yaml"
RETINANET = "Ablations/retinanet_R_50_FPN_1x_nl.yaml"


class Tool:
    """Runs the demo with a small random detector that finds something at a threshold of 0."""

    def __init__(self, config: str, options: list, folder: Path) -> None:
        torch.manual_seed(0)
        model = build_model(get_config(config, options))
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.momentum = 1.0
        noise = torch.randint(0, 256, (3, 64, 96), generator=torch.Generator().manual_seed(0)).float()
        with torch.no_grad():
            model.backbone.train()(model.preprocess_image([{"image": noise}]).tensor)
        weights = folder / "model.pth"
        torch.save({"model": model.state_dict()}, weights)
        self.config = config
        options = [str(option) for option in options]
        pairs = [
            pair for pair in zip(options[::2], options[1::2], strict=True) if "SCORE_THRESH" not in pair[0]
        ]
        self.opts = [word for pair in pairs for word in pair] + ["MODEL.WEIGHTS", str(weights)]

    def arguments(self, *arguments: object, threshold: float = 0.0) -> list[str]:
        start = ["--config-file", self.config, "--confidence-threshold", str(threshold)]
        return [*start, *map(str, arguments), "--opts", *self.opts]

    def __call__(self, *arguments: object, threshold: float = 0.0) -> int:
        return main(self.arguments(*arguments, threshold=threshold))


@pytest.fixture(scope="module")
def tool(small_options, tmp_path_factory) -> Tool:
    return Tool(MASK_RCNN, small_options(), tmp_path_factory.mktemp("mask"))


@pytest.fixture(scope="module")
def keypoint_tool(small_options, tmp_path_factory) -> Tool:
    return Tool(KEYPOINT_RCNN, small_options(), tmp_path_factory.mktemp("keypoints"))


def picture(path: Path, size: tuple[int, int] = (96, 64), seed: int = 0, **options) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1] // 8, size[0] // 8, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize(size).save(path, **options)
    return path


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def one_line(capsys, *parts: str) -> str:
    """The tool's error: a single line on stderr that holds all parts."""
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ")
    assert "\n" not in error
    for part in parts:
        assert part in error
    return error


def test_every_awkward_file_is_drawn_or_refused(tool, data_dir, tmp_path, capsys):
    arguments = tool.arguments(
        "--input", data_dir / "images", "--output", tmp_path / "out", "--json", tmp_path / "r.json"
    )
    code = main([*arguments, "TEST.DETECTIONS_PER_IMAGE", "1"])

    output = capsys.readouterr()
    assert code == 3
    damaged = ["broken.png", "truncated.jpg", "zero_width.gif"]
    errors = [line for line in output.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == len(damaged)
    for name, line in zip(damaged, errors, strict=True):
        assert name in line
    assert len(output.err.splitlines()) == len(errors)  # no progress bar in a log file
    whole = [path for path in sorted((data_dir / "images").iterdir()) if path.name not in damaged]
    assert len(names(tmp_path / "out")) == len(whole) == 17
    assert f"{len(whole)} of 20 pictures done" in output.out
    for path in whole:
        # Two are called exif_orientation_6: the JPEG and the WebP become .jpg and .png.
        suffix = ".jpg" if path.suffix == ".jpg" else ".png"
        drawn = Image.open(tmp_path / "out" / (path.stem + suffix))
        assert max(drawn.size) >= 800
        height, width = read_image(path).shape[:2]
        assert drawn.width / drawn.height == pytest.approx(width / height, rel=0.02)
    # Every mask has the size of its upright picture.
    sizes = {
        result["file_name"]: result["segmentation"]["size"]
        for result in json.loads((tmp_path / "r.json").read_text())
    }
    assert len(sizes) == len(whole)
    for path in whole:
        assert sizes[str(path)] == list(read_image(path).shape[:2])


def test_orientations_give_the_same_detections(tool, tmp_path):
    """The same upright picture, stored in all eight ways without loss."""
    upright = np.random.default_rng(0).integers(0, 256, (8, 12, 3), dtype=np.uint8).repeat(8, 0).repeat(8, 1)
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.swapaxes(0, 1),
        6: np.rot90(upright, 1),
        7: upright[::-1, ::-1].swapaxes(0, 1),
        8: np.rot90(upright, -1),
    }
    for orientation, pixels in stored.items():
        exif = Image.Exif()
        exif[274] = orientation
        Image.fromarray(np.ascontiguousarray(pixels)).save(tmp_path / f"{orientation}.png", exif=exif)

    assert tool("--input", tmp_path / "*.png", "--json", tmp_path / "r.json") == 0

    results = json.loads((tmp_path / "r.json").read_text())
    found = {
        k: [(r["bbox"], r["score"], r["segmentation"]) for r in results if r["image_id"] == k] for k in stored
    }
    assert len(found[1]) == 5
    for orientation in range(2, 9):
        assert found[orientation] == found[1]


@META_ARCH_REGISTRY.register()
class ColorDetector(torch.nn.Module):
    """Finds what is blue, what is white and what is black: something to rely on without training."""

    def __init__(self, cfg) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(1))

    def forward(self, batch: list[dict]) -> list[dict]:
        (sample,) = batch
        blue, green, red = sample["image"]
        places = [blue > red + 60, torch.minimum(blue, red) > 215, torch.maximum(blue, green) < 25]
        boxes = []
        for place in places:
            y, x = (values.float() for values in place.nonzero(as_tuple=True))
            low, high = torch.tensor([0.25, 0.75])
            boxes.append([x.quantile(low), y.quantile(low), x.quantile(high), y.quantile(high)])
        found = Instances(sample["image"].shape[1:])
        found.pred_boxes = Boxes(torch.tensor(boxes))
        found.pred_classes = torch.arange(3)
        found.scores = torch.tensor([0.9, 0.8, 0.7])
        return [{"instances": detector_postprocess(found, sample["height"], sample["width"])}]


def test_orientations_of_real_files(data_dir, tmp_path):
    files = [data_dir / "images" / f"exif_orientation_{k}.jpg" for k in range(1, 9)]
    torch.save({"model": {"bias": torch.zeros(1)}}, tmp_path / "model.pth")
    arguments = ["--config-file", "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x.yaml", "--input"]
    arguments += [*map(str, files), "--json", str(tmp_path / "r.json"), "--opts", "MODEL.META_ARCHITECTURE"]
    assert main([*arguments, "ColorDetector", "MODEL.WEIGHTS", str(tmp_path / "model.pth")]) == 0
    results = json.loads((tmp_path / "r.json").read_text())
    boxes = np.array([r["bbox"] for r in results]).reshape(8, 3, 4)
    x, y, w, h = boxes[0].T
    assert (w * h < 0.6 * 1800 * 1200).all()  # none is the whole picture
    assert y[0] + h[0] / 2 < 450  # the sky is at the top
    assert x[2] + w[2] / 2 > 1000  # the dark rocks at the right
    # The files differ by JPEG's noise and by a digit in the middle.
    np.testing.assert_allclose(boxes, boxes[:1].repeat(8, axis=0), atol=25)


def test_results_are_coco_results(tool, data_dir, tmp_path):
    """pycocotools takes them; ids are COCO's own: the number in the name, the category 1 to 90."""
    files = sorted((data_dir / "coco" / "val2017").iterdir())[:3]
    code = tool("--input", *files, "--output", tmp_path / "out", "--json", tmp_path / "r.json")
    assert code == 0
    truth = COCO(str(data_dir / "coco" / "annotations" / "instances_val2017.json"))
    loaded = truth.loadRes(str(tmp_path / "r.json"))
    assert sorted(loaded.getImgIds(), key=str) == sorted(truth.getImgIds(), key=str)
    results = json.loads((tmp_path / "r.json").read_text())
    assert {result["image_id"] for result in results} == {int(path.stem) for path in files}
    categories = set(truth.getCatIds())
    for result in results:
        assert result["category_id"] in categories
        size = truth.loadImgs(result["image_id"])[0]
        assert result["segmentation"]["size"] == [size["height"], size["width"]]
        x, y, w, h = result["bbox"]
        assert x >= 0
        assert y >= 0
        assert x + w <= size["width"] + 1e-3
        assert y + h <= size["height"] + 1e-3
        assert Path(result["file_name"]).name == f"{result['image_id']:012d}.jpg"


def test_category_ids_are_mapped_back(tool, small_options, tmp_path):
    """Class 79 of 80 is COCO's category 90; a model with other classes counts from 0."""
    weights = Path(tool.opts[-1])
    state = torch.load(weights, weights_only=True)["model"]
    state["roi_heads.box_predictor.cls_score.bias"][79] = 1000.0
    torch.save({"model": state}, tmp_path / "toothbrush.pth")
    opts = [*tool.opts[:-1], str(tmp_path / "toothbrush.pth")]
    arguments = ["--config-file", MASK_RCNN, "--input", str(picture(tmp_path / "x.png"))]
    assert main([*arguments, "--json", str(tmp_path / "r.json"), "--opts", *opts]) == 0
    assert {r["category_id"] for r in json.loads((tmp_path / "r.json").read_text())} == {90}


def test_other_classes_than_the_data_set(small_options, tmp_path, capsys):
    tool = Tool(MASK_RCNN, small_options({"MODEL.ROI_HEADS.NUM_CLASSES": 3}), tmp_path)
    code = tool(
        "--input", picture(tmp_path / "x.png"), "--output", tmp_path / "y.png", "--json", tmp_path / "r.json"
    )
    assert code == 0
    assert "3 classes and coco_2017_val (DATASETS.TEST) 80" in capsys.readouterr().out
    assert {r["category_id"] for r in json.loads((tmp_path / "r.json").read_text())} <= {0, 1, 2}


def test_keypoints(keypoint_tool, data_dir, tmp_path):
    file = data_dir / "coco" / "val2017" / "000000000785.jpg"
    if not file.is_file():
        file = sorted((data_dir / "coco" / "val2017").iterdir())[0]
    code = keypoint_tool("--input", file, "--output", tmp_path / "x.png", "--json", tmp_path / "r.json")
    assert code == 0
    truth = COCO(str(data_dir / "coco" / "annotations" / "person_keypoints_val2017.json"))
    truth.loadRes(str(tmp_path / "r.json"))
    results = json.loads((tmp_path / "r.json").read_text())
    assert results
    for result in results:
        assert len(result["keypoints"]) == 51
        assert result["category_id"] == 1
        assert "segmentation" not in result
        # COCO counts pixels: a keypoint of the box is in it, less the half pixel.
        x, _, w, _ = result["bbox"]
        assert x - 1.5 <= min(result["keypoints"][0::3])
        assert max(result["keypoints"][0::3]) <= x + w + 1


def test_nothing_above_the_threshold_is_written_and_said(tool, tmp_path, capsys):
    source = picture(tmp_path / "big.png", (900, 800))
    code = tool(
        "--input", source, "--output", tmp_path / "o.png", "--json", tmp_path / "r.json", threshold=1.0
    )
    assert code == 0
    assert "big.png: nothing above 1" in capsys.readouterr().out
    np.testing.assert_array_equal(read_image(tmp_path / "o.png"), read_image(source))
    assert json.loads((tmp_path / "r.json").read_text()) == []


def test_threshold(tool, small_options, tmp_path):
    source = picture(tmp_path / "x.png")
    for tested in (tool, Tool(RETINANET, small_options(), tmp_path)):
        assert tested("--input", source, "--json", tmp_path / "r.json") == 0
        scores = sorted(r["score"] for r in json.loads((tmp_path / "r.json").read_text()))
        middle = (scores[1] + scores[2]) / 2
        assert tested("--input", source, "--json", tmp_path / "r.json", threshold=middle) == 0
        above = sorted(r["score"] for r in json.loads((tmp_path / "r.json").read_text()))
        assert above == pytest.approx(scores[2:])


def test_folders_patterns_and_names(tool, tmp_path, capsys, monkeypatch):
    picture(tmp_path / "a" / "x.jpg")
    picture(tmp_path / "a" / "sub" / "deep.png")
    picture(tmp_path / "b" / "x.JPG", format="JPEG")
    picture(tmp_path / "b" / "x.png")
    picture(tmp_path / "b" / "y.gif")
    (tmp_path / "b" / "notes.txt").write_text("no picture")
    (tmp_path / "b" / "._x.jpg").write_text("a Mac's shadow of x.jpg")
    monkeypatch.chdir(tmp_path)

    assert tool("--input", "a", "b", "a/x.jpg", "**/*.gif", "--output", "out", "--json", "r.json") == 0

    output = capsys.readouterr().out
    assert "2 other files in the folders were passed over" in output
    assert names(tmp_path / "out") == sorted(["x.jpg", "x.png", "x_2.JPG", "y.png"])
    assert f"{Path('b/x.JPG')}: drawn as x_2.JPG; {Path('a/x.jpg')} has its name" in output
    results = json.loads((tmp_path / "r.json").read_text())
    ids = {r["file_name"]: r["image_id"] for r in results}
    assert ids == {os.path.join("a", "x.jpg"): 1, "b/x.JPG": 2, "b/x.png": 3, "b/y.gif": 4}


def test_output_file_and_folder(tool, tmp_path):
    source = picture(tmp_path / "x.png")
    files = [f"one.{suffix}" for suffix in ("jpg", "JPEG", "png", "webp", "tif", "bmp", "gif")]
    for output, expected in [(file, file) for file in files] + [("new/folder", "new/folder/x.png")]:
        assert tool("--input", source, "--output", tmp_path / output) == 0
        assert (tmp_path / expected).is_file()
    assert tool("--input", source, "--output", tmp_path / "new") == 0
    assert (tmp_path / "new" / "x.png").is_file()
    assert not list(tmp_path.rglob("*.partial*"))


def test_inputs_are_not_overwritten(tool, tmp_path, capsys):
    source = picture(tmp_path / "in" / "x.png")
    content = source.read_bytes()
    (tmp_path / "link.png").symlink_to(source)
    for output in (source, tmp_path / "in", tmp_path / "link.png"):
        assert tool("--input", source, "--output", output) == 2
        one_line(capsys, "is an input and would be overwritten")
    assert tool("--input", source, "--json", source) == 2
    one_line(capsys, "would be overwritten")
    assert source.read_bytes() == content


def test_thin_pictures(tool, tmp_path):
    for size in ((1, 1500), (2000, 1), (1, 1)):
        Image.new("RGB", size).save(tmp_path / "thin.png")
        assert tool("--input", tmp_path / "thin.png", "--output", tmp_path / "out.png") == 0


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--input", "absent.jpg", "--output", "o"], ["absent.jpg"]),
        (["--input", "*.nothing", "--output", "o"], ["*.nothing", "no file matches"]),
        (["--input", "empty", "--output", "o"], ["empty", "no picture"]),
        (["--input", "x.png"], ["--output"]),
        (["--input", "x.png", "y.png", "--output", "o.png"], ["o.png", "folder"]),
        (["--input", "x.png", "v.mp4", "--output", "o"], ["v.mp4", "only input"]),
        (["--input", "x.png", "7", "--output", "o"], ["7", "camera"]),
        (["--input", "v.mp4", "--output", "o.png"], ["o.png", ".mp4"]),
        (["--input", "97", "--output", "o"], ["camera 97"]),
        (["--input", "x.png", "--output", "x.png/o"], ["x.png"]),
        (["--input", "v.mp4", "--output", "o", "--attention", "auto"], ["--attention"]),
        (["--input", "x.png", "--output", "o", "--attention", "96,3"], ["96,3", "x.png", "96 x 64"]),
        (["--input", "x.png", "--output", "o", "--attention", "3,64"], ["3,64", "x.png"]),
        (["--input", "x.png", "--output", "o", "--attention=-1,3"], ["-1,3"]),
        (["--input", "x.png", "--output", "o", "--attention", "middle"], ["middle"]),
        (["--input", "x.png", "--json", "r.json", "--attention", "auto"], ["--output"]),
        (["--input", "x.png", "--output", "o", "--confidence-threshold", "50"], ["50"]),
    ],
)
def test_wrong_arguments(tool, tmp_path, capsys, monkeypatch, arguments, parts):
    monkeypatch.chdir(tmp_path)
    picture(tmp_path / "x.png")
    picture(tmp_path / "y.png")
    video(tmp_path / "v.mp4")
    (tmp_path / "empty").mkdir()
    assert tool(*arguments) == 2
    one_line(capsys, *parts)


def test_a_terminal_gets_a_progress_bar(tool, tmp_path, capsys, monkeypatch):
    source = picture(tmp_path / "x.png")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert tool("--input", source, "--output", tmp_path / "o.png") == 0
    assert "1/1" in capsys.readouterr().err


def test_threshold_by_flag_or_by_config(tool, tmp_path, capsys):
    source = picture(tmp_path / "x.png")
    start = ["--config-file", tool.config, "--input", str(source), "--output", str(tmp_path / "o.png")]
    setting = ["MODEL.ROI_HEADS.SCORE_THRESH_TEST", "0.99"]
    assert main([*start, "--opts", *tool.opts, *setting]) == 0
    assert "nothing above 0.99" in capsys.readouterr().out
    assert main([*start, "--confidence-threshold", "0.3", "--opts", *tool.opts, *setting]) == 2
    one_line(capsys, "--confidence-threshold", "SCORE_THRESH_TEST")


def test_weights_are_needed(tool, tmp_path, capsys):
    source = picture(tmp_path / "x.png")
    arguments = [
        "--config-file",
        MASK_RCNN,
        "--input",
        str(source),
        "--output",
        str(tmp_path / "o.png"),
        "--opts",
    ]
    assert main([*arguments, *tool.opts, "MODEL.WEIGHTS", ""]) == 2
    one_line(capsys, "MODEL.WEIGHTS", "empty")
    assert main([*arguments, *tool.opts, "MODEL.WEIGHTS", str(tmp_path / "no.pth")]) == 2
    one_line(capsys, "no.pth")
    assert main([*arguments, *tool.opts, "MODEL.NONLOCAL.RES9", "[1]"]) == 2
    one_line(capsys, "RES9")


def test_no_opencv(tool, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "cv2", None)
    assert tool("--input", picture(tmp_path / "x.png"), "--output", tmp_path / "o.png") == 2
    one_line(capsys, "pip install opencv-python-headless")


def video(path: Path, rate: float = 12.5, count: int = 3, size: tuple[int, int] = (96, 64)) -> Path:
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"mp4v"), rate, size)
    rng = np.random.default_rng(0)
    for _ in range(count):
        writer.write(cv2.resize(rng.integers(0, 256, (8, 12, 3), dtype=np.uint8), size))
    writer.release()
    return path


def frames(path: Path) -> tuple[int, float]:
    capture = cv2.VideoCapture(str(path))
    count = 0
    while capture.read()[0]:
        count += 1
    return count, capture.get(cv2.CAP_PROP_FPS)


def test_video(tool, tmp_path, capsys):
    source = video(tmp_path / "walk.mp4")
    assert tool("--input", source, "--output", tmp_path / "out", "--json", tmp_path / "r.json") == 0
    assert "3 frames done" in capsys.readouterr().out
    assert names(tmp_path / "out") == ["walk.mp4"]
    assert frames(tmp_path / "out" / "walk.mp4") == (3, pytest.approx(12.5))
    results = json.loads((tmp_path / "r.json").read_text())
    assert {(r["image_id"], r["file_name"]) for r in results} == {(k, str(source)) for k in (1, 2, 3)}

    assert tool("--input", source, "--output", tmp_path / "nothing.avi", threshold=1.0) == 0
    assert "nothing above 1 in any frame" in capsys.readouterr().out
    assert frames(tmp_path / "nothing.avi") == (3, pytest.approx(12.5))

    assert tool("--input", source, "--output", source) == 2
    one_line(capsys, "would be overwritten")


def test_damaged_video(tool, tmp_path, capsys):
    (tmp_path / "text.mp4").write_text("no video")
    assert (
        tool("--input", tmp_path / "text.mp4", "--output", tmp_path / "o.mp4", "--json", tmp_path / "r.json")
        == 3
    )
    one_line(capsys, "text.mp4")
    assert not (tmp_path / "o.mp4").exists()


def test_a_cut_video_is_drawn_as_far_as_it_goes(tool, data_dir, tmp_path, capsys):
    content = (data_dir / "video" / "mpeg4_320.avi").read_bytes()
    (tmp_path / "cut.avi").write_bytes(content[: len(content) // 8])
    outputs = ("--output", tmp_path / "o.mp4", "--json", tmp_path / "r.json")
    assert tool("--input", tmp_path / "cut.avi", *outputs) == 3
    count, rate = frames(tmp_path / "o.mp4")
    assert 5 < count < 60
    assert rate == pytest.approx(25)
    one_line(capsys, f"cut.avi: damaged after frame {count} of 164")
    assert {r["image_id"] for r in json.loads((tmp_path / "r.json").read_text())} == set(range(1, count + 1))


def test_attention(keypoint_tool, tmp_path, capsys):
    source = picture(tmp_path / "x.png")
    code = keypoint_tool(
        "--input", source, "--output", tmp_path / "o.png", "--attention", "20,30", "--attention", "auto"
    )
    assert code == 0
    blocks = ["res4.non_local_22"] + [f"keypoint_head.non_local_{k}" for k in (2, 4, 6, 8)]
    output = capsys.readouterr().out
    for block in blocks:
        assert f"{block} 0." in output
    with np.load(tmp_path / "o_attention.npz") as saved:
        points = saved["backbone.bottom_up.res4.non_local_22/points"]
        assert points[0].tolist() == [20.5, 30.5]
        assert 2 <= len(points) <= 4
        # The picture of 96 x 64 fits the network's input: 4 x 6 cells, 2 x 3 keys.
        weights = saved["backbone.bottom_up.res4.non_local_22/weights"]
        assert weights.shape == (len(points), 2, 3)
        np.testing.assert_allclose(weights.sum(axis=(1, 2)), 1, rtol=1e-5)
        for k in (2, 4, 6, 8):
            weights = saved[f"roi_heads.keypoint_head.non_local_{k}/weights"]
            assert weights.shape[1:] == (7, 7)
            np.testing.assert_allclose(weights.sum(axis=(1, 2)), 1, rtol=1e-5)
    expected = ["o.png", "o_attention.npz", "x.png"] + [f"o_attention_{block}.png" for block in blocks]
    assert names(tmp_path) == sorted(expected)


def test_attention_needs_a_block(small_options, tmp_path, capsys):
    tool = Tool("COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x.yaml", small_options(), tmp_path)
    code = tool("--input", picture(tmp_path / "x.png"), "--output", tmp_path / "o.png", "--attention", "auto")
    assert code == 2
    assert "error: --attention: the model has no non-local block" in capsys.readouterr().err


def test_attention_says_where_nothing_is(keypoint_tool, tmp_path, capsys):
    source = picture(tmp_path / "x.png")
    code = keypoint_tool(
        "--input", source, "--output", tmp_path / "o.png", "--attention", "auto", "--attention", "5,6",
        threshold=1.0,
    )  # fmt: skip
    output = capsys.readouterr().out
    assert code == 0
    assert output.count("keypoint head: no instance was detected") == 1
    assert (tmp_path / "o_attention_res4.non_local_22.png").is_file()


def test_as_a_program(tool, tmp_path):
    """``python -m`` gives the exit code, and leaves stderr to the bar and the errors."""
    picture(tmp_path / "in" / "x.png")
    shutil.copy(__file__, tmp_path / "in" / "damaged.png")
    run = subprocess.run(
        [
            *(sys.executable, "-m", "nonlocal_det.tools.demo"),
            *tool.arguments("--input", tmp_path / "in", "--output", tmp_path / "out"),
        ],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert run.returncode == 3, run.stderr
    assert "damaged.png" in run.stderr
    assert "Traceback" not in run.stderr
    assert names(tmp_path / "out") == ["x.png"]
