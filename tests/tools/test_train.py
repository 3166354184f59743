from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.utils.cpp_extension

pytest.importorskip("detectron2")

from nonlocal_det.errors import UsageError
from nonlocal_det.tools import train
from nonlocal_det.tools.command import command
from nonlocal_det.tools.train import main

MASK = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x_nl.yaml"
ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.usefixtures("fresh_logging")


@pytest.fixture
def arguments(small_options, mini_coco):
    """A function: the command line of a small run, flags first."""

    def make(*flags: str, output, **changes) -> list[str]:
        options = {
            "DATASETS.TRAIN": ("mini_train",),
            "DATASETS.TEST": ("mini_val",),
            "SOLVER.MAX_ITER": 3,
            "SEED": 1,
            "OUTPUT_DIR": str(output),
            **{key.replace("__", "."): value for key, value in changes.items()},
        }
        return ["--config-file", MASK, *flags, *map(str, small_options(options))]

    return make


def metrics(output: Path) -> list[dict]:
    return [json.loads(line) for line in (output / "metrics.json").read_text().splitlines()]


def detections(output: Path, folder: str = "inference") -> list[dict]:
    return json.loads((output / folder / "coco_instances_results.json").read_text())


def test_train_evaluate_resume(arguments, tmp_path, capsys):
    output = tmp_path / "out"
    # --resume starts when there is nothing to resume
    changes = {"TEST__EVAL_PERIOD": 2, "SOLVER__CHECKPOINT_PERIOD": 2}
    assert main(arguments("--resume", output=output, **changes)) == 0
    text = capsys.readouterr().out
    assert "Starting training from iteration 0" in text
    assert text.count("Running on the CPU") == (not torch.cuda.is_available())
    assert "copypaste: Task: segm" in text
    files = {path.name for path in output.iterdir()}
    assert {"model_0000001.pth", "model_final.pth", "model_best.pth", "config.yaml", "log.txt"} <= files
    assert any(name.startswith("events.out.tfevents") for name in files)
    # The end of training counts as the iteration after the last.
    scores = {line["iteration"]: line for line in metrics(output) if "segm/AP" in line}
    assert set(scores) == {1, 3}
    last = scores[3]
    trained = detections(output)
    assert len(trained) == 5 * 5
    assert {"segmentation", "bbox", "score"} <= set(trained[0])

    # A checkpoint evaluates to what training found, without the training data.
    options = {"MODEL__WEIGHTS": output / "model_final.pth", "DATASETS__TRAIN": ("nobody_has_this",)}
    assert main(arguments("--eval-only", output=tmp_path / "eval", **options)) == 0
    assert detections(tmp_path / "eval") == trained
    text = capsys.readouterr().out
    assert "Starting training" not in text
    assert f"copypaste: {last['segm/AP']:.4f},{last['segm/AP50']:.4f}" in text

    # It goes on where it was, with the optimizer's state.
    assert main(arguments("--resume", output=output, SOLVER__MAX_ITER=5)) == 0
    text = capsys.readouterr().out
    assert "Starting training from iteration 3" in text
    assert "will overwrite" not in text
    assert [line["iteration"] for line in metrics(output) if "total_loss" in line] == [1, 2, 4]
    state = torch.load(output / "model_final.pth", weights_only=True)
    assert state["iteration"] == 4
    assert any("momentum_buffer" in x for x in state["trainer"]["_trainer"]["optimizer"]["state"].values())

    # Without --resume it starts again, and says what that does.
    assert main(arguments(output=output, SOLVER__MAX_ITER=1, DATASETS__TEST=())) == 0
    text = capsys.readouterr().out
    assert "Starting training from iteration 0" in text
    assert "will overwrite" in text


def test_a_finished_run_is_only_evaluated_again(arguments, tmp_path, capsys):
    changes = {"SOLVER__MAX_ITER": 1, "DATASETS__TEST": ("mini_val", "mini_train")}
    assert main(arguments(output=tmp_path, **changes)) == 0
    # With two data sets, each has its own results; the first decides which checkpoint is the best.
    assert (tmp_path / "model_best.pth").is_file()
    # It was saved after the last one, and is still not the one to resume from.
    assert (tmp_path / "last_checkpoint").read_text() == "model_final.pth"
    assert "mini_train/segm/AP" in metrics(tmp_path)[-1]
    images = [
        {found["image_id"] for found in detections(tmp_path, f"inference/mini_{x}")} for x in ("val", "train")
    ]
    assert [len(ids) for ids in images] == [5, 6]
    before = torch.load(tmp_path / "model_final.pth", weights_only=True)["model"]
    capsys.readouterr()
    assert main(arguments("--resume", output=tmp_path, **changes)) == 0
    after = torch.load(tmp_path / "model_final.pth", weights_only=True)["model"]
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert "copypaste: Task: segm" in capsys.readouterr().out


