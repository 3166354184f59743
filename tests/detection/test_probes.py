"""What is read from predictions: the class by distance, and the sides of the hands. All by hand."""

import json

import pytest

from nonlocal_det.detection.probes import by_distance, left_hands, probe, sides_by_distance

RED, BLUE = 1, 2
DISC = [20, 20, 28]


def square(number, x, category=RED, image=1):
    """A square of 20 x 20 pixels whose centre is x pixels right of the disc's centre."""
    return {
        "id": number,
        "image_id": image,
        "category_id": category,
        "iscrowd": 0,
        "bbox": [DISC[0] + x - 10, DISC[1] - 10, 20, 20],
        "area": 400,
        "disc": DISC,
        "distance": float(x),
    }


def detection(x, category, score, image=1, **more):
    box = {"bbox": [DISC[0] + x - 10, DISC[1] - 10, 20, 20], **more}
    return {"image_id": image, "category_id": category, "score": score, **box}


def truth_of(*squares):
    return {
        "images": [{"id": number, "width": 400, "height": 192} for number in (1, 2)],
        "categories": [{"id": RED, "name": "red"}, {"id": BLUE, "name": "blue"}],
        "annotations": list(squares),
    }


def test_class_and_ap_by_distance():
    # 60 px: found, right. 80 px belongs to the bin that it starts: not found. 130 and 150 px: one right, one
    # not. 200 px in another picture: two detections of it, the better of which is right.
    truth = truth_of(square(1, 60), square(2, 80), square(3, 130), square(4, 150), square(5, 200, BLUE, 2))
    results = [
        detection(60, RED, 0.9),
        detection(130, RED, 0.8),
        detection(150, BLUE, 0.7),
        detection(200, RED, 0.3, 2),
        detection(200, BLUE, 0.6, 2),
    ]
    near, middle, far, farthest = by_distance(truth, results, (40, 80, 120, 160))
    assert near == {"low": 40, "high": 80, "objects": 1, "found": 1, "right": 1, "AP": pytest.approx(100)}
    assert middle == {"low": 80, "high": 120, "objects": 1, "found": 0, "right": 0, "AP": 0}
    # Of the two red squares one is found as red: precision 1 at the recalls 0, 0.01, ..., 0.50.
    assert far == {
        "low": 120,
        "high": 160,
        "objects": 2,
        "found": 2,
        "right": 1,
        "AP": pytest.approx(100 * 51 / 101),
    }
    assert farthest == {
        "low": 160,
        "high": None,
        "objects": 1,
        "found": 1,
        "right": 1,
        "AP": pytest.approx(100),
    }
    bins = by_distance(truth, results)
    assert [(row["low"], row["high"], row["objects"]) for row in bins] == [
        (40, 80, 1),
        (80, 120, 1),
        (120, None, 3),
    ]


def test_false_detections_count_in_their_own_bin():
    truth = truth_of(square(1, 60), square(2, 140))
    # The best-scored one is a red square 100 px away, where nothing is, and one 150 px away.
    results = [detection(60, RED, 0.5), detection(140, RED, 0.5), detection(100, RED, 0.9)]
    assert [row["AP"] for row in by_distance(truth, results)] == pytest.approx([100, 100])
    results[2] = detection(155, RED, 0.9)
    # An IoU of 5 * 20 / 700 with the square: false. Precision is 1/2 wherever there is recall.
    near, far = by_distance(truth, results)
    assert (near["AP"], far["AP"]) == pytest.approx((100, 50))


def test_found_needs_an_iou_above_one_half():
    truth = truth_of({**square(1, 60), "bbox": [0, 0, 30, 20]})
    # 20 * 20 of 40 * 20 in common, which is exactly 1/2; then 21 * 20 of 39 * 20.
    exact, above = ({"image_id": 1, "category_id": RED, "score": 1, "bbox": [x, 0, 30, 20]} for x in (10, 9))
    assert by_distance(truth, [exact])[0]["found"] == 0
    assert by_distance(truth, [above])[0]["found"] == 1
    # The same place in another picture is another place.
    assert by_distance(truth, [{**above, "image_id": 2}])[0]["found"] == 0


def person(number, left, right, flags=(2, 2), image=1, box=(0, 0, 100, 100), **more):
    """A person with a nose at 50, 10 and wrists at the given points."""
    points = [50, 10, 2, *left, flags[0], *right, flags[1]]
    return {"id": number, "image_id": image, "category_id": 1, "bbox": list(box), "keypoints": points, **more}


def people_of(*persons):
    keypoints = ["nose", "left_wrist", "right_wrist"]
    return {"categories": [{"id": 1, "name": "person", "keypoints": keypoints}], "annotations": list(persons)}


