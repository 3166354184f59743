"""Outcomes, tables and figures of runs that are written by hand."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from detectron2.data import DatasetCatalog, MetadataCatalog
from PIL import Image

from nonlocal_det import get_config
from nonlocal_det.experiments.arms import Arm
from nonlocal_det.experiments.figures import draw_curves, draw_distance
from nonlocal_det.experiments.outcomes import Cost, Outcome, collect
from nonlocal_det.experiments.runs import Run
from nonlocal_det.experiments.tables import Report

ARMS = (Arm("base", "Base", "b.yaml"), Arm("nl", "+1 NL", "n.yaml", (), ("base", "other")))


def outcome(arm, seed, ap, *, error="", seconds=100.0, right=None):
    probes = {}
    if right is not None:
        far = {"low": 120.0, "high": None, "objects": 30, "found": 20, "right": right, "AP": ap / 2}
        probes["distance"] = [
            {"low": 0.0, "high": 120.0, "objects": 10, "found": 10, "right": 10, "AP": ap},
            far,
        ]
    scores = {} if error else {"bbox/AP": ap, "bbox/AP50": ap + 10}
    return Outcome(arm, seed, not error, error, seconds, 0.1, 1, 1, scores, probes)


def report_of(*outcomes, arms=ARMS):
    return Report(arms, outcomes, {"base": Cost(1_500_000, 2_000_000_000, 64, 96)}, "compare --output x")


def config(*test_sets):
    """A config of a model with boxes and masks."""
    return get_config("COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x.yaml", ["DATASETS.TEST", test_sets])


def cells(text):
    """The cells of all lines of all tables."""
    return [
        [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        for line in text.splitlines()
        if line.startswith("|")
    ]


def test_tables_against_figures_by_hand():
    report = report_of(
        outcome("base", 0, 40.0, right=10, seconds=90),
        outcome("nl", 0, 41.0, right=20),
        outcome("base", 1, 50.0, right=15, seconds=110),
        outcome("nl", 1, 53.0, right=20),
    )
    rows = cells(report.markdown())
    assert rows[0] == ["", "box AP", "box AP50", "class right (%)", "runs", "seconds", "params (M)", "GFLOPs"]
    # (10 + 10) / 30 and (10 + 15) / 30 of the objects found are right.
    assert rows[2] == ["Base", "45.0 ± 7.1", "55.0 ± 7.1", "75.0 ± 11.8", "2", "100", "1.50", "2.00"]
    assert rows[3] == ["+1 NL", "47.0 ± 8.5", "57.0 ± 8.5", "100.0 ± 0.0", "2", "100", "-", "-"]
    # The differences are 1 and 3; t(0.975, 1) = 12.706, so the interval is 2 -+ 12.706 * sqrt(2) / sqrt(2).
    line = next(row for row in rows if row[0] == "+1 NL - Base")
    assert line[1] == "+2.0 [-10.7, +14.7]"
    assert line[-1] == "2"
    line = next(row for row in rows if row[0] == "Base" and "/" in row[1])
    assert line[1:] == ["100 / 45", "62 / 22"]
    assert ["Base", "1", "50.0", "60.0", "83.3", "110"] in rows


def test_failed_runs_are_in_the_table_and_out_of_the_means():
    report = report_of(
        outcome("base", 0, 40.0),
        outcome("nl", 0, 41.0),
        outcome("base", 1, 0.0, error="a | b"),
        outcome("nl", 1, 99.0),
    )
    rows = cells(report.markdown())
    assert rows[2][:4] == ["Base", "40.0", "50.0", "1 of 2"]
    assert ["Base", "1", "-", "-", "100", r"a \| b"] in rows
    # One pair has no interval.
    assert next(row for row in rows if row[0] == "+1 NL - Base")[1:] == ["+1.0", "1"]
    raw = json.loads(json.dumps(report.raw(), allow_nan=False))
    assert [run["error"] for run in raw["runs"]] == ["", "", "a | b", ""]
    assert raw["command"] == "compare --output x"
    assert {"torch", "detectron2", "processor"} <= set(raw["environment"])
    difference = next(one for one in raw["differences"] if one["figure"] == "bbox/AP")
    assert (difference["mean"], difference["low"], difference["seeds"]) == (1.0, None, [0])


def test_figures_of_fewer_runs_than_the_rest_say_so():
    report = report_of(
        *(
            outcome(arm, seed, ap, right=20)
            for arm, ap in (("base", 40.0), ("nl", 41.0))
            for seed in range(3)
        ),
    )
    report.outcomes[4].scores = {}  # of seed 1, as when its line was lost
    report.outcomes[4].error = "no score in its metrics.json"
    rows = cells(report.markdown())
    assert rows[3][:5] == ["+1 NL", "41.0 ± 0.0 (n = 2)", "51.0 ± 0.0 (n = 2)", "100.0 ± 0.0", "3"]
    line = next(row for row in rows if row[0] == "+1 NL - Base")
    assert line[1:] == ["+1.0 [+1.0, +1.0] (n = 2)", "+0.0 [+0.0, +0.0]", "3"]
    assert ["+1 NL", "1", "-", "-", "100.0", "100", "no score in its metrics.json"] in rows


def test_seconds_of_several_tries_are_out_of_the_mean():
    report = report_of(outcome("base", 0, 40.0, seconds=90), outcome("base", 1, 42.0, seconds=7))
    report.outcomes[1].tries = 2
    rows = cells(report.markdown())
    assert rows[2][1:5] == ["41.0 ± 1.4", "51.0 ± 1.4", "2", "90"]
    assert rows[-2:] == [["Base", "0", "40.0", "50.0", "90", "1"], ["Base", "1", "42.0", "52.0", "7", "2"]]


def test_multiply_adds_of_several_sizes():
    costs = {"base": Cost(1_500_000, 2_000_000_000, 64, 96)}
    text = Report(ARMS, [], costs).markdown()
    assert "multiply-adds of one image of 64x96 with" in text
    costs["nl"] = Cost(1_500_000, 2_000_000_000, 64, 128)
    assert "multiply-adds of one image of an arm's test size with" in Report(ARMS, [], costs).markdown()


def test_nothing_but_failures():
    rows = cells(report_of(outcome("base", 0, 0.0, error="x")).markdown())
    assert rows[2] == ["Base", "0 of 1", "-", "1.50", "2.00"]
    assert rows[3] == ["+1 NL", "0", "-", "-", "-"]


def test_outcome_from_a_folder(tmp_path):
    run = Run(ARMS[0], 0, tmp_path)
    cfg = config("one", "two")
    assert not collect(run, cfg).finished
    lines = [
        '{"iteration": 19, "total_loss": 3.0, "time": 0.5}',
        '{"iteration": 39, "total_loss": 9.0, "time": 0.7}',
        # Resumed from iteration 20: it logs 39 again, with a loss of its own.
        '{"iteration": 39, "total_loss": 2.0, "time": 0.6}',
        '{"iteration": 59, "total_loss": NaN}',
        '{"iteration": 60, "one/bbox/AP": 7.5, "one/bbox/APs": 1.0, "two/bbox/AP": 9.9, "one/segm/AP": NaN}',
        '{"iteration": 60, "one/bb',
    ]
    (tmp_path / "metrics.json").write_text("\n".join(lines))
    (tmp_path / "run.json").write_text('{"exit_code": 0, "seconds": 12.5, "tries": 2, "threads": 3}')
    found = collect(run, cfg)
    assert found.finished
    assert found.curve == [(19, 3.0), (39, 2.0)]
    assert found.scores == {"bbox/AP": 7.5}
    assert (found.seconds, found.seconds_per_iteration, found.threads) == (12.5, 0.55, 3)
    assert (found.tries, found.error) == (2, "")


def test_a_finished_run_whose_score_is_lost_says_so(tmp_path):
    run = Run(ARMS[0], 0, tmp_path)
    cfg = config("one")
    (tmp_path / "run.json").write_text('{"exit_code": 0}')
    assert collect(run, cfg).error == "no score in its metrics.json"
    # The last evaluation counts, even if it found nothing that could be scored.
    lines = ['{"iteration": 9, "bbox/AP": 50.0}', '{"iteration": 19, "bbox/AP": NaN}', "5", "[1]"]
    (tmp_path / "metrics.json").write_text("\n".join(lines))
    assert collect(run, cfg).scores == {}
    (tmp_path / "metrics.json").write_bytes(b'\xff\n{"iteration": 9, "bbox/AP": 50.0, "bbox/AP50": null}\n')
    found = collect(run, cfg)
    assert (found.scores, found.error) == ({"bbox/AP": 50.0}, "")


def test_probes_of_an_outcome_are_those_of_the_first_test_set(tmp_path):
    disc = {"disc": [10, 10, 5], "distance": 100.0}
    square = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [90, 0, 20, 20], "area": 400, "iscrowd": 0}
    truth = {
        "images": [{"id": 1, "width": 200, "height": 64}],
        "categories": [{"id": 1, "name": "red"}],
        "annotations": [{**square, **disc}],
    }
    (tmp_path / "truth.json").write_text(json.dumps(truth))
    folder = tmp_path / "inference" / "comparison_one"
    folder.mkdir(parents=True)
    results = [{"image_id": 1, "category_id": 1, "bbox": [90, 0, 20, 20], "score": 0.5}]
    (folder / "coco_instances_results.json").write_text(json.dumps(results))
    (tmp_path / "run.json").write_text('{"exit_code": 0}')
    MetadataCatalog.get("comparison_one").set(json_file=str(tmp_path / "truth.json"))
    try:
        cfg = config("comparison_one", "comparison_two")
        (row,) = collect(Run(ARMS[0], 0, tmp_path), cfg).probes["distance"]
        for damaged in (b"", b"[{", b"\xff", b'[{"a": 1}]', b"[5]", b"5"):
            (folder / "coco_instances_results.json").write_bytes(damaged)
            found = collect(Run(ARMS[0], 0, tmp_path), cfg)
            assert found.probes == {}
            assert found.error == f"{folder}/coco_instances_results.json is damaged"
    finally:
        MetadataCatalog.remove("comparison_one")
    assert (row["low"], row["objects"], row["right"]) == (80, 1, 1)
    assert "comparison_one" not in DatasetCatalog


def test_predictions_with_too_few_keypoints_are_damaged(tmp_path):
    names = ["nose", "left_wrist", "right_wrist"]
    person = {"image_id": 1, "category_id": 1, "bbox": [0, 0, 9, 9], "keypoints": [1, 1, 2] * 3}
    truth = {
        "images": [{"id": 1, "width": 9, "height": 9}],
        "categories": [{"id": 1, "name": "person", "keypoints": names}],
        "annotations": [{**person, "id": 1, "facing": "away"}],
    }
    (tmp_path / "truth.json").write_text(json.dumps(truth))
    (tmp_path / "run.json").write_text('{"exit_code": 0}')
    (tmp_path / "inference").mkdir()
    predictions = tmp_path / "inference" / "coco_instances_results.json"
    MetadataCatalog.get("comparison_one").set(json_file=str(tmp_path / "truth.json"))
    try:
        cfg = config("comparison_one")
        predictions.write_text(json.dumps([{**person, "score": 0.5}]))
        assert collect(Run(ARMS[0], 0, tmp_path), cfg).probes["left_hands"]["found"] == 1
        for keypoints in ([1, 1, 2], [1, 1], []):
            predictions.write_text(json.dumps([{**person, "score": 0.5, "keypoints": keypoints}]))
            found = collect(Run(ARMS[0], 0, tmp_path), cfg)
            assert (found.probes, found.error) == ({}, f"{predictions} is damaged")
    finally:
        MetadataCatalog.remove("comparison_one")


def colours(path):
    """The colours that are in a picture often."""
    pixels = np.asarray(Image.open(path).convert("RGB")).astype(int) @ (1 << 16, 1 << 8, 1)
    found, counts = np.unique(pixels, return_counts=True)
    return set(found[counts > 60])


GREY, ORANGE, BLUE = 0x595959, 0xE69F00, 0x0072B2


def test_figures_show_the_arms_in_colours_that_stay(tmp_path):
    labels = {"base": "Base", "residual": "+1 residual", "nl": "+1 NL"}
    outcomes = [
        outcome(arm, seed, 40.0 + 10 * seed, right=10 + 3 * seed) for arm in labels for seed in range(2)
    ]
    for one in outcomes:
        one.curve = [(19, 2.0), (39, 1.0 + one.seed)]
    assert draw_curves(tmp_path / "all.png", outcomes, labels)
    assert {GREY, ORANGE, BLUE} <= colours(tmp_path / "all.png")
    assert draw_curves(tmp_path / "two.png", outcomes, labels, ["nl", "base"])
    assert {GREY, BLUE} <= colours(tmp_path / "two.png")
    assert ORANGE not in colours(tmp_path / "two.png")
    assert draw_distance(tmp_path / "distance.png", outcomes, labels)
    assert {GREY, ORANGE, BLUE} <= colours(tmp_path / "distance.png")


def test_sides_by_distance_have_a_table_and_a_figure(tmp_path):
    outcomes = [outcome(arm, seed, 40.0) for arm in ("base", "nl") for seed in range(2)]
    for one in outcomes:
        right = {"base": 10, "nl": 38}[one.arm] + one.seed
        one.probes["sides"] = [
            {"low": 0.0, "high": 30.0, "objects": 60, "found": 50, "right": 45},
            {"low": 30.0, "high": None, "objects": 60, "found": 40, "right": right},
        ]
        one.probes["left_hands"] = {"objects": 8, "found": 4, "right": 1 + one.seed}
    rows = cells(report_of(*outcomes).markdown())
    head = rows.index(["sides right (%), by distance to the head in pixels", "0 to 30", "30+"])
    assert rows[head + 2 : head + 4] == [["Base", "90", "26"], ["+1 NL", "90", "96"]]
    assert rows[0][3] == "hands right (%)"
    assert rows[2][3] == "37.5 ± 17.7"
    labels = {"base": "Base", "residual": "+1 residual", "nl": "+1 NL"}
    assert draw_distance(tmp_path / "sides.png", outcomes, labels)
    assert {GREY, BLUE} <= colours(tmp_path / "sides.png")


def test_runs_that_ended_early_do_not_cut_the_mean(tmp_path):
    outcomes = [outcome("base", seed, 40.0) for seed in range(3)]
    for one in outcomes:
        one.curve = [(step, 2.0 + one.seed / 4) for step in range(19, 500, 20)]
    assert draw_curves(tmp_path / "whole.png", outcomes[:2], {"base": "Base"})
    outcomes[2].finished, outcomes[2].curve = False, [(19, 2.1), (39, 2.1)]
    assert draw_curves(tmp_path / "both.png", outcomes, {"base": "Base"})
    grey = [
        int((np.asarray(Image.open(tmp_path / name).convert("RGB")) == 0x59).all(-1).sum())
        for name in ("whole.png", "both.png")
    ]
    assert grey[1] == pytest.approx(grey[0], rel=0.05)


def test_nothing_to_draw_writes_nothing(tmp_path):
    failed = [outcome("base", 0, 0.0, error="x")]
    assert not draw_curves(tmp_path / "c.png", failed, {"base": "Base"})
    assert not draw_distance(tmp_path / "d.png", failed, {"base": "Base"})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("count", [1, 9])
def test_figures_of_any_number_of_arms_and_of_a_bin_without_a_find(tmp_path, count):
    labels = {f"arm{number}": f"Arm {number}" for number in range(count)}
    outcomes = [outcome(arm, 0, 40.0, right=10) for arm in labels]
    for one in outcomes:
        one.probes["distance"][1].update(found=0, right=0, AP=None)
    assert draw_distance(tmp_path / "d.png", outcomes, labels)
