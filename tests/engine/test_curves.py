"""The curves of a run: which values count, and that there is a picture of them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

pytest.importorskip("detectron2")

from detectron2.utils.events import CommonMetricPrinter, EventStorage
from PIL import Image

from nonlocal_det.engine.curves import draw_curves, read_metrics
from nonlocal_det.engine.hooks import CurveDrawer
from nonlocal_det.engine.printer import TrainingPrinter


@pytest.fixture
def metrics(tmp_path):
    """A function that writes metrics.json, from dicts and text."""

    def write(*lines):
        path = tmp_path / "metrics.json"
        path.write_text("".join(x if isinstance(x, str) else json.dumps(x) + "\n" for x in lines))
        return path

    return write


def line(iteration: int, loss: float, **more) -> dict:
    return {"iteration": iteration, "total_loss": loss, **{k.replace("__", "/"): v for k, v in more.items()}}


def test_later_values_win(metrics):
    path = metrics(
        line(19, 4.0),
        line(39, 3.0, segm__AP=10.0),
        line(59, 2.0),
        line(79, 1.5, segm__AP=20.0),
        # Killed after 80 iterations, and resumed from 40, whose evaluation is made up for.
        {"iteration": 39, "segm/AP": 11.0},
        line(59, 2.5),
        line(79, 1.7, segm__AP=21.0),
        {"iteration": 80, "segm/AP": 22.0},
    )
    assert read_metrics(path) == {
        "total_loss": {19: 4.0, 39: 3.0, 59: 2.5, 79: 1.7},
        "segm/AP": {39: 11.0, 79: 21.0, 80: 22.0},
    }


def test_what_an_earlier_run_did_beyond_is_left_out(metrics):
    path = metrics(
        line(19, 4.0), line(39, 3.0, segm__AP=10.0), {"iteration": 40, "segm/AP": 12.0}, line(19, 5.0)
    )
    assert read_metrics(path) == {"total_loss": {19: 5.0}}


def test_lines_that_are_no_use(metrics):
    path = metrics(
        line(19, 4.0), '{"iteration": 39, "total_lo{"iteration": 39}\n', "[]\n", '{"total_loss": 1}\n', "\n"
    )
    assert read_metrics(path) == {"total_loss": {19: 4.0}}
    assert read_metrics(metrics()) == {}


def test_a_whole_line_behind_half_a_line(metrics):
    # A full disk or a power cut ends a line early, and what goes on appends to it.
    path = metrics(line(19, 4.0), '{"iteration": 39, "total_l{"iteration": 40, "segm/AP": 12.0}\n')
    with path.open("ab") as file:
        file.write(b'\xff\xfe{"iteration": 41, "segm/AP": 13.0}\n')
    assert read_metrics(path) == {"total_loss": {19: 4.0}, "segm/AP": {40: 12.0, 41: 13.0}}


def colours(path) -> set[tuple[int, int, int]]:
    pixels = np.asarray(Image.open(path).convert("RGB")).reshape(-1, 3)
    return {tuple(colour) for colour in np.unique(pixels, axis=0).tolist()}


BLUE, ORANGE = (0, 114, 178), (213, 94, 0)


def test_a_picture(metrics, tmp_path):
    rows = [line(i, 3.0 / i, loss_cls=1.0 / i, loss_mask=math.inf) for i in range(20, 400, 20)]
    target = tmp_path / "curves.png"
    draw_curves(metrics(*rows), target)
    assert BLUE in colours(target)
    assert ORANGE not in colours(target)  # no validation, and no score
    for row in rows[4::5]:
        row.update({"val/total_loss": 2.0, "val/loss_cls": 0.5, "segm/AP": math.nan})
    draw_curves(metrics(*rows), target)
    assert {BLUE, ORANGE} <= colours(target)
    assert min(Image.open(target).size) > 500


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [line(0, 1.0)],
        [line(0, math.nan)],
        [{"iteration": 3, "a/segm/AP": 0.0, "b/keypoints/AP": 7.0, "a/segm_TTA/AP": 1.0}],
        [line(i, 1.0, **{f"loss_{j}": float(i) for j in range(7)}) for i in range(5)],
    ],
)
def test_any_run_can_be_drawn(metrics, tmp_path, rows, recwarn):
    draw_curves(metrics(*rows), tmp_path / "curves.png")
    assert len(colours(tmp_path / "curves.png")) > 2
    assert not recwarn.list


class Finished:
    failed, iter, max_iter = False, 7, 7


def test_a_drawing_that_fails_is_a_warning(metrics, tmp_path, caplog):
    metrics(line(19, 4.0))
    hook = CurveDrawer(str(tmp_path))
    hook.trainer = Finished()
    hook.after_train()
    assert (tmp_path / "curves.png").is_file()
    (tmp_path / "curves.png").unlink()
    (tmp_path / "curves.png").mkdir()
    hook.after_train()
    (tmp_path / "metrics.json").unlink()
    hook.after_train()
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert all("curves.png cannot be drawn" in record.getMessage() for record in caplog.records)
    assert "\n" not in caplog.records[0].getMessage()


def test_a_run_that_goes_on_another_time_is_not_drawn(metrics, tmp_path):
    metrics(line(19, 4.0))
    hook = CurveDrawer(str(tmp_path))
    for changes in ({"failed": True}, {"iter": 6}):
        hook.trainer = type("Stopped", (Finished,), changes)()
        hook.after_train()
    assert not (tmp_path / "curves.png").exists()


def test_the_log_line_has_what_detectron2s_has_and_the_epoch(caplog):
    caplog.set_level("INFO")
    with EventStorage() as storage:
        printers = [TrainingPrinter(100), CommonMetricPrinter(100)]
        for iteration in range(5):
            storage.iter = iteration
            storage.put_scalars(total_loss=3.0 - iteration, loss_cls=1.0, time=0.5, data_time=0.1)
            storage.put_scalar("lr", 0.02, smoothing_hint=False)
            storage.put_scalar("epoch", (iteration + 1) / 4, smoothing_hint=False)
        for printer in printers:
            printer.write()
        ours, theirs = (record.getMessage() for record in caplog.records)
        assert "epoch: 1.25" in ours
        assert [part for part in ours.split() if part not in ("epoch:", "1.25")] == theirs.split()
        # Nothing new of training: nothing to say. What an evaluation has found is not repeated.
        printers[0].write()
        storage.put_scalar("val/total_loss", 7.0, smoothing_hint=False)
        printers[0].write()
        assert len(caplog.records) == 2
        storage.iter = 5
        storage.put_scalars(total_loss=1.0)
        printers[0].write()
        assert "val/" not in caplog.records[2].getMessage()
