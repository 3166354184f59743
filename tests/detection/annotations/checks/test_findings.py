"""Each kind of fault is found, named by id, and nothing else is; mending; the real files."""

import copy
import json
import random
from pathlib import Path

import numpy as np
import pycocotools.mask as mask_util
import pytest
from detectron2.data.datasets import load_coco_json
from PIL import Image
from sound_file import COUNTS, POLYGON, sound

from nonlocal_det.detection.annotations.checked_file import CheckedFile
from nonlocal_det.detection.annotations.checks.findings import check_file
from nonlocal_det.detection.annotations.checks.table import ERROR, WARNING
from nonlocal_det.detection.annotations.coco_file import read_coco, read_document
from nonlocal_det.detection.annotations.fixes import MENDABLE, mend

SHARED = Path(__file__).parents[4] / "../shared/data"
needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="needs ../shared/data")
OTHER_SIZE = mask_util.encode(np.asfortranarray(np.ones((40, 30), np.uint8)))
OTHER_SIZE["counts"] = OTHER_SIZE["counts"].decode()


@pytest.fixture
def check(tmp_path):
    def run(document, **options):
        path = tmp_path / "file.json"
        path.write_text(json.dumps(document))
        findings = check_file(CheckedFile(read_coco(path), **{"masks": True, "keypoints": True, **options}))
        assert not any("\n" in str(finding) for finding in findings)
        return {finding.kind: finding for finding in findings}

    return run


def test_sound_file(check):
    assert check(sound()) == {}


def first(key, value):
    """Return a change of the first annotation; ``...`` takes the key out."""

    def change(document):
        if value is ...:
            del document["annotations"][0][key]
        else:
            document["annotations"][0][key] = value

    return change


def every(key, value):
    def change(document):
        for annotation in document["annotations"]:
            if value is ...:
                annotation.pop(key, None)
            else:
                annotation[key] = copy.deepcopy(value)

    return change


def section(name, place, key, value=...):
    def change(document):
        if value is ...:
            del document[name][place][key]
        else:
            document[name][place][key] = value

    return change


