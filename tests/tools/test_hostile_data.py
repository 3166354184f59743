"""Annotation files and pictures that would make a run read what it should not, or fill the memory."""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("detectron2")

from detectron2.data import DatasetCatalog, MetadataCatalog
from PIL import Image

from nonlocal_det.tools import check_dataset, train

MASK = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x_nl.yaml"

pytestmark = pytest.mark.usefixtures("fresh_logging")


def png_that_claims(width: int, height: int) -> bytes:
    """A PNG of a few bytes."""
    content = b"\x89PNG\r\n\x1a\n"
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    for name, part in ((b"IHDR", header), (b"IDAT", zlib.compress(bytes(9)))):
        content += struct.pack(">I", len(part)) + name + part + struct.pack(">I", zlib.crc32(name + part))
    return content


@pytest.fixture
def data(tmp_path):
    """A function: write 8 pictures, and an annotation file with one more, of the given name; return both."""

    def write(extra: str = "7.png") -> tuple[Path, Path]:
        images = tmp_path / "images"
        images.mkdir()
        rng = np.random.default_rng(0)
        for number in range(8):
            noise = rng.integers(0, 255, (32, 40, 3), np.uint8)
            Image.fromarray(noise).save(images / f"{number}.png")
        Image.fromarray(noise).save(tmp_path / "secret.png")
        (images / "link.png").symlink_to("../secret.png")
        names = [*(f"{number}.png" for number in range(7)), extra]
        box = {"bbox": [2, 2, 20, 20], "area": 400, "iscrowd": 0, "category_id": 1}
        polygon = {"segmentation": [[2, 2, 22, 2, 22, 22, 2, 22]]}
        content = {
            "images": [{"id": i, "file_name": x, "width": 40, "height": 32} for i, x in enumerate(names)],
            "annotations": [{"id": i + 1, "image_id": i, **box, **polygon} for i in range(8)],
            "categories": [{"id": 1, "name": "thing"}],
        }
        (tmp_path / "data.json").write_text(json.dumps(content))
        return tmp_path / "data.json", images

    yield write
    for name in ("hostile", "plain"):
        if name in DatasetCatalog:
            DatasetCatalog.remove(name)
            MetadataCatalog.remove(name)


@pytest.fixture
def run(data, small_options, tmp_path, capsys):
    """A function: train, or evaluate, on the data; return the exit code and the lines of standard error."""

    def call(
        *flags: str, files: tuple[Path, Path], name: str = "hostile", **changes
    ) -> tuple[int, list[str]]:
        options = {
            "DATASETS.REGISTER": [[name, *map(str, files)]],
            "DATASETS.TRAIN": (name,),
            "DATASETS.TEST": (name,) if "--eval-only" in flags else (),
            "SOLVER.MAX_ITER": 6,
            "OUTPUT_DIR": str(tmp_path / "out"),
            "SEED": 1,
            **{key.replace("__", "."): value for key, value in changes.items()},
        }
        code = train.main(["--config-file", MASK, *flags, *map(str, small_options(options))])
        return code, capsys.readouterr().err.splitlines()

    return call


@pytest.mark.parametrize("flags", [[], ["--eval-only"]])
@pytest.mark.parametrize("name", ["../secret.png", "{folder}/secret.png", "link.png", "../../../etc/passwd"])
def test_a_file_name_that_leads_out(data, run, tmp_path, capsys, name, flags):
    name = name.format(folder=tmp_path)
    files = data(name)
    code, lines = run(*flags, files=files)
    assert code == 2
    (line,) = lines
    assert "file_name that leads out of the image folder: 1" in line
    assert f"image 7 {name}" in line
    assert "DATASETS.ALLOW_OUTSIDE_IMAGE_ROOT" in line

    # The tool says the same, and looks at no such picture.
    assert check_dataset.main([*map(str, files)]) == 2
    assert "is not there" not in capsys.readouterr().out
    assert check_dataset.main([str(files[0])]) == (0 if name == "link.png" else 2)
    if not name.endswith("passwd"):
        assert check_dataset.main([*map(str, files), "--allow-outside"]) == 0


def test_it_may_be_allowed(data, run):
    files = data("../secret.png")
    assert run(files=files, DATASETS__ALLOW_OUTSIDE_IMAGE_ROOT=True, SOLVER__MAX_ITER=1)[0] == 0
    assert run("--eval-only", files=files, DATASETS__ALLOW_OUTSIDE_IMAGE_ROOT=True)[0] == 0


@pytest.mark.parametrize("flags", [[], ["--eval-only"]])
def test_a_known_set_is_held_to_it_too(data, run, monkeypatch, flags):
    from detectron2.data.datasets import register_coco_instances

    json_file, images = data("link.png")
    register_coco_instances("plain", {}, str(json_file), str(images))
    # Detectron2's own sets are not looked at before the run.
    monkeypatch.setattr("nonlocal_det.detection.checks._KNOWN", {"plain"})
    changes = {"DATASETS__REGISTER": [], "MODEL__ROI_HEADS__NUM_CLASSES": 1}
    code, lines = run(*flags, files=(json_file, images), name="plain", **changes)
    assert code == 2
    assert lines[-1].startswith(
        "error: DATASETS.ALLOW_OUTSIDE_IMAGE_ROOT is False: image 7 of plain leads out"
    )


def test_a_name_that_leads_the_results_out(data, run):
    files = data()
    for name in ("../../elsewhere", "/elsewhere", "..", "a\\b"):
        code, lines = run(files=files, name=name)
        assert code == 2
        assert f"{name!r} cannot be the name of the folder" in lines[-1]


def test_a_bomb_costs_its_sample_in_training_and_stops_an_evaluation(data, run, tmp_path, monkeypatch):
    files = data()
    # Which the look at the data before the run would find, if it came across it.
    monkeypatch.setattr("nonlocal_det.detection.checks.SAMPLED_PICTURES", 1)
    (files[1] / "7.png").write_bytes(png_that_claims(20_000, 20_000))
    code, _ = run(files=files, DATALOADER__MAX_BAD_FRACTION=0.2)
    assert code == 0
    log = (tmp_path / "out" / "log.txt").read_text()
    assert log.count("Training goes on without") == 1
    assert f"{files[1]}/7.png (id 7): ImageError: {files[1]}/7.png: too large" in log
    for workers in (0, 1):
        code, lines = run(files=files, DATALOADER__NUM_WORKERS=workers, SOLVER__MAX_ITER=12)
        assert code == 2
        assert len(lines) == 1
        assert "DATALOADER.MAX_BAD_FRACTION is 0.01: 1 of 8 images" in lines[0]
        code, lines = run("--eval-only", files=files, DATALOADER__NUM_WORKERS=workers)
        assert code == 2
        assert len(lines) == 1
        assert lines[0].startswith(f"error: {files[1]}/7.png: too large: ")