def test_resume_with_other_parameters(arguments, tmp_path, capsys):
    assert main(arguments(output=tmp_path, SOLVER__MAX_ITER=1, DATASETS__TEST=())) == 0
    capsys.readouterr()
    changes = {"MODEL__BACKBONE__FREEZE_AT": 2, "SOLVER__MAX_ITER": 2}
    assert main(arguments("--resume", output=tmp_path, **changes)) == 2
    assert "cannot be resumed with this config" in one_error_line(capsys)


def test_the_same_command_goes_on_after_a_signal(arguments, tmp_path, capsys):
    line = arguments("--resume", output=tmp_path, SOLVER__CHECKPOINT_PERIOD=1, DATASETS__TEST=())

    def interrupt() -> None:
        until = time.monotonic() + 100
        while not (tmp_path / "last_checkpoint").exists() and time.monotonic() < until:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=interrupt)
    thread.start()
    more = [*line, "SOLVER.MAX_ITER", "2000"]
    assert main(more) == 75
    thread.join()
    captured = capsys.readouterr()
    found = re.fullmatch(
        r"stopped by a signal after (\d+) of 2000 iterations and saved model_\d{7}\.pth; --resume goes on "
        r"from it\n",
        captured.err,
    )
    assert found, captured.err
    assert "Traceback" not in captured.out
    done = int(found[1])
    assert main([*line, "SOLVER.MAX_ITER", str(done + 1)]) == 0
    assert f"Starting training from iteration {done}\n" in capsys.readouterr().out


def test_a_damaged_image_costs_one_sample_or_the_run(arguments, mini_coco, tmp_path, capsys, monkeypatch):
    # The image is not among those that are opened before training.
    monkeypatch.setattr("nonlocal_det.detection.checks.SAMPLED_PICTURES", 0)
    content = json.loads((mini_coco / "coco" / "annotations" / "instances_train2017.json").read_text())
    (tmp_path / "images").mkdir()
    for number, image in enumerate(content["images"]):
        data = (mini_coco / "coco" / "train2017" / image["file_name"]).read_bytes()
        (tmp_path / "images" / image["file_name"]).write_bytes(data[:2000] if number == 1 else data)
    (tmp_path / "train.json").write_text(json.dumps(content))
    register = [["damaged_train", str(tmp_path / "train.json"), str(tmp_path / "images")]]
    damaged = tmp_path / "images" / content["images"][1]["file_name"]

    def run(fraction: float, output: str) -> int:
        changes = {
            "DATASETS__REGISTER": register,
            "DATASETS__TRAIN": ("damaged_train",),
            "DATASETS__TEST": (),
            "DATALOADER__MAX_BAD_FRACTION": fraction,
            "DATALOADER__NUM_WORKERS": 1,
            "SOLVER__MAX_ITER": 5,
        }
        return main(arguments(output=tmp_path / output, **changes))

    assert run(0.2, "good") == 0
    assert (
        f"Training goes on without {damaged} (id {content['images'][1]['id']}): " in capsys.readouterr().out
    )
    assert run(0.1, "bad") == 2
    line = one_error_line(capsys)
    assert "DATALOADER.MAX_BAD_FRACTION is 0.1: 1 of 6 images cannot be used" in line
    assert str(damaged) in line


def test_test_time_augmentation(arguments, tmp_path, capsys):
    changes = {"TEST__AUG__ENABLED": True, "TEST__AUG__MIN_SIZES": (48, 64), "SOLVER__MAX_ITER": 1}
    assert main(arguments(output=tmp_path / "out", **changes)) == 0
    line = metrics(tmp_path / "out")[-1]
    assert {"bbox/AP", "bbox_TTA/AP", "segm_TTA/AP"} <= set(line)
    trained = detections(tmp_path / "out", "inference_TTA")
    changes["MODEL__WEIGHTS"] = tmp_path / "out" / "model_final.pth"
    assert main(arguments("--eval-only", output=tmp_path / "eval", **changes)) == 0
    assert detections(tmp_path / "eval", "inference_TTA") == trained
    assert detections(tmp_path / "eval") != trained