def test_left_hands():
    truth = people_of(
        person(1, (10, 50), (90, 50)),
        person(2, (90, 50), (10, 50), image=2),
        person(3, (10, 50), (90, 50), image=3, flags=(2, 0)),  # a wrist out of the picture: not asked
        person(4, (10, 50), (90, 50), image=4),  # not found
        person(5, (10, 50), (90, 50), image=5),
    )
    results = [
        # Nearly right; exchanged; and of two detections the better one is right.
        person(0, (20, 60), (80, 40), score=0.9),
        person(0, (12, 50), (88, 50), score=0.9, image=2),
        person(0, (12, 50), (88, 50), score=0.9, image=3),
        person(0, (12, 50), (88, 50), score=0.9, image=4, box=(200, 0, 50, 50)),
        person(0, (88, 50), (12, 50), score=0.2, image=5),
        person(0, (12, 50), (88, 50), score=0.9, image=5),
    ]
    assert left_hands(truth, results) == {"objects": 4, "found": 3, "right": 2}
    # Both hands in one place are not told apart.
    tie = [person(0, (50, 50), (50, 50), score=0.9)]
    assert left_hands(truth, tie) == {"objects": 4, "found": 1, "right": 0}
    assert left_hands(truth, []) == {"objects": 4, "found": 0, "right": 0}


def body(number, head, feet, swap=False, ears=2, image=1):
    """A person with ears about ``head``, ankles about ``feet``, and, if its number is odd, knees between."""
    knees = (head[0], (head[1] + feet[1]) / 2)
    sign = -1 if swap else 1
    points = []
    for (x, y), width, flag in ((head, 5, ears), (knees, 10 * sign, 2 * (number % 2)), (feet, 10 * sign, 2)):
        points += [x + width, y, flag, x - width, y, flag]
    return {"id": number, "image_id": image, "category_id": 1, "bbox": [0, 0, 100, 200], "keypoints": points}


def test_sides_by_distance_to_the_head():
    names = [f"{side}_{part}" for part in ("ear", "knee", "ankle") for side in ("left", "right")]
    truth = {
        "categories": [{"id": 1, "name": "person", "keypoints": names}],
        "annotations": [
            body(1, (50, 10), (50, 110)),  # knees at 50, ankles at 100
            body(2, (50, 10), (50, 70), image=2),  # ankles at 60
            body(3, (50, 10), (50, 110), image=3),
            body(4, (50, 10), (50, 210), image=4),  # not found; ankles at 200
            body(5, (50, 10), (50, 110), image=5, ears=0),  # no ears: no distance
        ],
    }
    both_at_one_ankle = body(0, (50, 10), (50, 110), image=3)
    both_at_one_ankle["keypoints"][-3:] = both_at_one_ankle["keypoints"][-6:-3]
    results = [
        {**body(0, (50, 10), (50, 110)), "score": 0.9},
        {**body(0, (50, 10), (50, 70), image=2, swap=True), "score": 0.9},
        {**both_at_one_ankle, "score": 0.9},
        {**body(0, (50, 10), (50, 110), image=5), "score": 0.9},
    ]
    assert sides_by_distance(truth, results, (50, 60, 100)) == [
        {"low": 50.0, "high": 60.0, "objects": 2, "found": 2, "right": 2},
        {"low": 60.0, "high": 100.0, "objects": 1, "found": 1, "right": 0},
        {"low": 100.0, "high": None, "objects": 3, "found": 2, "right": 1},
    ]
    assert [(row["low"], row["objects"]) for row in sides_by_distance(truth, results)] == [
        (30.0, 2),
        (60.0, 1),
        (90.0, 3),
    ]
    assert sides_by_distance(people_of(person(1, (0, 0), (9, 9))), []) == []


def test_a_data_set_is_asked_what_it_can_tell(tmp_path):
    def probed(truth, results):
        for name, content in (("truth", truth), ("results", results)):
            (tmp_path / name).write_text(json.dumps(content))
        return probe(tmp_path / "truth", tmp_path / "results")

    squares, persons = truth_of(square(1, 60)), people_of(person(1, (0, 0), (9, 9), facing="toward"))
    assert set(probed(squares, [])) == {"distance"}
    assert set(probed(persons, [person(0, (0, 0), (9, 9), score=1.0)])) == {"left_hands"}
    walker = {"categories": [{"keypoints": ["left_ear", "right_ear", "left_hip", "right_hip"]}]}
    walker["annotations"] = [
        {"id": 1, "image_id": 1, "facing": "away", "bbox": [0, 0, 9, 9], "keypoints": [1, 1, 2] * 4}
    ]
    assert set(probed(walker, [])) == {"left_hands", "sides"}
    # A model without keypoints, annotations as COCO has them, and none.
    assert probed(persons, [{"image_id": 1, "bbox": [0, 0, 9, 9], "score": 1.0}]) == {}
    assert probed(people_of(person(1, (0, 0), (9, 9))), []) == {}
    assert probed({"images": []}, []) == {}
    for nameless in ([], [{"id": 1, "name": "person"}]):
        assert probed({**persons, "categories": nameless}, []) == {}
    assert probed({**persons, "annotations": [{"id": 1, "image_id": 1, "facing": "away"}]}, []) == {}