A1 = ("annotation 1",)
CASES = [
    # change, kind, severity, count, examples
    (first("bbox", ...), "missing_key", ERROR, 1, A1),
    (first("id", ...), "missing_key", ERROR, 1, ("annotation no. 0",)),
    (first("image_id", None), "missing_key", ERROR, 1, A1),
    (section("images", 0, "file_name"), "missing_key", ERROR, 1, ("image 1",)),
    (section("images", 0, "width"), "missing_key", ERROR, 1, ("image 1",)),
    (section("categories", 1, "name"), "missing_key", ERROR, 1, ("category 2",)),
    (first("id", "1"), "id_type", ERROR, 1, ("annotation '1'",)),
    (first("id", True), "id_type", ERROR, 1, ("annotation True",)),
    (first("id", 1.5), "id_type", ERROR, 1, ("annotation 1.5",)),
    (first("id", -1), "id_type", ERROR, 1, ("annotation -1",)),
    (first("id", 2**63), "id_type", ERROR, 1, (f"annotation {2**63}",)),
    (first("id", [1]), "id_type", ERROR, 1, ("annotation [1]",)),
    (first("category_id", "1"), "id_type", ERROR, 1, A1),
    (first("image_id", "2"), "id_type", ERROR, 1, A1),
    (section("categories", 1, "id", "2"), "id_type", ERROR, 1, ("category '2'",)),
    (every("image_id", 1.0), "float_id", WARNING, 4, ("annotation 1", "annotation 2", "annotation 3")),
    (section("images", 0, "id", 1.0), "float_id", WARNING, 1, ("image 1.0",)),
    (section("images", 0, "height", 0), "image_size_type", ERROR, 1, ("image 1",)),
    (section("images", 0, "width", "40"), "image_size_type", ERROR, 1, ("image 1",)),
    (section("images", 1, "file_name", 5), "file_name_type", ERROR, 1, ("image 2",)),
    (section("categories", 0, "name", 5), "category_name_type", ERROR, 1, ("category 1",)),
    (first("bbox", [1, 2, 3]), "box_type", ERROR, 1, A1),
    (first("bbox", [1, 2, 3, "4"]), "box_type", ERROR, 1, A1),
    (first("bbox", [1, 2, 3, float("nan")]), "box_type", ERROR, 1, A1),
    (first("bbox", [1, 2, 3, 10**400]), "box_type", ERROR, 1, A1),
    (first("bbox", {"x": 1}), "box_type", ERROR, 1, A1),
    (first("area", "80"), "area_type", ERROR, 1, A1),
    (first("area", -1), "area_type", ERROR, 1, A1),
    (first("area", float("inf")), "area_type", ERROR, 1, A1),
    (first("area", ...), "area_missing", WARNING, 1, A1),
    (first("area", None), "area_missing", WARNING, 1, A1),
    (first("iscrowd", 2), "iscrowd_value", ERROR, 1, A1),
    (first("iscrowd", "0"), "iscrowd_value", ERROR, 1, A1),
    (first("iscrowd", [0]), "iscrowd_value", ERROR, 1, A1),
    (first("iscrowd", False), "iscrowd_bool", WARNING, 1, A1),
    (first("iscrowd", ...), "iscrowd_missing", WARNING, 1, A1),
    (every("iscrowd", 1), "all_crowd", ERROR, 4, ("annotation 1", "annotation 2", "annotation 3")),
    (first("ignore", 1), "ignore", ERROR, 1, A1),
    (first("id", 2), "duplicate_annotation_id", ERROR, 1, ("annotation 2",)),
    (section("categories", 1, "name", "hazel"), "category_name_twice", WARNING, 1, ("category 'hazel'",)),
    (first("image_id", 9), "unknown_image", ERROR, 1, A1),
    (first("category_id", 9), "unknown_category", ERROR, 1, A1),
    (first("id", 0), "annotation_id_0", WARNING, 1, ("annotation 0",)),
    (every("category_id", 1), "unused_category", WARNING, 1, ("category 2 'walnut'",)),
    (first("bbox", [4, 4, 0, 8]), "box_size", ERROR, 1, A1),
    (first("bbox", [4, 4, 10, -8]), "box_size", ERROR, 1, A1),
    (first("bbox", [41, 4, 10, 8]), "box_off_image", ERROR, 1, A1),
    (first("bbox", [4, 24, 10, 8]), "box_outside", WARNING, 1, A1),
    (every("segmentation", ...), "no_mask", ERROR, 4, ("annotation 1", "annotation 2", "annotation 3")),
    (first("segmentation", [4, 4, 14, 4, 14, 12]), "broken_mask", ERROR, 1, A1),
    (first("segmentation", [[4, 4, 14, 4, 14, None]]), "broken_mask", ERROR, 1, A1),
    (first("segmentation", [[4, 4, 14, 4, 14, float("nan")]]), "broken_mask", ERROR, 1, A1),
    (first("segmentation", "mask.png"), "broken_mask", ERROR, 1, A1),
    (first("segmentation", {"counts": "x"}), "broken_mask", ERROR, 1, A1),
    (first("segmentation", {"size": [30, 40], "counts": [1, 2]}), "broken_mask", ERROR, 1, A1),
    (first("segmentation", OTHER_SIZE), "rle_size", ERROR, 1, A1),
    (first("segmentation", [[1, 1, 2, 2], *POLYGON]), "short_polygon", WARNING, 1, A1),
    (first("segmentation", [[1, 1, 2, 2, 3, 1, 4]]), "short_polygon", WARNING, 1, A1),
    (first("segmentation", []), "empty_segmentation", WARNING, 1, A1),
    (first("segmentation", {}), "empty_segmentation", WARNING, 1, A1),
    (first("segmentation", None), "mask_missing", WARNING, 1, A1),
    (first("segmentation", COUNTS), "uncompressed_rle", WARNING, 1, A1),
    (first("segmentation", [[-3, 4, 14, 4, 14, 12]]), "negative_coordinates", WARNING, 1, A1),
    (first("keypoints", [-3, 5, 2, 9, 9, 1]), "negative_coordinates", WARNING, 1, A1),
    (every("keypoints", ...), "no_keypoints", ERROR, 4, ("annotation 1", "annotation 2", "annotation 3")),
    (every("keypoints", [0] * 6), "no_keypoints", ERROR, 4, ("annotation 1", "annotation 2", "annotation 3")),
    (first("keypoints", [1, 2, 2]), "keypoint_length", ERROR, 1, A1),
    (first("keypoints", [1, 2, 2, 3, 4, "x"]), "keypoint_length", ERROR, 1, A1),
    (first("keypoints", []), "keypoints_missing", WARNING, 1, A1),
    (first("num_keypoints", ...), "num_keypoints_missing", WARNING, 1, A1),
]  # fmt: skip


