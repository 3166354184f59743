from __future__ import annotations

import contextlib
import hashlib
import io
import json
import math
import subprocess
import sys

import cv2
import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from nonlocal_det.detection.synthetic.people import draw_people, main, write_people
from nonlocal_det.media.canvas import make_rng

COUNT, SIZE, SEED = 24, 256, 5
# COCO's order, written out so that the test does not take it from where the code takes it.
PAIRS = ("eye", "ear", "shoulder", "elbow", "wrist", "hip", "knee", "ankle")
KEYPOINTS = ["nose", *(f"{side}_{joint}" for joint in PAIRS for side in ("left", "right"))]
FACE = ("nose", "left_eye", "right_eye")
# Limbs and the torso's long axes as pairs of keypoints, without the side.
SEGMENTS = [("shoulder", "elbow"), ("elbow", "wrist"), ("hip", "knee"), ("knee", "ankle")]


def scene(index: int, size: int = SIZE, facing: int = 0):
    return draw_people(size, make_rng(SEED, index, 0), make_rng(SEED, index, 1 + facing))


def keypoints_of(annotation) -> dict[str, tuple[int, int, int]]:
    values = annotation["keypoints"]
    return {name: tuple(values[3 * i : 3 * i + 3]) for i, name in enumerate(KEYPOINTS)}


def mirrored(name: str) -> str:
    swap = {"left": "right", "right": "left"}
    side, _, joint = name.partition("_")
    return f"{swap[side]}_{joint}" if side in swap else name


def distance_to_segment(point, start, end) -> float:
    (px, py), (ax, ay), (bx, by) = point, start, end
    dx, dy = bx - ax, by - ay
    t = ((px - ax) * dx + (py - ay) * dy) / max(dx * dx + dy * dy, 1)
    t = min(max(t, 0.0), 1.0)
    return math.hypot(px - ax - t * dx, py - ay - t * dy)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    directory = tmp_path_factory.mktemp("people") / "set"
    write_people(directory, count=COUNT, size=SIZE, seed=SEED)
    return directory


@pytest.fixture(scope="module")
def coco(folder):
    with contextlib.redirect_stdout(io.StringIO()):
        return COCO(str(folder / "annotations.json"))


def annotations(coco) -> list[dict]:
    return coco.loadAnns(coco.getAnnIds())


def test_pixels_and_annotations_are_the_ones_that_were_published():
    # Caches and published figures rest on these pictures. Where they have to change, raise
    # drawing.DRAWING_VERSION, so that nobody mixes the old set and the new, and put the new values here.
    pixels, text = hashlib.sha256(), hashlib.sha256()
    for index in range(3):
        image, instances = scene(index)
        pixels.update(image.tobytes())
        text.update(json.dumps(instances, sort_keys=True).encode())
    assert pixels.hexdigest()[:16] == "bb4ec329c4bf5096"
    assert text.hexdigest()[:16] == "19fdd7884a2f2fd5"


def test_files_hold_the_drawn_pixels_and_a_smaller_set_is_the_beginning(folder, coco, tmp_path):
    write_people(tmp_path / "small", count=2, size=SIZE, seed=SEED)
    small = json.loads((tmp_path / "small" / "annotations.json").read_text())
    assert small["images"] == coco.loadImgs([1, 2])
    assert small["annotations"] == coco.loadAnns(coco.getAnnIds(imgIds=[1, 2]))
    for index, name in enumerate(("000001.png", "000002.png")):
        assert (tmp_path / "small" / "images" / name).read_bytes() == (folder / "images" / name).read_bytes()
        read = cv2.cvtColor(cv2.imread(str(folder / "images" / name)), cv2.COLOR_BGR2RGB)
        assert np.array_equal(read, scene(index)[0])


def test_seeds_and_sizes_give_other_pictures():
    assert not np.array_equal(scene(0)[0], scene(1)[0])
    image, instances = scene(0, size=128)
    assert image.shape == (128, 128, 3)
    assert instances


def test_category_has_cocos_names_and_skeleton(coco):
    (person,) = coco.loadCats(coco.getCatIds())
    assert (person["id"], person["name"]) == (1, "person")
    assert person["keypoints"] == KEYPOINTS
    assert [6, 8] in person["skeleton"]  # left shoulder to left elbow, counted from 1


