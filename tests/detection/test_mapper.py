"""The check in front of a mapper, and the pixels behind it."""

from __future__ import annotations

import builtins
import os

import numpy as np
import pytest
from detectron2.data import DatasetMapper
from detectron2.data import detection_utils as utils
from image_cases import growth, write_png
from PIL import Image

from nonlocal_det.detection.mapper import PictureMapper
from nonlocal_det.errors import ImageError
from nonlocal_det.media.image import read_image


def detectron2_mapper(format: str = "BGR") -> DatasetMapper:
    return DatasetMapper(is_train=False, augmentations=[], image_format=format)


@pytest.fixture
def opened(monkeypatch) -> list[str]:
    """The files that are opened."""
    paths = []
    plain = builtins.open

    def count(file, *args, **kwargs):
        paths.append(os.fspath(file) if isinstance(file, str | os.PathLike) else "")
        return plain(file, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", count)
    return paths


@pytest.mark.parametrize("format", ["BGR", "RGB", "L"])
def test_the_pixels_are_those_of_detectron2(data_dir, opened, format):
    folder = data_dir / "images"
    files = [path for path in sorted(folder.iterdir()) if path.suffix in (".jpg", ".png", ".webp", ".gif")]
    compared = 0
    for path in files:
        try:
            expected = utils.read_image(str(path), format)
        except Exception:  # damaged
            continue
        opened.clear()
        sample = PictureMapper(detectron2_mapper(format))({"file_name": str(path), "image_id": 1})
        assert opened.count(str(path)) == 1
        assert sample["file_name"] == str(path)
        np.testing.assert_array_equal(sample["image"].numpy(), expected.transpose(2, 0, 1))
        compared += 1
    assert compared > 12


def test_other_readings_are_as_ever(tmp_path, opened):
    """A second one of the same file, one of another file, and one after the mapper."""
    for name, color in (("a.png", "red"), ("b.png", "blue")):
        Image.new("RGB", (4, 3), color).save(tmp_path / name)
    a, b = (str(tmp_path / name) for name in ("a.png", "b.png"))

    def mapper(image: dict) -> list[np.ndarray]:
        return [utils.read_image(path, "RGB") for path in (b, image["file_name"], image["file_name"])]

    opened.clear()
    pictures = PictureMapper(mapper)({"file_name": a})
    assert [opened.count(path) for path in (a, b)] == [2, 1]
    assert [tuple(picture[0, 0]) for picture in pictures] == [(0, 0, 255), (255, 0, 0), (255, 0, 0)]
    assert tuple(utils.read_image(a, "RGB")[0, 0]) == (255, 0, 0)


def test_a_bomb_is_refused_by_its_header(tmp_path):
    write_png(tmp_path / "bomb.png", 14_000, rows=14_000)
    write_png(tmp_path / "below.png", 6_000, rows=6_000)
    own = PictureMapper(lambda image: read_image(image["file_name"]))
    for mapper in (own, PictureMapper(detectron2_mapper())):
        error, bytes_more = growth(mapper, {"file_name": str(tmp_path / "bomb.png")})
        assert error.startswith(f"{tmp_path}/bomb.png: too large: ")
        assert "\n" not in error
        assert bytes_more < 32 * 2**20
        error, bytes_more = growth(mapper, {"file_name": str(tmp_path / "below.png")})  # decoded, and seen
        assert not error
        assert bytes_more > 3 * 6_000**2


def test_a_mapper_is_not_asked_for_a_picture_of_a_wrong_size(tmp_path):
    path = tmp_path / "large.png"
    write_png(path, 20_000, rows=1)
    asked = []
    mapper = PictureMapper(asked.append)
    with pytest.raises(ImageError) as raised:
        mapper({"file_name": str(path)})
    assert str(raised.value).startswith(f"{path}: too large: ")
    assert "\n" not in str(raised.value)
    assert not asked
    Image.new("RGB", (40, 30)).save(path)
    with pytest.raises(ImageError, match=r"large\.png: is 40 x 30, and its annotations say 40 x 40"):
        mapper({"file_name": str(path), "width": 40, "height": 40})
    assert not asked
    for size in ((40, 30), (30, 40)):  # a camera may have turned it
        mapper({"file_name": str(path), "width": size[0], "height": size[1]})
    mapper({"file_name": str(path)})
    assert len(asked) == 3
    asked.clear()
    mapper({"image_id": 3})  # of a mapper that makes its picture
    assert asked == [{"image_id": 3}]


def test_a_mapper_says_whether_the_picture_is_at_fault(tmp_path, data_dir):
    def fail(image: dict) -> None:
        raise KeyError("annotations")

    sound, cut = data_dir / "images" / "rgba.png", data_dir / "images" / "truncated.jpg"
    with pytest.raises(KeyError, match="annotations"):
        PictureMapper(fail)({"file_name": str(sound)})
    with pytest.raises(ImageError, match=r"truncated\.jpg: cannot be read"):
        PictureMapper(fail)({"file_name": str(cut)})


def test_a_damaged_picture_and_a_lack_of_memory(data_dir, monkeypatch):
    path = str(data_dir / "images" / "truncated.jpg")
    with pytest.raises(ImageError, match=r"^\S+truncated\.jpg: cannot be read: [^\n]*$"):
        PictureMapper(detectron2_mapper())({"file_name": path})

    def full(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(utils, "convert_PIL_to_numpy", full)
    with pytest.raises(MemoryError):  # may pass; another picture is no answer to it
        PictureMapper(detectron2_mapper())({"file_name": str(data_dir / "images" / "rgba.png")})