@pytest.mark.parametrize(("change", "kind", "severity", "count", "examples"), CASES)
def test_each_kind_alone(check, change, kind, severity, count, examples):
    document = sound()
    change(document)
    findings = check(document)
    # A category may lose its only annotation, a keypoint file its numbers.
    also = {"unused_category", "mask_missing", "num_keypoints_missing"}
    assert set(findings) - also == {kind} - also
    finding = findings[kind]
    assert (finding.severity, finding.count, finding.examples) == (severity, count, examples)
    assert all((finding.what, finding.detectron2, finding.fix))
    assert finding.mended == (kind in MENDABLE)


def test_lists_of_images_and_categories(check):
    document = sound()
    document["images"].append({"id": 2, "file_name": "3.png", "width": 40, "height": 30})
    document["categories"].append({"id": 2, "name": "pecan"})
    findings = check(document)
    assert findings.keys() == {"duplicate_image_id", "duplicate_category_id"}
    assert findings["duplicate_image_id"].examples == ("image 2",)
    document = sound()
    document["categories"] = []
    assert {"no_categories", "unknown_category"} <= check(document).keys()


@pytest.mark.parametrize("ids", [(0, 1), (1, 3), (5, 9)])
def test_category_ids(check, ids):
    document = sound()
    for category, number in zip(document["categories"], ids, strict=True):
        category["id"] = number
    for annotation in document["annotations"]:
        annotation["category_id"] = ids[annotation["category_id"] - 1]
    finding = check(document)["category_ids"]
    assert finding.severity == WARNING
    assert ("start at 0" in finding.what) == (ids == (0, 1))


def test_no_annotation_is_no_error_in_a_file_to_test_on(check):
    document = sound()
    document["annotations"] = []
    assert check(document)["no_annotations"].severity == ERROR
    assert check(document, training=False)["no_annotations"].severity == WARNING
    del document["annotations"]
    assert check(document).keys() == {"no_annotations", "no_keypoints", "no_mask"} - {
        "no_keypoints",
        "no_mask",
    }
    document = sound()
    every("iscrowd", 1)(document)
    assert check(document, training=False)["all_crowd"].severity == WARNING
    for key, kind in (("segmentation", "no_mask"), ("keypoints", "no_keypoints")):
        document = sound()
        every(key, ...)(document)
        assert check(document)[kind].severity == ERROR
        assert check(document, training=False)[kind].severity == WARNING


def test_one_keypoint_categories_need_keypoints(check):
    document = sound()
    for category in document["categories"]:
        category["keypoints"] = []
    assert "one_keypoint_categories" not in check(document)
    every("keypoints", [1, 2, 2])(document)
    assert check(document)["one_keypoint_categories"].count == 2


def test_what_is_not_wanted_is_not_missed(check):
    document = sound()
    every("keypoints", ...)(document)
    every("segmentation", ...)(document)
    assert check(document, masks=False, keypoints=False) == {}


def test_boxes_that_look_like_corners_get_a_hint(check):
    document = sound()
    every("bbox", [20, 15, 35, 28])(document)
    assert "corners" in check(document)["box_outside"].fix


def test_less_than_a_pixel_outside_is_rounding(check):
    document = sound()
    document["annotations"][0]["bbox"] = [-0.6, 4, 41.2, 8]
    assert check(document) == {}