def test_new_predictors_are_said_to_be_random_in_evaluation(arguments, tmp_path, capsys):
    from detectron2.modeling import build_model

    from nonlocal_det import get_config

    line = arguments(output=tmp_path, MODEL__ROI_HEADS__NUM_CLASSES=7)
    weights = build_model(get_config(MASK, line[2:])).state_dict()
    torch.save(weights, tmp_path / "seven.pth")
    capsys.readouterr()
    # MODEL.WEIGHTS empty (only training refuses a frozen new block), then weights for other classes
    frozen = {"MODEL__NONLOCAL__RES2": [-1], "MODEL__BACKBONE__FREEZE_AT": 2}
    assert main(arguments("--eval-only", output=tmp_path, **frozen)) == 0
    assert "MODEL.WEIGHTS is empty: this evaluates random weights" in capsys.readouterr().out
    assert main(arguments("--eval-only", output=tmp_path, MODEL__WEIGHTS=tmp_path / "seven.pth")) == 0
    assert "6 tensors hold random weights in this evaluation" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="starts processes on the CPU")
def test_two_processes_on_cpus(arguments, mini_coco, tmp_path):
    options = {
        "DATASETS__TRAIN": ("coco_2017_train",),
        "DATASETS__TEST": ("coco_2017_val",),
        "MODEL__NONLOCAL__NORM": "naiveSyncBN",
        "SOLVER__IMS_PER_BATCH": 8,
        "SOLVER__REFERENCE_WORLD_SIZE": 8,
        "SOLVER__MAX_ITER": 1,  # of 8 processes: 4 of these
    }
    done = subprocess.run(
        [
            sys.executable,
            ROOT / "train_net.py",
            *arguments("--num-gpus", "2", output=tmp_path / "out", **options),
        ],
        env={**os.environ, "DETECTRON2_DATASETS": str(mini_coco), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("Running on the CPU in 2 processes") == 1
    assert "batch_size=2" in done.stdout
    assert "max_iter=4" in done.stdout
    assert metrics(tmp_path / "out")[-1]["iteration"] == 4
    assert (tmp_path / "out" / "model_best.pth").is_file()
    # An odd number of images on two processes: each once, five detections in each.
    content = json.loads((mini_coco / "coco" / "annotations" / "instances_val2017.json").read_text())
    expected = sorted(image["id"] for image in content["images"] for _ in range(5))
    assert sorted(found["image_id"] for found in detections(tmp_path / "out")) == expected


def one_error_line(capsys) -> str:
    """The one line on stderr, which starts with "error: "."""
    captured = capsys.readouterr()
    lines = [line for line in captured.err.splitlines() if line.strip()]
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("error: ")
    assert "Traceback" not in captured.out
    return lines[0]


@pytest.mark.parametrize(
    ("flags", "changes", "message"),
    [
        (["--nonsense"], {}, "unrecognized arguments: --nonsense"),
        (["--num-gpus", "two"], {}, "--num-gpus: invalid int value"),
        (["--num-gpus", "0"], {}, "--num-gpus 0: must be 1 or more"),
        (["--config-file", "none.yaml"], {}, "config file none.yaml: no such file"),
        (["--config-file", ""], {}, "no config file"),
        (["--allow-missing", "["], {}, "--allow-missing '[': not a regular expression"),
        ([], {"MODEL__WEIGHTS": "none.pth"}, "weights none.pth: no such file"),
        ([], {"MODEL__NONE": 1}, "no such key: MODEL.NONE"),
        ([], {"SOLVER__MAX_ITER": "many"}, "SOLVER.MAX_ITER"),
        ([], {"MODEL__NONLOCAL__PAIRWISE": "cosine"}, "MODEL.NONLOCAL.PAIRWISE is 'cosine'"),
        ([], {"MODEL__NONLOCAL__RES4": "[9]"}, "MODEL.NONLOCAL.RES4 is [9]: 9 is outside the stage"),
        ([], {"DATASETS__TRAIN": ("none",)}, "DATASETS.TRAIN names 'none': not registered"),
        ([], {"SOLVER__AMP__ENABLED": True}, "SOLVER.AMP.ENABLED is True"),
        ([], {"OUTPUT_DIR": "/dev/null/out"}, "OUTPUT_DIR is '/dev/null/out': cannot be made"),
    ],
)
def test_wrong_input_is_one_line(arguments, tmp_path, capsys, flags, changes, message):
    assert main(arguments(*flags, **{"output": tmp_path, **changes})) == 2
    assert message in one_error_line(capsys)


def test_wrong_weights_are_one_line(arguments, tmp_path, capsys):
    (tmp_path / "text.pth").write_text("not a checkpoint")
    (tmp_path / "other.pkl").write_bytes(
        pickle.dumps({"model": {"a": torch.zeros(2).numpy()}, "__author__": "", "matching_heuristics": True})
    )
    for name, message in (("text.pth", "not a checkpoint, or damaged"), ("other.pkl", "tensors are missing")):
        for flags in ([], ["--eval-only"]):
            line = arguments(*flags, output=tmp_path / "out", MODEL__WEIGHTS=tmp_path / name)
            assert main(line) == 2
            assert message in one_error_line(capsys)
    # The same weights pass where they are meant.
    line = arguments(
        "--allow-missing",
        ".",
        output=tmp_path / "out",
        MODEL__WEIGHTS=tmp_path / "other.pkl",
        SOLVER__MAX_ITER=1,
    )
    assert main(line) == 0


def test_order_and_number_of_overrides(arguments, tmp_path, capsys):
    assert main([*arguments(output=tmp_path), "MODEL.MASK_ON"]) == 2
    assert "stands alone" in one_error_line(capsys)
    assert main([*arguments(output=tmp_path), "--eval-only"]) == 2
    assert "--eval-only must come before" in one_error_line(capsys)


def test_flags_are_detectron2s(monkeypatch):
    from detectron2.engine import default_argument_parser

    def flags(parser: argparse.ArgumentParser) -> dict:
        found = {action.dest: action for action in parser._actions if action.dest != "help"}
        return {
            name: (action.option_strings, action.default or None, action.type, action.nargs, type(action))
            for name, action in found.items()
        }

    def take(parser: argparse.ArgumentParser, argv: list) -> None:
        parsers.append(parser)
        raise UsageError("taken")

    parsers: list[argparse.ArgumentParser] = []
    monkeypatch.setattr(train, "parse", take)
    assert main([]) == 2
    ours, theirs = flags(parsers[0]), flags(default_argument_parser())
    assert ours.pop("allow_missing")[0] == ["--allow-missing"]
    # Detectron2's default is one port for all runs of a user.
    assert ours.pop("dist_url")[0] == theirs.pop("dist_url")[0]
    assert ours == theirs


def test_help(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    flags = "config-file resume eval-only num-gpus num-machines machine-rank dist-url allow-missing"
    assert set(flags.split()) <= set(re.findall(r"--([a-z-]+)", text))


class TestCommand:
    """The wrapper that every tool shares."""

    def run(self, error: BaseException | None) -> int:
        @command
        def tool() -> None:
            if error is not None:
                raise error

        return tool()

    def test_success(self):
        assert self.run(None) == 0

    def test_exit_code_of_the_tool(self):
        assert command(lambda: 3)() == 3
        assert self.run(SystemExit(1)) == 1
        assert self.run(SystemExit()) == 0

    @pytest.mark.parametrize(
        ("error", "line"),
        [
            (UsageError("--x 1: too small"), "error: --x 1: too small"),
            (
                FileNotFoundError(2, "No such file or directory", "a.json"),
                "error: a.json: No such file or directory",
            ),
            (ImportError("x", name="detectron2.config"), "error: x"),
        ],
    )
    def test_wrong_input(self, error, line, capsys):
        assert self.run(error) == 2
        assert one_error_line(capsys) == line

    def test_wrong_input_in_a_worker_process(self, capsys):
        message = (
            "Caught it in worker 0.\nTraceback (most recent call last):\n  File x\nFileNotFoundError: a.jpg"
        )
        assert self.run(FileNotFoundError(message)) == 2
        assert one_error_line(capsys) == "error: FileNotFoundError: a.jpg"

    def test_interrupted(self, capsys):
        assert self.run(KeyboardInterrupt()) == 130
        assert capsys.readouterr().err == "interrupted\n"

    @pytest.mark.parametrize("error", [ValueError("a fault"), ImportError("y", name="scipy")])
    def test_faults_keep_their_traceback(self, error):
        with pytest.raises(type(error)):
            self.run(error)