def test_one_to_five_figures_of_different_sizes_that_overlap(coco):
    counts = [len(coco.getAnnIds(imgIds=[image])) for image in coco.getImgIds()]
    assert set(counts) <= {1, 2, 3, 4, 5}
    assert len(set(counts)) >= 4
    heights = [a["bbox"][3] for a in annotations(coco)]
    assert max(heights) > 2 * min(heights)
    overlapping = 0
    for image in coco.getImgIds():
        boxes = [a["bbox"] for a in coco.loadAnns(coco.getAnnIds(imgIds=[image]))]
        pairs = [(a, b) for i, a in enumerate(boxes) for b in boxes[:i]]
        overlapping += any(
            min(a[0] + a[2], b[0] + b[2]) > max(a[0], b[0])
            and min(a[1] + a[3], b[1] + b[3]) > max(a[1], b[1])
            for a, b in pairs
        )
    assert overlapping > COUNT // 3


def test_masks_are_disjoint_and_boxes_and_areas_theirs(coco):
    for image in coco.getImgIds():
        instances = coco.loadAnns(coco.getAnnIds(imgIds=[image]))
        masks = [coco.annToMask(a) for a in instances]
        assert np.sum(masks, axis=0).max() == 1
        for annotation, mask in zip(instances, masks, strict=True):
            rows, columns = np.nonzero(mask)
            x, y = columns.min(), rows.min()
            assert annotation["bbox"] == [x, y, columns.max() - x + 1, rows.max() - y + 1]
            assert annotation["area"] == mask.sum()
            assert annotation["iscrowd"] == 0


def test_figures_differ_from_what_is_behind_them():
    # A mask drawn in the wrong place would not follow the picture's edges.
    inside, across = [], []
    for index in range(6):
        image, instances = scene(index)
        grey = image.astype(int).sum(axis=2)
        with contextlib.redirect_stdout(io.StringIO()):
            coco = COCO()
        coco.imgs = {1: {"height": SIZE, "width": SIZE}}
        for annotation in instances:
            mask = coco.annToMask({**annotation, "image_id": 1}).astype(bool)
            steps = np.abs(np.diff(grey, axis=1))
            edge = mask[:, 1:] != mask[:, :-1]
            across.append(np.median(steps[edge]))
            inside.append(np.median(steps[mask[:, 1:] & mask[:, :-1]]))
    assert min(across) > 2 * max(np.median(inside), 1)


def test_visible_keypoints_lie_on_their_own_figure_and_hidden_ones_have_a_reason(coco):
    seen = dict.fromkeys((0, 1, 2), 0)
    covered = by_itself = 0
    for annotation in annotations(coco):
        mask = coco.annToMask(annotation)
        points = keypoints_of(annotation)
        whole = 0 not in annotation["keypoints"][2::3]
        reach = 0.13 * max(annotation["bbox"][2:])
        for name, (x, y, visibility) in points.items():
            seen[visibility] += 1
            if visibility == 0:
                assert (x, y) == (0, 0)
                continue
            assert 0 <= x < SIZE
            assert 0 <= y < SIZE
            if not mask[y, x]:  # something else is on top here
                covered += 1
                assert visibility == 1, name
            elif visibility == 1 and whole and not (name in FACE and annotation["facing"] == "away"):
                # Hidden by the figure itself: the head, the torso or a limb that does not end here is near.
                by_itself += 1
                joint = name.split("_")[-1]
                parts = [
                    (points[f"{side}_{a}"], points[f"{side}_{b}"])
                    for side in ("left", "right")
                    for a, b in [*SEGMENTS, ("shoulder", "hip")]
                    if not (name.startswith(side) and joint in (a, b))
                ]
                parts += [(points["left_ear"], points["right_ear"]), (points["nose"], points["nose"])]
                assert min(distance_to_segment((x, y), a[:2], b[:2]) for a, b in parts) < reach, name
        assert annotation["num_keypoints"] == sum(point[2] > 0 for point in points.values())
    assert all(count > 20 for count in seen.values())
    assert covered > 20
    assert by_itself > 5


def test_face_is_hidden_exactly_from_behind(coco):
    for annotation in annotations(coco):
        flags = [keypoints_of(annotation)[name][2] for name in FACE]
        if annotation["facing"] == "away":
            assert flags == [1, 1, 1]
        else:
            assert 2 in flags


def test_only_figures_at_the_border_have_keypoints_outside(coco):
    cut = [a for a in annotations(coco) if 0 in a["keypoints"][2::3]]
    assert cut
    for annotation in cut:
        x, y, width, height = annotation["bbox"]
        hidden = 1 in [keypoints_of(annotation)[name][2] for name in KEYPOINTS if name not in FACE]
        assert x == 0 or y == 0 or x + width == SIZE or y + height == SIZE or hidden


