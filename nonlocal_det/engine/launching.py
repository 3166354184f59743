"""Starting the processes of a run: one for each GPU, or several on CPUs where there is no GPU."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from multiprocessing import active_children
from multiprocessing.queues import SimpleQueue
from typing import Any

import torch
from detectron2.engine import launch
from torch import multiprocessing

from nonlocal_det.checkpoint import CheckpointError
from nonlocal_det.config import ConfigError
from nonlocal_det.data.images import ImageError
from nonlocal_det.data.train_loader import BadDataError
from nonlocal_det.engine.nonfinite import NonFiniteLossError
from nonlocal_det.engine.preemption import Preempted, StopRequest, set_stop_request, stop_request

__all__ = ["INPUT_ERRORS", "count_processes", "launch_processes"]

#: What wrong input raises, as opposed to a fault of the program: reported by one line, without a traceback.
INPUT_ERRORS = (
    ConfigError,
    CheckpointError,
    BadDataError,
    ImageError,
    NonFiniteLossError,
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)


def launch_processes(
    main: Callable[..., None],
    num_gpus: int = 1,
    num_machines: int = 1,
    machine_rank: int = 0,
    dist_url: str = "auto",
    args: tuple[Any, ...] = (),
) -> None:
    """Run ``main(*args)`` in one process, or in one process for each GPU of every machine.

    Without a CUDA device, ``num_gpus`` processes share the CPU, and Gloo connects them. A signal to stop that
    is sent to this process counts in all of them.

    Args:
        main: a function that can be pickled. With several processes each calls it, in a fresh interpreter.
        num_gpus: processes on this machine, 1 or more.
        num_machines: number of machines.
        machine_rank: number of this machine, from 0.
        dist_url: where the processes meet, ``tcp://HOST:PORT`` of machine 0. "auto" is a free port of this
            machine.
        args: arguments of ``main``.

    Raises:
        ConfigError: the numbers do not fit each other or this machine.
        Preempted: a signal has stopped ``main``.
        Exception: what ``main`` raised; from another process, INPUT_ERRORS come as they are and others as
            :class:`torch.multiprocessing.ProcessRaisedException`.
    """
    if count_processes(num_gpus, num_machines, machine_rank, dist_url) == 1:
        main(*args)
        return
    errors = multiprocessing.get_context("spawn").SimpleQueue()
    # It warns of each process that it ends because another has failed, which that one's error says already.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    try:
        with stop_request().listening(pass_on=True, leave=_kill_children):
            launch(
                _run_process,
                num_gpus,
                num_machines=num_machines,
                machine_rank=machine_rank,
                dist_url=dist_url,
                args=(main, args, num_gpus, errors, stop_request()),
            )
    except (multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException):
        # The first process to end need not be the one with the wrong input: the others lose touch with it.
        if errors.empty():
            if stop_request():
                raise Preempted("stopped by a signal before training started") from None
            raise
    if not errors.empty():
        raise errors.get()


def count_processes(
    num_gpus: int = 1, num_machines: int = 1, machine_rank: int = 0, dist_url: str = "auto"
) -> int:
    """Return the number of processes on all machines, once the arguments are found to fit.

    Args:
        num_gpus: see :func:`launch_processes`, for all four.
        num_machines: as there.
        machine_rank: as there.
        dist_url: as there.

    Raises:
        ConfigError: the numbers do not fit each other or this machine.
    """
    if num_gpus < 1:
        raise ConfigError(
            f"--num-gpus {num_gpus}: must be 1 or more; without a GPU it counts processes on the CPU"
        )
    if torch.cuda.is_available() and num_gpus > torch.cuda.device_count():
        raise ConfigError(
            f"--num-gpus {num_gpus}: this machine has {torch.cuda.device_count()}; write that number or less"
        )
    if num_machines < 1:
        raise ConfigError(f"--num-machines {num_machines}: must be 1 or more")
    if not 0 <= machine_rank < num_machines:
        raise ConfigError(
            f"--machine-rank {machine_rank}: must be 0 to {num_machines - 1}, as there are "
            f"{num_machines} machines"
        )
    if num_machines > 1 and dist_url == "auto":
        raise ConfigError(
            f"--dist-url is missing: {num_machines} machines meet at an address of machine 0, such as "
            "--dist-url tcp://HOST:29500"
        )
    return num_gpus * num_machines


def _kill_children() -> None:
    for child in active_children():
        child.kill()


def _run_process(
    main: Callable[..., None], args: tuple[Any, ...], num_gpus: int, errors: SimpleQueue, stop: StopRequest
) -> None:
    set_stop_request(stop)
    if not torch.cuda.is_available() and "OMP_NUM_THREADS" not in os.environ:
        # Each process would start a thread for every core, and they would be in each other's way.
        torch.set_num_threads(max(1, torch.get_num_threads() // num_gpus))
    try:
        main(*args)
    except Preempted as stopped:
        errors.put(stopped)
    except INPUT_ERRORS as error:
        errors.put(error)
        raise