def test_against_another_file(check, tmp_path):
    other = sound()
    for category in other["categories"]:
        category["id"] += 4
    path = tmp_path / "other.json"

    def against(document):
        path.write_text(json.dumps(document))
        return check(sound(), other=read_coco(path))

    assert against(other) == {}
    other["categories"][0]["name"] = "pecan"
    finding = against(other)["classes_differ"]
    assert finding.severity == ERROR
    assert finding.examples == ("only here: 'hazel'", "only there: 'pecan'")
    other["categories"][0]["name"], other["categories"][1]["name"] = "walnut", "hazel"
    assert against(other)["classes_differ"].examples[0] == "'hazel' here is 'walnut' there"
    other = sound()
    other["categories"][0]["keypoints"] = ["end", "tip"]
    assert against(other).keys() == {"keypoints_differ"}


# --- Pictures -----------------------------------------------------------------------------------------------


@pytest.fixture
def pictures(tmp_path):
    folder = tmp_path / "images"
    folder.mkdir()
    for name in ("1.png", "2.png"):
        Image.fromarray(np.zeros((30, 40, 3), np.uint8)).save(folder / name)
    return folder


def test_pictures_that_fit(check, pictures):
    assert check(sound(), folder=pictures) == {}


def test_missing_and_other_pictures(check, pictures):
    (pictures / "2.png").unlink()
    Image.fromarray(np.zeros((40, 30), np.uint8)).save(pictures / "1.png")
    findings = check(sound(), folder=pictures)
    assert findings.keys() == {"missing_picture", "picture_size"}
    assert findings["missing_picture"].examples == ("image 2 2.png",)
    assert findings["picture_size"].examples == ("image 1 40 x 30, is 30 x 40",)
    assert check(sound(), folder=pictures / "absent")["missing_picture"].count == 2


def test_pictures_in_subfolders_and_with_odd_names(check, pictures):
    document = sound()
    (pictures / "größe 大").mkdir()
    (pictures / "1.png").rename(pictures / "größe 大" / "ü.png")
    document["images"][0]["file_name"] = "größe 大/ü.png"
    assert check(document, folder=pictures) == {}
    document["images"][1]["file_name"] = "a\0b.png"
    assert check(document, folder=pictures)["missing_picture"].count == 1


@pytest.mark.parametrize(("orientation", "fits"), [(1, True), (3, True), (6, False), (8, False)])
def test_exif_orientation_turns_the_picture(check, pictures, orientation, fits):
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(np.zeros((30, 40, 3), np.uint8)).save(pictures / "1.png", exif=exif)
    findings = check(sound(), folder=pictures)
    assert ("picture_size" not in findings) == fits
    if not fits:
        assert "is 30 x 40 by its EXIF orientation" in findings["picture_size"].examples[0]
        assert "upright" in findings["picture_size"].fix


@needs_shared
def test_damaged_pictures(check):
    document = sound()
    names = ["truncated.jpg", "broken.png", "zero_width.gif", "exif_orientation_6.jpg"]
    document["images"] = [
        {"id": i, "file_name": name, "width": 450, "height": 600} for i, name in enumerate(names, start=1)
    ]
    findings = check(document, folder=SHARED / "images")
    assert findings["unreadable_picture"].count == 3
    assert "missing_picture" not in findings