def test_only_the_head_tells_which_way_a_figure_faces():
    turned = 0
    for index in range(COUNT):
        image, instances = scene(index)
        other_image, other_instances = scene(index, facing=1)
        changed = np.any(image != other_image, axis=2)
        for first, second in zip(instances, other_instances, strict=True):
            for key in ("bbox", "area", "segmentation", "num_keypoints"):
                assert first[key] == second[key]
            points, others = keypoints_of(first), keypoints_of(second)
            swapped = first["facing"] != second["facing"]
            for name in KEYPOINTS:
                before, after = points[name], others[mirrored(name) if swapped else name]
                assert before[:2] == after[:2]
                assert before == after or (swapped and name in FACE)
            if swapped:
                turned += 1
                left, right = points["left_ear"], points["right_ear"]
                radius = 0.75 * math.hypot(left[0] - right[0], left[1] - right[1]) + 2
                centre = ((left[0] + right[0]) // 2, (left[1] + right[1]) // 2)
                head = np.zeros((SIZE, SIZE), np.uint8)
                cv2.circle(head, centre, round(radius), 1, cv2.FILLED)
                assert (changed & (head == 1)).sum() > 15
                changed &= head == 0
        assert not changed.any()
    assert turned > COUNT // 2


def test_side_follows_from_the_way_that_a_figure_faces(coco):
    for annotation in annotations(coco):
        points = keypoints_of(annotation)
        left, right = points["left_ear"], points["right_ear"]
        if left[2] and right[2]:  # both in the picture
            assert (left[0] > right[0]) == (annotation["facing"] == "toward")
    toward = [a["facing"] == "toward" for a in annotations(coco)]
    assert 0.3 < np.mean(toward) < 0.7


def test_the_truth_scores_full_marks_in_cocos_evaluation(coco):
    results = [
        {**{key: a[key] for key in ("image_id", "category_id", "bbox", "keypoints")}, "score": 1.0}
        | {"segmentation": coco.annToRLE(a)}
        for a in annotations(coco)
    ]
    for result in results:
        result["segmentation"]["counts"] = result["segmentation"]["counts"].decode()
    for kind in ("bbox", "segm", "keypoints"):
        # loadRes copies a result's box over its mask's where both are given: one kind at a time.
        extra = {"bbox": ["bbox"], "segm": ["segmentation"], "keypoints": ["keypoints"]}[kind]
        chosen = [{key: r[key] for key in ["image_id", "category_id", "score", *extra]} for r in results]
        with contextlib.redirect_stdout(io.StringIO()):
            evaluation = COCOeval(coco, coco.loadRes(chosen), kind)
            evaluation.evaluate()
            evaluation.accumulate()
            evaluation.summarize()
        assert evaluation.stats[0] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": 0}, "count is 0"),
        ({"size": 127}, "size is 127"),
        ({"size": 5000}, "5000"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_numbers_out_of_range_are_refused(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        write_people(tmp_path / "set", **{"count": 1, "size": 128, "seed": 0, **change})
    assert not (tmp_path / "set").exists()


def test_command_writes_the_set_that_was_asked_for(tmp_path, capsys):
    assert main(["--output", str(tmp_path / "set"), "--count", "2", "--size", "160", "--seed", "9"]) == 0
    document = json.loads((tmp_path / "set" / "annotations.json").read_text())
    assert [(i["width"], i["height"]) for i in document["images"]] == [(160, 160)] * 2
    read = cv2.imread(str(tmp_path / "set" / "images" / "000002.png"))[..., ::-1]
    assert np.array_equal(read, draw_people(160, make_rng(9, 1, 0), make_rng(9, 1, 1))[0])
    captured = capsys.readouterr()
    assert captured.out == f"wrote 2 pictures to {tmp_path / 'set'}\n"
    assert "2/2" in captured.err  # the progress bar


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--count", "-1"], "--count is -1"),
        (["--count", "many"], "--count"),
        (["--size", "32"], "--size is 32"),
        (["--seed", "-3"], "--seed is -3"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_command_refuses_wrong_input_in_one_line(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        main(["--output", str(tmp_path / "set"), *arguments])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (tmp_path / "set").exists()


def test_command_does_not_write_over_what_is_there(tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("full", "file", "file/below"):
        with pytest.raises(SystemExit) as stop:
            main(["--output", str(tmp_path / name), "--count", "1"])
        assert stop.value.code == 2
        error = capsys.readouterr().err
        assert name in error
        assert error.count("\n") == 1
    (tmp_path / "empty").mkdir()
    assert main(["--output", str(tmp_path / "empty"), "--count", "1", "--size", "128"]) == 0


def test_command_runs_as_a_module(tmp_path):
    command = [
        sys.executable,
        "-m",
        "nonlocal_det.detection.synthetic.people",
        "--output",
        str(tmp_path / "set"),
        "--count",
        "1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "RuntimeWarning" not in done.stderr
    assert (tmp_path / "set" / "annotations.json").exists()
