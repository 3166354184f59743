"""Runs one by one and at a time, with small commands in the place of the training command."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from detectron2.config import CfgNode

from nonlocal_det.errors import ArmError, ExitCode
from nonlocal_det.experiments.arms import Arm
from nonlocal_det.experiments.runs import Run, RunRecord, check_folder, lock_folder, plan_runs, run_all

#: Stands for training: counts its starts in the run's folder, then does what the arm's config says.
SCRIPT = """
import os, signal, sys, time
folder, doing = sys.argv[1:]
open(os.path.join(folder, "starts"), "a").write("x")
if doing == "fail":
    print("loading"); print("error: no such thing", file=sys.stderr); sys.exit(2)
if doing == "die":
    os.kill(os.getpid(), signal.SIGKILL)
if doing == "silent":
    sys.exit(4)
if doing == "meet":  # ends when the other arm has started, too
    deadline = time.time() + 60
    while len([1 for arm in os.scandir(os.path.join(folder, "../.."))
               if os.path.exists(os.path.join(arm.path, "seed0/starts"))]) < 2:
        time.sleep(0.02)
        if time.time() > deadline: sys.exit(1)
if doing in ("wait", "stubborn"):
    def stop(*_):
        print("stopped by a signal")
        if doing == "wait": sys.exit(75)
    signal.signal(signal.SIGTERM, stop)
    open(os.path.join(folder, "ready"), "w").write(str(os.getpid()))
    while True: time.sleep(0.02)