def test_pictures_that_training_can_do_without(check, pictures):
    document = sound()
    document["images"] = [
        {"id": i, "file_name": f"{i}.png", "width": 40, "height": 30} for i in range(1, 101)
    ]
    for i in range(3, 101):
        (pictures / f"{i}.png").write_bytes((pictures / "1.png").read_bytes())

    def severities(**options):
        found = check(document, folder=pictures, **{"max_bad_fraction": 0.02, **options})
        return {kind: finding.severity for kind, finding in found.items()}

    for number in (10, 30):
        (pictures / f"{number}.png").write_bytes(b"")
        (pictures / f"{number + 1}.png").unlink()
    assert severities() == {"missing_picture": WARNING, "unreadable_picture": WARNING}
    assert severities(max_bad_fraction=0.0) == severities()  # one or two may be chance
    assert severities(max_bad_fraction=None) == {"missing_picture": ERROR, "unreadable_picture": ERROR}
    finding = check(document, folder=pictures, max_bad_fraction=0.02)["unreadable_picture"]
    assert "training takes another in its place, up to DATALOADER.MAX_BAD_FRACTION 0.02" in finding.what
    assert "2 of 98" in finding.what
    (pictures / "50.png").write_bytes(b"")
    assert severities()["unreadable_picture"] == ERROR  # 3 of 98
    assert severities(max_bad_fraction=0.05)["unreadable_picture"] == WARNING
    assert severities(sample=10)["missing_picture"] == WARNING  # all are looked for, few are opened
    (pictures / "51.png").unlink()
    assert severities()["missing_picture"] == ERROR
    # Nothing is left to take in their places.
    for path in pictures.iterdir():
        path.unlink()
    assert severities(max_bad_fraction=1.0) == {"missing_picture": ERROR}


def test_pictures_are_sampled(check, pictures):
    (pictures / "1.png").write_bytes(b"")
    (pictures / "2.png").write_bytes(b"")
    assert check(sound(), folder=pictures, sample=1)["unreadable_picture"].count == 1


# --- Mending ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "kind"), [(change, kind) for change, kind, *_ in CASES if kind in MENDABLE]
)
def test_what_can_be_mended_is_gone_afterwards(check, change, kind):
    document = sound()
    change(document)
    assert kind in check(document)
    assert kind in mend(document)
    assert kind not in check(document)
    assert mend(document) == {}


def test_mending_leaves_a_sound_file_alone():
    document = sound()
    assert mend(document) == {}
    assert document == sound()


def test_what_mending_writes():
    document = sound()
    one, two, three, four = document["annotations"]
    one.update(iscrowd=True, id=0, bbox=[-5, 20, 20, 15])
    del one["area"]
    two["segmentation"] = copy.deepcopy(COUNTS)
    del two["area"]
    del three["segmentation"], three["area"]
    del four["keypoints"], four["num_keypoints"]
    document["categories"][1]["id"] = 7
    three["category_id"] = four["category_id"] = 7
    counts = mend(document)
    assert (one["iscrowd"], one["id"], one["bbox"]) == (1, 1, [0, 20, 15, 10])
    assert type(one["iscrowd"]) is int
    # Pixels, counted: the polygon covers x 4 to 14 and y 4 to 12.
    assert (one["area"], two["area"], three["area"]) == (80, 16, 80)
    mask = mask_util.decode(two["segmentation"])
    assert sorted(map(tuple, np.argwhere(mask))) == sorted((y, x) for x in (4, 5) for y in range(4, 12))
    assert (four["keypoints"], four["num_keypoints"]) == ([0] * 6, 0)
    assert [a["category_id"] for a in document["annotations"]] == [1, 1, 2, 2]
    assert [c["id"] for c in document["categories"]] == [1, 2]
    assert counts["area_missing"] == 3


@needs_shared
def test_mended_rle_is_the_same_mask():
    before = read_document(SHARED / "json/cvat_rle_all_crowd.json")
    after = copy.deepcopy(before)
    assert mend(after) == {"uncompressed_rle": 117}
    for old, new in zip(before["annotations"], after["annotations"], strict=True):
        flat = np.repeat(np.arange(len(old["segmentation"]["counts"])) % 2, old["segmentation"]["counts"])
        np.testing.assert_array_equal(mask_util.decode(new["segmentation"]).ravel(order="F"), flat)


# --- Real files ---------------------------------------------------------------------------------------------

