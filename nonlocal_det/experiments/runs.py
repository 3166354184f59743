"""Running arms x seeds: each run is the training command in a process and folder of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import portalocker
import torch
import yaml
from detectron2.config import CfgNode

from nonlocal_det.config.messages import flatten
from nonlocal_det.errors import ArmError, ExitCode
from nonlocal_det.experiments.arms import Arm, check_overrides
from nonlocal_det.files import write_whole

RECORD = "run.json"
CONSOLE = "console.txt"
LOCK = ".lock"
_POLL_SECONDS = 0.2
_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1") if hasattr(signal, name)
)


@dataclass
class RunRecord:
    """What is known of a run, kept as ``run.json`` in its folder."""

    #: of the last try; None while it runs, or when it was killed with this process
    exit_code: int | None = None
    seconds: float = 0.0  # wall time of all tries together, but for those that were killed with this process
    tries: int = 0  # how often it was started
    error: str = ""  # last line of its output, where it failed; "" where a signal has stopped it
    threads: int = 0  # CPU threads that it was given
    at_once: int = 1  # how many runs shared the machine
    num_gpus: int = 0  # processes of its training command; 0 where it was never started


@dataclass(frozen=True)
class Run:
    """One arm with one seed."""

    arm: Arm
    seed: int
    folder: Path  # its OUTPUT_DIR
    opts: tuple[str, ...] = ()  # overrides of the arm and of all arms, without the seed and the folder
    num_gpus: int = 1  # processes of the training command

    @property
    def overrides(self) -> list[str]:
        """All overrides of the config."""
        return [*self.opts, "SEED", str(self.seed), "OUTPUT_DIR", str(self.folder)]

    @property
    def command(self) -> list[str]:
        """The training command, which goes on where it was."""
        words = [sys.executable, "-m", "nonlocal_det.tools.train", "--config-file", self.arm.config]
        return [*words, "--num-gpus", str(self.num_gpus), "--resume", *self.overrides]

    def record(self) -> RunRecord:
        """Read what is known of it; an empty record where there is nothing to read, or something else."""
        try:
            record = RunRecord(**json.loads((self.folder / RECORD).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return RunRecord()
        numbers = (record.seconds, record.exit_code or 0, record.tries, record.threads, record.at_once)
        right = all(isinstance(number, (int, float)) for number in (*numbers, record.num_gpus))
        return record if right and isinstance(record.error, str) else RunRecord()

    def write(self, record: RunRecord) -> None:
        """Keep a record in the folder."""
        text = json.dumps(asdict(record), indent=1) + "\n"
        write_whole(self.folder / RECORD, lambda file: file.write(text.encode()))

    @property
    def finished(self) -> bool:
        """Whether it has been trained and evaluated to the end."""
        return self.record().exit_code == 0


def plan_runs(
    arms: Sequence[Arm], seeds: Sequence[int], output: Path, opts: Sequence[str] = (), num_gpus: int = 1
) -> list[Run]:
    """Return the runs, seed by seed, so that an interrupted comparison has every arm with the same seeds.

    ``seeds`` are those of arms that name none; ``opts``, of all arms, come after an arm's own. A run has
    the folder ``output/ARM/seedN``.

    Raises:
        ArmError: two arms have one name, or overrides are no pairs, or set what belongs to single runs.
    """
    check_overrides(opts, "--opts")
    for arm in arms:
        check_overrides(arm.opts, f"--arm {arm.name}")
    names = [arm.name for arm in arms]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ArmError(f"arm {sorted(twice)[0]}: named twice; names are folders, so give each its own")
    runs = [
        Run(arm, seed, output / arm.name / f"seed{seed}", (*arm.opts, *opts), num_gpus)
        for arm in arms
        for seed in arm.seeds or seeds
    ]
    return sorted(runs, key=lambda run: run.seed)  # stable: arms keep their order


def check_folder(run: Run, cfg: CfgNode) -> None:
    """Refuse a folder in which the same name and seed was run with another config or on other GPUs.

    Raises:
        ArmError: a key that both know has another value there, or the run had another number of processes,
            each of which draws pictures of its own and has batch statistics of its own.
    """
    before = run.record().num_gpus
    if before not in (0, run.num_gpus):
        raise ArmError(
            f"{run.folder} holds a run with --num-gpus {before}, which is {run.num_gpus} now; name another "
            "--output, or delete that folder"
        )
    path = run.folder / "config.yaml"
    try:
        there = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        there = None
    if not isinstance(there, dict):
        return  # nothing there, or damaged: a run that goes on writes it anew
    there, here = dict(flatten(there)), dict(flatten(yaml.safe_load(cfg.dump())))
    for key in sorted(there.keys() & here.keys() - {"OUTPUT_DIR"}):
        if there[key] != here[key]:
            raise ArmError(
                f"{run.folder} holds a run with {key} {there[key]!r}, which is {here[key]!r} now; name "
                "another --output, or delete that folder"
            )


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[int]:
    """Keep other comparisons out of a folder, which is made where it is missing.

    The system releases the lock when this process and those that inherited the lock have ended.

    Yields:
        The file descriptor that holds the lock, for processes that are to hold it, too.

    Raises:
        ArmError: another comparison is at work there.
        OSError: the folder cannot be made or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+", encoding="utf-8") as file:
        try:
            portalocker.lock(file, portalocker.LOCK_EX | portalocker.LOCK_NB)
        except portalocker.AlreadyLocked:
            file.seek(0)
            raise ArmError(
                f"--output {folder}: process {file.read().strip()} compares in this folder, or a training of "
                "its still runs; wait for it, stop it, or name another folder"
            ) from None
        except portalocker.LockException:
            pass  # no locks here, as on some network drives
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield file.fileno()


