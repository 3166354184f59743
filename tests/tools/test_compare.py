"""The comparison from end to end: trainings of two steps, and what the user gets."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
import time

import pytest
from PIL import Image

from nonlocal_det.detection.synthetic.squares import write_context
from nonlocal_det.experiments.runs import lock_folder
from nonlocal_det.tools.compare import main

PEOPLE = "Quick/mask_keypoint_rcnn_R_50_FPN_nl_people.yaml"
SMALL = {
    "MODEL.DEVICE": "cpu",
    "MODEL.FPN.OUT_CHANNELS": 16,
    "MODEL.ROI_BOX_HEAD.FC_DIM": 32,
    "MODEL.ROI_HEADS.SCORE_THRESH_TEST": 0.0,
    "INPUT.MIN_SIZE_TRAIN": (64,),
    "INPUT.MIN_SIZE_TEST": 64,
    "INPUT.MAX_SIZE_TEST": 64,
    "DATASETS.TRAIN": ("few_squares",),
    "DATASETS.TEST": ("few_squares",),
    "DATALOADER.NUM_WORKERS": 0,
    "SOLVER.IMS_PER_BATCH": 2,
    "SOLVER.MAX_ITER": 2,
    "SOLVER.STEPS": (),
}


@pytest.fixture(scope="module")
def squares(tmp_path_factory):
    folder = tmp_path_factory.mktemp("squares")
    write_context(folder, count=4, size=64, seed=0)
    return folder


@pytest.fixture
def arguments(squares):
    """A function: a command line that ends with the options of small runs."""

    def make(*flags, **changes):
        register = [["few_squares", str(squares / "annotations.json"), str(squares / "images")]]
        options = {**SMALL, "DATASETS.REGISTER": register}
        options |= {key.replace("__", "."): value for key, value in changes.items()}
        return [*map(str, flags), "--opts", *(str(word) for pair in options.items() for word in pair)]

    return make


def strict(path):
    def refuse(name):
        raise ValueError(name)

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def test_two_arms_and_one_that_fails(arguments, squares, tmp_path, capsys):
    output = tmp_path / "out"
    count = len(json.loads((squares / "annotations.json").read_text())["annotations"])
    config = "Quick/faster_rcnn_R_18_FPN_context.yaml"
    fails = ["--arm", f"wild:3={config}", "SOLVER.BASE_LR", "1e30", "SOLVER.WARMUP_ITERS", "0"]
    flags = ["--output", output, "--arms", "baseline", "nl", *fails, "--seeds", "3", "--parallel", "2"]
    assert main(arguments(*flags, "--threads", "1")) == 3

    results = strict(output / "results.json")
    assert [(run["arm"], run["seed"], run["finished"]) for run in results["runs"]] == [
        ("baseline", 3, True),
        ("nl", 3, True),
        ("wild", 3, False),
    ]
    wild = results["runs"][2]
    assert "SOLVER.SKIP_NONFINITE_STEPS" in wild["error"]
    # The counts are Fig. 2's: theta, phi and g from 256 to 128 channels, W_z back, with biases.
    base, block, other = (arm["cost"] for arm in results["arms"])
    assert block["parameters"] - base["parameters"] == 3 * (256 * 128 + 128) + 128 * 256 + 256
    assert other is None
    assert block["flops"] > base["flops"] > 1e8
    for run in results["runs"][:2]:
        assert 0 <= run["scores"]["bbox/AP"] <= 100
        assert sum(row["objects"] for row in run["probes"]["distance"]) == count

    table = (output / "table.md").read_text(encoding="utf-8")
    assert table in capsys.readouterr().out
    assert "| R18 baseline |" in table
    assert "| +1 NL - R18 baseline |" in table
    assert "0 of 1" in table
    assert wild["error"] in table
    assert f"nonlocal_det.tools.compare --output {output}" in table
    assert Image.open(output / "distance.png").format == "PNG"

    # Figures of an earlier set of arms would not belong to the table.
    (output / "nl" / "seed3" / "metrics.json").rename(tmp_path / "kept")
    assert main(arguments("--output", output, "--arms", "nl", "--seeds", "3")) == 0
    assert "no score in its metrics.json" in capsys.readouterr().out
    assert not (output / "curves.png").exists()
    (tmp_path / "kept").rename(output / "nl" / "seed3" / "metrics.json")

    # Again, without the arm that fails: nothing is run.
    before = (output / "nl" / "seed3" / "run.json").read_bytes()
    assert main(arguments("--output", output, "--arms", "baseline", "nl", "--seeds", "3")) == 0
    assert (output / "nl" / "seed3" / "run.json").read_bytes() == before
    out = capsys.readouterr().out
    assert "2 of them finished before" in out
    assert "wild" not in out

    # The same folder with other settings, and while somebody is at work in it.
    flags = ["--output", output, "--arms", "nl", "--seeds", "3"]
    assert main(arguments(*flags, SOLVER__MAX_ITER=3)) == 2
    assert one_line(capsys).startswith(
        f"{output}/nl/seed3 holds a run with SOLVER.MAX_ITER 2, which is 3 now;"
    )
    with lock_folder(output):
        assert main(arguments(*flags)) == 2
    assert f"--output {output}: process {os.getpid()} compares in this folder" in one_line(capsys)


def one_line(capsys) -> str:
    text = capsys.readouterr().err
    assert text.startswith("error: ")
    assert text.count("\n") == 1
    return text.removeprefix("error: ")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "required: --output"),
        (["--output", "OUT", "--task", "tables"], "--task: invalid choice: 'tables'"),
        (["--output", "OUT", "--arms", "nll"], "--arms nll: the task context has baseline, residual, nl"),
        (["--output", "OUT", "--arms", "nl", "nl"], "arm nl: named twice"),
        (["--output", "OUT", "--arm", "mine"], "--arm mine: write NAME=CONFIG"),
        (["--output", "OUT", "--arm", "mine=none.yaml"], "none.yaml"),
        (["--output", "OUT", "--seeds", "3-1"], "seeds '3-1': write numbers and ranges"),
        (["--output", "OUT", "--arms", "nl:x"], "seeds 'x': write numbers and ranges"),
        (
            ["--output", "OUT", "--curves", "nl_BN"],
            "--curves nl_BN: no such arm; it is one of baseline, residual",
        ),
        (["--output", "OUT", "--parallel", "0"], "'0' is not a whole number of at least 1"),
        (["--output", "OUT", "--num-gpus", "two"], "'two' is not a whole number of at least 1"),
        (["--output", "OUT", "--opts", "SOLVER.MAX_ITR", "2"], "SOLVER.MAX_ITR"),
        (["--output", "OUT", "--opts", "SOLVER.MAX_ITER"], "SOLVER.MAX_ITER"),
        (["--output", "OUT/file"], "OUT/file"),
        (["--output", ""], "--output: name a folder"),
        (
            ["--output", "OUT", "--opts", "SEED", "7"],
            "--opts sets SEED, which is each run's own; use --seeds",
        ),
        (
            ["--output", "OUT", "--arm", "mine=Quick/faster_rcnn_R_18_FPN_context.yaml", "SOLVER.MAX_ITER"],
            "--arm mine: overrides come as KEY VALUE pairs, but 'SOLVER.MAX_ITER' stands alone",
        ),
        (
            ["--output=OUT", "--arms", "nl", "--arm", f"mine={PEOPLE}"],
            "arm mine is evaluated on ('nonlocal_people_val',), and arm nl on ('nonlocal_context_val',)",
        ),
    ],
)
def test_wrong_arguments_are_one_line(flags, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "OUT").mkdir()
    (tmp_path / "OUT" / "file").touch()
    assert main(flags) == 2
    assert message in one_line(capsys)
    assert not list(tmp_path.rglob("run.json"))


def test_an_arm_that_cannot_be_built_is_refused_before_any_is_run(arguments, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = "Quick/faster_rcnn_R_18_FPN_context_nl.yaml"
    far = ["--arm", f"far={config}", "MODEL.NONLOCAL.RES4", "[9]"]
    flags = ["--output=~/out", "--seeds", "0", "--arms", "baseline", *far]
    assert main(arguments(*flags)) == 2
    assert one_line(capsys).startswith("arm far: MODEL.NONLOCAL.RES4 is [9]: ")
    assert not list(tmp_path.rglob("run.json"))
    # As if a build that knows more had finished it: then the cost is what cannot be counted.
    for name in ("baseline", "far"):
        (tmp_path / "out" / name / "seed0" / "run.json").write_text('{"exit_code": 0}')
    assert main(arguments(*flags)) == 0
    results = strict(tmp_path / "out" / "results.json")
    assert [arm["cost"] is None for arm in results["arms"]] == [False, True]
    err = capsys.readouterr().err
    assert err.startswith("warning: arm far: its parameters and FLOPs cannot be counted: MODEL.NONLOCAL.RES4")
    assert err.count("\n") == 1


def test_a_full_disk_is_one_line(arguments, tmp_path, capsys, monkeypatch):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "table.md").write_text("old")
    monkeypatch.setattr("os.fsync", full)
    for name in ("nl", "baseline"):  # marked as finished by hand, so that nothing is run
        folder = tmp_path / name / "seed0"
        folder.mkdir(parents=True)
        with (folder / "run.json").open("w") as file:
            file.write('{"exit_code": 0}')
    assert main(arguments("--output", tmp_path, "--arms", "nl", "baseline", "--seeds", "0")) == 2
    assert one_line(capsys).startswith(f"--output {tmp_path}: No space left on device; mend that")
    assert (tmp_path / "table.md").read_text() == "old"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_stopped_by_a_signal_and_gone_on(arguments, tmp_path, capsys):
    changes = {"SOLVER__MAX_ITER": 20, "SOLVER__CHECKPOINT_PERIOD": 1000}
    line = arguments("--output", tmp_path, "--arms", "nl", "baseline", "--seeds", "0", **changes)
    console = tmp_path / "nl" / "seed0" / "console.txt"

    def stop() -> None:
        deadline = time.monotonic() + 300
        while not (console.exists() and "Starting training from iteration 0" in console.read_text()):
            if time.monotonic() > deadline:
                return
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    assert main(line) == 75
    thread.join()
    assert "the same command goes on" in capsys.readouterr().err
    # There is a table, of what there is.
    assert "0 of 1" in (tmp_path / "table.md").read_text(encoding="utf-8")
    assert not (tmp_path / "baseline" / "seed0" / "run.json").exists()
    assert "killed" not in (tmp_path / "table.md").read_text(encoding="utf-8")

    assert main(line) == 0
    assert console.read_text().count("Starting training from iteration 0") == 1
    assert "Starting training from iteration" in console.read_text().rpartition("iteration 0")[2]
    results = strict(tmp_path / "results.json")
    assert [(run["arm"], run["finished"]) for run in results["runs"]] == [("nl", True), ("baseline", True)]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("task", "arm", "column"), [("table5", "R50_nl", "mask AP"), ("table6", "R101_nl_head", "keypoint AP")]
)
def test_a_table_of_the_paper_in_miniature(
    task, arm, column, small_options, mini_coco, tmp_path, monkeypatch
):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(mini_coco))
    options = small_options({"INPUT.MAX_SIZE_TEST": 96, "SOLVER.MAX_ITER": 2, "SOLVER.STEPS": ()})
    flags = ["--task", task, "--arms", arm, "--seeds", "0", "--output", tmp_path]
    assert main([*map(str, flags), "--opts", *map(str, options)]) == 0
    table = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert column in table
    assert "one image of 64x96" in table
