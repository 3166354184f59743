"""Steps that run and are measured in a process of their own."""

from __future__ import annotations

import contextlib
import ctypes
import math
import multiprocessing
import signal
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import torch

from nonlocal_det.benchmark.ratio import StepCost, ratio_of
from nonlocal_det.errors import MeasurementError, one_line

# A step on a GPU may take less than the clock can tell: this much time is measured at once.
_SHORTEST_S = 0.05
_MOST_CALLS = 100


class Step(Protocol):
    """What a process measures, when it is called; ``warm_up`` needs as little memory as it can."""

    device: torch.device
    info: Any
    warm_up: Callable[[], None]
    __call__: Callable[[], None]


class Runner(contextlib.AbstractContextManager):
    """A fresh process that makes a step, says how much memory it takes, and times it on request.

    Its memory is not spoilt by what was run before, and two of them can take turns.

    Args:
        make: makes the step, in the new process; a function or class that can be pickled.
        args: its arguments.

    Attributes:
        memory: bytes at the peak of the step's first full run above those held just before. On a CPU this is
            resident memory, and None where the system does not tell (anything but Linux); on a GPU it is
            what PyTorch has allocated.
        info: the step's own.

    Raises:
        MeasurementError: the step ran out of memory.
        RuntimeError: it failed; the message holds its traceback.
    """

    def __init__(self, make: Callable[..., Step], *args: Any) -> None:
        self._name = make.__name__
        context = _context()
        self._connection, other = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(other, torch.get_num_threads(), make, args), daemon=True
        )
        self._process.start()
        other.close()
        try:
            self.memory, self.info = self._receive()
        except BaseException:
            self.__exit__()
            raise

    def seconds(self) -> float:
        """Run the step and return how long it took, in seconds."""
        self._connection.send("run")
        return self._receive()

    def __exit__(self, *_: object) -> None:
        self._connection.close()
        self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _receive(self) -> Any:
        try:
            failure, result = self._connection.recv()
        except EOFError:
            self._process.join()
            if self._process.exitcode == -signal.SIGKILL:
                raise MeasurementError(f"{self._name} was killed; most likely memory ran out") from None
            raise RuntimeError(f"{self._name} ended with exit code {self._process.exitcode}") from None
        if failure == "memory":
            raise MeasurementError(f"{self._name}: memory ran out: {result}")
        if failure:
            raise RuntimeError(f"{self._name} failed:\n{result}")
        return result


def seconds_in_turn(
    runners: Sequence[Runner], rounds: int, least_rounds: int = 1, budget_s: float = math.inf
) -> list[list[float]]:
    """Time several steps, one run of each in every round, so that a busy or hot machine slows them alike.

    Args:
        runners: their processes.
        rounds: how many rounds. Every other one goes backwards.
        least_rounds: stop after so many if the time is up.
        budget_s: that time, in seconds.

    Returns:
        The seconds of every round, for each runner.
    """
    pairs = [(runner, []) for runner in runners]
    start = time.perf_counter()
    for index in range(rounds):
        for runner, times in reversed(pairs) if index % 2 else pairs:
            times.append(runner.seconds())
        if index + 1 >= least_rounds and time.perf_counter() - start > budget_s:
            break
    return [times for _, times in pairs]


def compare_steps(step: tuple, reference: tuple, *turns: Any) -> tuple[StepCost, Any]:
    """Measure a step and another in turn, each given by what makes it and the arguments of that.

    ``turns`` are the last arguments of :func:`seconds_in_turn`.

    Returns:
        What the step costs, where memory is with what was held before (``info["held"]``), and its ``info``.

    Raises:
        MeasurementError: memory ran out.
    """
    with Runner(*step) as ours, Runner(*reference) as other:
        seconds = seconds_in_turn((ours, other), *turns)
        memory = (one.memory and one.memory + one.info["held"] for one in (ours, other))
        return StepCost(*map(statistics.median, seconds), ratio_of(*seconds), *memory), ours.info


def _context() -> multiprocessing.context.BaseContext:
    """Return the way to start processes: from a server that has imported the libraries and done no more."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["nonlocal_det.benchmark.block", "nonlocal_det.benchmark.detector"])
    return context


def _serve(connection: Connection, threads: int, make: Callable[..., Step], args: tuple[Any, ...]) -> None:
    """Make the step in the new process, measure its first run, and run it again for every message."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asked
    torch.set_num_threads(threads)
    try:
        step = make(*args)
        if step.device.type == "cuda":
            torch.cuda.set_device(step.device)  # that of the events
        step.warm_up()
        memory, seconds = _measure_first(step)
        calls = min(_MOST_CALLS, math.ceil(_SHORTEST_S / max(seconds, 1e-6)))
        connection.send((None, (memory, step.info)))
        while connection.recv():
            connection.send((None, _time(step, calls)))
    except (EOFError, BrokenPipeError):  # the other side has closed
        return
    except (torch.cuda.OutOfMemoryError, MemoryError) as error:
        connection.send(("memory", one_line(error)))
    except Exception as error:
        kind = "memory" if "can't allocate memory" in str(error) else "error"  # a CPU's RuntimeError
        connection.send((kind, str(error).splitlines()[0] if kind == "memory" else traceback.format_exc()))


def _measure_first(step: Step) -> tuple[int | None, float]:
    """Return the extra memory at the peak of one run, in bytes, and its seconds."""
    if step.device.type == "cuda":
        step()  # a GPU's memory is counted exactly, so that a full run may choose kernels first
        torch.cuda.synchronize(step.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(step.device)
        before = torch.cuda.memory_allocated(step.device)
        seconds = _time(step, 1)
        return torch.cuda.max_memory_allocated(step.device) - before, seconds
    _forget_warm_up()
    before = _resident("VmRSS")
    seconds = _time(step, 1)
    # Not getrusage: its peak is that of the process before exec, too.
    peak = _resident("VmHWM")
    return (None if before is None or peak is None else peak - before), seconds


def _forget_warm_up() -> None:
    """Give memory that is free already back to the system, and let the peak so far count no longer.

    Where the system refuses either, the difference is small: the process is new.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # glibc's
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _resident(field: str) -> int | None:
    """Return the bytes that this process holds now (VmRSS) or at the peak (VmHWM); Linux alone tells."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), None)


def _time(step: Step, calls: int) -> float:
    """Return the seconds of one call, over several in a row."""
    if step.device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            step()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000 / calls
    begin = time.perf_counter()
    for _ in range(calls):
        step()
    return (time.perf_counter() - begin) / calls