print({name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")})
"""


@dataclass(frozen=True)
class Small(Run):
    @property
    def command(self) -> list[str]:
        return [sys.executable, "-S", "-c", SCRIPT, str(self.folder), self.arm.config]


def runs_of(folder: Path, *doing: str, num_gpus: int = 1) -> list[Small]:
    arms = [Arm(f"{number}{what}", what, what) for number, what in enumerate(doing)]
    return [Small(arm, 0, folder / arm.name / "seed0", (), num_gpus) for arm in arms]


def starts(run: Run) -> int:
    return len((run.folder / "starts").read_text())


def wait_for(path: Path) -> int:
    """Wait for the file in which a command writes that it is ready, and return its process."""
    deadline = time.monotonic() + 60
    while not (path.exists() and path.stat().st_size):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return int(path.read_text())


def test_the_command_and_the_order(tmp_path):
    arms = [Arm("a", "A", "a.yaml", ("X", "1")), Arm("b", "B", "b.yaml", seeds=(7, 0))]
    runs = plan_runs(arms, (0, 1), tmp_path, ("Y", "2"), num_gpus=4)
    assert [(run.arm.name, run.seed) for run in runs] == [("a", 0), ("b", 0), ("a", 1), ("b", 7)]
    assert runs[2].folder == tmp_path / "a" / "seed1"
    words = " ".join(runs[2].command)
    assert (
        "-m nonlocal_det.tools.train --config-file a.yaml --num-gpus 4 --resume X 1 Y 2 SEED 1 OUTPUT_DIR"
        in words
    )
    with pytest.raises(ArmError, match="arm a: named twice"):
        plan_runs([arms[0], arms[0]], (0,), tmp_path)


def test_failures_are_recorded_and_stop_nothing(tmp_path):
    runs = runs_of(tmp_path, "fail", "die", "silent", "fine")
    seen = []
    assert run_all(runs, threads=3, report=lambda run, record: seen.append((run, record.exit_code)))
    assert [code for _, code in seen] == [2, -9, 4, 0]
    records = [run.record() for run in runs]
    assert [record.error for record in records] == [
        "no such thing",
        "killed by signal 9",
        "exit code 4, no output",
        "",
    ]
    assert [run.finished for run in runs] == [False, False, False, True]
    assert records[3].threads == 3
    assert "'OMP_NUM_THREADS': '3'" in (runs[3].folder / "console.txt").read_text()

    # Again: what is finished is not run, and the error is that of the last try.
    (runs[0].folder / "console.txt").write_text("error: of another time\n")
    assert run_all(runs)
    assert [starts(run) for run in runs] == [2, 2, 2, 1]
    assert runs[0].record().error == "no such thing"
    assert (runs[0].record().tries, runs[3].record().tries) == (2, 1)
    assert runs[0].record().seconds > records[0].seconds


def test_two_at_a_time(tmp_path):
    runs = runs_of(tmp_path, "meet", "meet")
    assert run_all(runs, parallel=2)
    assert all(run.finished and run.record().at_once == 2 for run in runs)


def stop_when_ready(run: Run, *signals: int) -> threading.Thread:
    def send() -> None:
        wait_for(run.folder / "ready")
        for number in signals:
            os.kill(os.getpid(), number)
            time.sleep(0.5)  # two at the same time would be seen as one

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_is_passed_on_and_the_rest_waits(tmp_path, number):
    before = signal.getsignal(number)
    runs = runs_of(tmp_path, "wait", "fine")
    thread = stop_when_ready(runs[0], number)
    assert not run_all(runs)
    thread.join()
    assert signal.getsignal(number) == before
    assert runs[0].record().exit_code == ExitCode.STOPPED
    assert not runs[0].finished
    assert runs[0].record().error == ""
    assert not runs[1].folder.exists()
    # The same call goes on.
    assert run_all(runs_of(tmp_path, "wait", "fine")[1:])


def test_a_second_signal_ends_a_command_that_does_not_listen(tmp_path):
    (run,) = runs_of(tmp_path, "stubborn")
    thread = stop_when_ready(run, signal.SIGTERM, signal.SIGTERM)
    assert not run_all([run])
    thread.join()
    assert run.record().exit_code == ExitCode.STOPPED
    assert not run.finished


def test_an_ignored_signal_stays_ignored(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        runs = runs_of(tmp_path, "meet", "meet")
        os.kill(os.getpid(), signal.SIGHUP)
        assert run_all(runs, parallel=2)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    ("count", "visible", "num_gpus", "expected"),
    [(4, None, 2, ["0,1", "2,3"]), (3, "5,6,7", 1, ["5", "6"]), (1, None, 1, [None, None])],
)
def test_runs_at_a_time_have_gpus_of_their_own(tmp_path, monkeypatch, count, visible, num_gpus, expected):
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    else:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    runs = runs_of(tmp_path, "meet", "meet", num_gpus=num_gpus)
    assert run_all(runs, parallel=2)
    for run, devices in zip(runs, expected, strict=True):
        assert f"'CUDA_VISIBLE_DEVICES': {devices!r}" in (run.folder / "console.txt").read_text()


def test_a_folder_with_another_config_is_refused(tmp_path):
    (run,) = runs_of(tmp_path, "fine")
    cfg = CfgNode({"SOLVER": {"MAX_ITER": 500, "STEPS": (1, 2)}, "OUTPUT_DIR": "here", "NEW": 1})
    check_folder(run, cfg)  # nothing there
    run.folder.mkdir(parents=True)
    config = run.folder / "config.yaml"
    config.write_text("SOLVER: {MAX_ITER: 500, STEPS: [1, 2]}\nOUTPUT_DIR: there\nOLD: 2\n")
    check_folder(run, cfg)  # as far as both know the keys
    cfg.SOLVER.MAX_ITER = 90
    with pytest.raises(
        ArmError, match=r"run with SOLVER.MAX_ITER 500, which is 90 now; name another --output"
    ):
        check_folder(run, cfg)


def test_a_folder_with_another_number_of_processes_is_refused(tmp_path):
    (run,) = runs_of(tmp_path, "fine")
    run_all([run])
    assert run.finished
    check_folder(run, CfgNode())
    with pytest.raises(ArmError, match=r"run with --num-gpus 1, which is 2 now; name another --output"):
        check_folder(replace(run, num_gpus=2), CfgNode())


def test_records_that_cannot_be_read_count_as_none(tmp_path):
    (run,) = runs_of(tmp_path, "fine")
    run.folder.mkdir(parents=True)
    damaged = ["", '{"exit_code": 0', '{"exit_code": 0, "unknown": 1}', "[]", '{"exit_code": 0, "error": 1}']
    for key in ("seconds", "tries", "threads", "at_once", "num_gpus"):
        damaged += [f'{{"exit_code": 0, "{key}": null}}', f'{{"exit_code": 0, "{key}": "x"}}']
    for content in damaged:
        (run.folder / "run.json").write_text(content)
        assert not run.finished
        assert run.record() == RunRecord()
    config = run.folder / "config.yaml"
    for content in (b"", b"hello", b"- a", b"\xff\xfe", b"SOLVER: {"):
        config.write_bytes(content)
        check_folder(run, CfgNode({"SOLVER": {"MAX_ITER": 500}}))


@pytest.mark.parametrize(("key", "flag"), [("SEED", "--seeds"), ("OUTPUT_DIR", "--output")])
def test_what_is_each_runs_own_cannot_be_set_for_all(tmp_path, key, flag):
    arms = [Arm("a", "A", "a.yaml")]
    with pytest.raises(ArmError, match=rf"^--opts sets {key}, which is each run's own; use {flag}$"):
        plan_runs(arms, (0,), tmp_path, ("X", "1", key, "7"))
    with pytest.raises(ArmError, match=rf"^--arm a sets {key}"):
        plan_runs([replace(arms[0], opts=(key, "7"))], (0,), tmp_path)
    assert plan_runs(arms, (0,), tmp_path, ("X", key))  # a value of that name


def test_one_comparison_in_a_folder_at_a_time(tmp_path):
    folder = tmp_path / "new" / "one"
    with lock_folder(folder):
        for _ in range(2):
            with (
                pytest.raises(ArmError, match=rf"process {os.getpid()} compares") as error,
                lock_folder(folder),
            ):
                pass
        assert "\n" not in str(error.value)
        with lock_folder(tmp_path / "two"):
            pass
    with lock_folder(folder):
        pass


def test_the_lock_outlives_a_comparison_that_is_killed(tmp_path):
    """While a training that it has started runs, another one in the same folder would spoil both."""
    (run,) = runs_of(tmp_path, "wait")

    def compare() -> None:
        with lock_folder(tmp_path) as lock:
            run_all([run], lock=lock)

    process = multiprocessing.get_context("fork").Process(target=compare)
    process.start()
    training = wait_for(run.folder / "ready")
    process.kill()
    process.join()
    with pytest.raises(ArmError, match=f"process {process.pid} compares"), lock_folder(tmp_path):
        pass
    os.kill(training, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while True:
        try:
            with lock_folder(tmp_path):
                return
        except ArmError:
            assert time.monotonic() < deadline
            time.sleep(0.02)