VERDICTS = {
    "duplicate_and_orphan_ids": (
        # The file has more than its name says: an image of height 0, and an unknown category.
        {
            "duplicate_annotation_id",
            "duplicate_image_id",
            "unknown_image",
            "unknown_category",
            "image_size_type",
        },
        set(),
    ),
    "degenerate_boxes": ({"box_size"}, {"box_outside"}),
    "cvat_rle_all_crowd": ({"all_crowd"}, {"uncompressed_rle"}),
    "cvat_keypoints_no_annotations": ({"no_annotations", "one_keypoint_categories"}, set()),
    "keypoints_no_area_bool_crowd": (
        set(),
        {"area_missing", "iscrowd_bool", "negative_coordinates", "box_outside"},
    ),
    "roboflow_category_0": (set(), {"unused_category", "category_ids", "annotation_id_0"}),
    "empty_segmentation": (set(), {"empty_segmentation", "unused_category", "category_ids"}),
    "string_image_id": ({"id_type"}, set()),
}


@needs_shared
@pytest.mark.parametrize("name", VERDICTS)
def test_verdicts(name):
    findings = check_file(CheckedFile(read_coco(SHARED / f"json/{name}.json")))
    found = [{f.kind for f in findings if f.severity == severity} for severity in (ERROR, WARNING)]
    assert found == list(VERDICTS[name])


@needs_shared
def test_every_file_has_its_verdict():
    assert {path.stem for path in (SHARED / "json").glob("*.json")} == set(VERDICTS)


@needs_shared
def test_words_of_some_verdicts():
    def findings(name, **options):
        file = read_coco(SHARED / f"json/{name}.json")
        return {finding.kind: finding for finding in check_file(CheckedFile(file, **options))}

    assert findings("cvat_rle_all_crowd")["all_crowd"].count == 117
    assert findings("cvat_keypoints_no_annotations")["one_keypoint_categories"].count == 17
    assert "super-category" in findings("roboflow_category_0")["unused_category"].what
    assert "start at 0" in findings("roboflow_category_0")["category_ids"].what
    assert "13 of 14 annotations belong to no image" in findings("string_image_id")["id_type"].what
    for kind in ("no_mask", "empty_segmentation"):
        assert findings("empty_segmentation", masks=True)[kind].severity == ERROR


def test_an_empty_segmentation_is_an_error_where_no_mask_is_left(check):
    document = sound()
    every("segmentation", [])(document)
    findings = check(document)
    assert {kind: finding.severity for kind, finding in findings.items()} == {
        "empty_segmentation": ERROR,
        "no_mask": ERROR,
    }
    assert check(document, masks=False)["empty_segmentation"].severity == WARNING
    assert check(document, training=False)["empty_segmentation"].severity == WARNING


@needs_shared
@pytest.mark.parametrize(
    ("json_file", "images"),
    [
        ("nuclei/train.json", "nuclei/images"),
        ("nuclei/val.json", "nuclei/images"),
        ("coco/annotations/instances_train2017.json", "coco/train2017"),
        ("coco/annotations/person_keypoints_val2017.json", "coco/val2017"),
    ],
)
def test_good_files_are_clean(json_file, images):
    options = {"masks": True, "keypoints": "person" in json_file}
    assert check_file(CheckedFile(read_coco(SHARED / json_file), folder=SHARED / images, **options)) == []


@needs_shared
def test_detectron2_does_what_the_words_say():
    with pytest.raises(AssertionError, match="not unique"):
        load_coco_json(str(SHARED / "json/duplicate_and_orphan_ids.json"), "")
    records = load_coco_json(str(SHARED / "json/string_image_id.json"), "")
    assert sum(len(record["annotations"]) for record in records) == 1


# --- Odd input ----------------------------------------------------------------------------------------------

VALUES = [
    None,
    True,
    -1,
    0,
    10**400,
    2**70,
    1.5,
    float("nan"),
    "",
    "ü\n大",
    [],
    [[]],
    [1, "a"],
    {},
    {"a": {}},
]


def test_any_value_anywhere_is_a_finding_and_no_crash(check):
    rng = random.Random(0)
    for _ in range(300):
        document = sound()
        for _ in range(rng.randint(1, 3)):
            entries = document[rng.choice(list(document))]
            entry = rng.choice(entries)
            entry[rng.choice([*entry, "ignore", "supercategory", "skeleton"])] = copy.deepcopy(
                rng.choice(VALUES)
            )
        check(document)
        mend(document)
        check(document)
