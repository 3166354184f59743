"""Labels in other formats are recognised, and a converter is named."""

import json

import pytest

from nonlocal_det.detection.annotations.coco_file import read_coco
from nonlocal_det.detection.annotations.formats import recognise_path
from nonlocal_det.errors import DatasetError

VOC = "<annotation><filename>a.jpg</filename><object><name>cat</name></object></annotation>"
CVAT = '<?xml version="1.0" encoding="utf-8"?>\n<annotations><version>1.1</version></annotations>'
LABELME = {"version": "5.4.1", "shapes": [{"label": "cat", "points": [[1, 2], [3, 4]]}], "imagePath": "a.jpg"}
YOLO_BOXES = "0 0.5 0.5 0.2 0.3\n12 0.25 1 0.1 1e-2\n"
YOLO_POLYGONS = "1 0.1 0.1 0.3 0.1 0.3 0.4\n"


def message(path):
    with pytest.raises(DatasetError) as caught:
        read_coco(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "parts"),
    [
        ("a.xml", VOC, ["Pascal VOC", "from_pascal_voc", "supervision"]),
        ("a.xml", CVAT, ["CVAT", "coco convert"]),
        ("a.txt", YOLO_BOXES, ["YOLO", "from_yolo"]),
        ("a.txt", YOLO_POLYGONS, ["YOLO"]),
        ("data.yaml", "train: images\nnames: [cat]\n", ["YOLO"]),
        ("a.json", json.dumps(LABELME), ["LabelMe", "from_labelme"]),
        ("a.json", json.dumps([{"image": "a.jpg", "annotations": []}]), ["CreateML"]),
        ("a.json", json.dumps([{"data": {"image": "a.jpg"}, "annotations": []}]), ["Label Studio"]),
        ("a.json", json.dumps({"_via_img_metadata": {}}), ["VGG Image Annotator"]),
        ("a.json", json.dumps({"a.jpg1": {"filename": "a.jpg", "regions": []}}), ["VGG Image Annotator"]),
        ("a.json", json.dumps([{"image_id": 1, "category_id": 1, "score": 0.5}]), ["result format"]),
        ("a.json", json.dumps([{"image_id": 1, "score": 0.5}]), ["result format"]),
        (
            "a.json",
            json.dumps(
                {"images": [], "categories": [], "annotations": [{"image_id": 1, "segments_info": []}]}
            ),
            ["panoptic"],
        ),
    ],
)
def test_file(tmp_path, name, content, parts):
    path = tmp_path / name
    path.write_text(content)
    for part in parts:
        assert part in message(path)


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [("a.xml", VOC, "Pascal VOC"), ("a.txt", YOLO_BOXES, "YOLO"), ("a.json", json.dumps(LABELME), "LabelMe")],
)
@pytest.mark.parametrize("folder", ["", "train/labels"])
def test_folder(tmp_path, name, content, part, folder):
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    (tmp_path / folder / name).write_text(content)
    (tmp_path / "image.jpg").write_bytes(b"\xff\xd8")
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    assert part in message(tmp_path)


def test_what_is_not_known(tmp_path):
    (tmp_path / "readme.txt").write_text("Nuts, 2026.\n")
    assert recognise_path(tmp_path) is None
    assert "a folder" in message(tmp_path)
    assert recognise_path(tmp_path / "readme.txt") is None
    assert recognise_path(tmp_path / "absent.xml") is None


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("", "the file is empty"),
        (" \n", "the file is empty"),
        ("{}", '"images"'),
        ("[]", "it is a list"),
        ("3", "it is a number"),
        ("null", "it is null"),
        ('"COCO"', "it is text"),
        ('{"images": [', "line 1, column 13"),
        ('{"images": []}', '"annotations"'),
        ('{"images": {}, "categories": [], "annotations": []}', '"images" is an object'),
        ('{"images": [], "categories": [], "annotations": null}', '"annotations" is null'),
        ('{"images": [], "categories": [], "annotations": [7]}', 'entry 0 of "annotations" is a number'),
        ('{"images": [{}, []], "categories": []}', 'entry 1 of "images" is a list'),
        ('{"images": [{"image_id": 1, "category_id": 2}], "categories": []}', "is an annotation"),
        ("[" * 100_000, "nested too deeply"),
        ('{"images": [' + "9" * 5000 + '], "categories": []}', "not usable JSON"),
    ],
)
def test_what_is_no_coco_file_at_all(tmp_path, content, part):
    path = tmp_path / "a.json"
    path.write_text(content)
    assert part in message(path)


def test_what_is_no_text(tmp_path):
    path = tmp_path / "a.json"
    assert "no such file" in message(path)
    path.write_bytes(b"\x89PNG\r\n\x1a\n\xff\xfe")
    assert "not a text file" in message(path)
    path.write_text('\ufeff{"images": [], "categories": []}')  # a byte order mark, as Windows tools write it
    assert read_coco(path).annotations == []