def run_all(
    runs: Sequence[Run],
    *,
    parallel: int = 1,
    threads: int = 1,
    lock: int | None = None,
    report: Callable[[Run, RunRecord], None] = lambda run, record: None,
) -> bool:
    """Run what is not finished, some at a time. What fails is recorded and does not stop the others.

    Signals to stop are passed on to the training commands, which save and stop; a second one ends them at
    once. Runs at work at the same time get different GPUs, as far as there are.

    Args:
        runs: the runs.
        parallel: how many at a time.
        threads: CPU threads of each.
        lock: what :func:`lock_folder` yields: held while a training command runs, even if this process dies.
        report: called with each run that has ended.

    Returns:
        Whether all were tried: False where a signal has stopped it.
    """
    waiting = deque(run for run in runs if not run.finished)
    running: dict[int, _Process] = {}  # by place, of which there are ``parallel``
    stop: list[int] = []
    # One that is ignored, as SIGHUP is under nohup, stays so.
    signals = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    old = {number: signal.signal(number, lambda got, _: stop.append(got)) for number in signals}
    try:
        while running or (waiting and not stop):
            for place in range(parallel):
                if place not in running and waiting and not stop:
                    run = waiting.popleft()
                    running[place] = _Process(run, threads, parallel, _gpus(place, run.num_gpus), lock)
            if stop:
                for process in running.values():
                    process.stop(at_once=len(stop) > 1)
            for place, process in list(running.items()):
                if process.poll():
                    del running[place]
                    report(process.run, process.record)
            time.sleep(_POLL_SECONDS)
    finally:
        for process in running.values():
            process.stop()
        for number, handler in old.items():
            signal.signal(number, handler)
    return not stop


def _gpus(place: int, num_gpus: int) -> dict[str, str]:
    """Return the environment that gives a run GPUs of its own; nothing where it may see them all."""
    count = torch.cuda.device_count()
    if count <= num_gpus:
        return {}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(number) for number in range(count)]
    own = (names[(place * num_gpus + number) % count] for number in range(num_gpus))
    return {"CUDA_VISIBLE_DEVICES": ",".join(own)}


class _Process:
    """A training command at work."""

    def __init__(
        self, run: Run, threads: int, at_once: int, gpus: Mapping[str, str], lock: int | None
    ) -> None:
        run.folder.mkdir(parents=True, exist_ok=True)
        self.run = run
        self.record = run.record()
        self._before = self.record.seconds
        self._stopped = self._killed = False
        self.record.exit_code, self.record.error = None, ""
        self.record.tries += 1
        self.record.threads, self.record.at_once = threads, at_once
        self.record.num_gpus = run.num_gpus
        run.write(self.record)
        self._console = (run.folder / CONSOLE).open("ab")
        self._offset = self._console.tell()
        # A run starts its own processes, even if torchrun or Slurm has made this one a part of something.
        environment = {
            **{name: value for name, value in os.environ.items() if name not in ("RANK", "SLURM_PROCID")},
            "OMP_NUM_THREADS": str(threads),
            "OMP_WAIT_POLICY": "PASSIVE",  # threads that wait in a loop take the cores from other runs
            **gpus,
        }
        self._start = time.monotonic()
        # In a group of its own: Ctrl-C is for this process, which passes it on once.
        self._process = subprocess.Popen(
            run.command,
            stdin=subprocess.DEVNULL,
            stdout=self._console,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
            pass_fds=() if lock is None or os.name != "posix" else (lock,),
        )

    def stop(self, at_once: bool = False) -> None:
        """Ask it to save and stop, once; or end it, with the processes that it has started."""
        if at_once and not self._killed:
            self._killed = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        elif not self._stopped:
            self._process.terminate()
        self._stopped = True

    def poll(self) -> bool:
        """Return whether it has ended, and if so, record how."""
        code = self._process.poll()
        if code is None:
            return False
        self._console.close()
        self.record.seconds = self._before + time.monotonic() - self._start
        self.record.exit_code = code
        if self._stopped and code < 0:  # before it listened to signals, or by a second one
            self.record.exit_code = code = int(ExitCode.STOPPED)
        if code < 0:
            self.record.error = f"killed by signal {-code}"
        elif code not in (ExitCode.OK, ExitCode.STOPPED):
            self.record.error = self._last_line() or f"exit code {code}, no output"
        self.run.write(self.record)
        return True

    def _last_line(self) -> str:
        """Return the last line that this try has said; "" where it said nothing."""
        with (self.run.folder / CONSOLE).open("rb") as file:
            file.seek(self._offset)
            lines = file.read().decode(errors="replace").split("\n")
        said = [line.rpartition("\r")[2].strip() for line in lines if line.strip()]
        return said[-1].removeprefix("error: ") if said else ""
