"""Running a function in the processes of a run: started here, or joined where torchrun or Slurm did that."""

from __future__ import annotations

import gc
import logging
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing import active_children
from multiprocessing.queues import SimpleQueue
from typing import Any, NoReturn

import torch
from detectron2.engine import launch
from detectron2.engine.launch import DEFAULT_TIMEOUT
from detectron2.utils import comm
from torch import distributed, multiprocessing

from nonlocal_det.engine.launch.places import Place, count_processes, find_place
from nonlocal_det.engine.preemption import StopRequest
from nonlocal_det.errors import INPUT_ERRORS, ConfigError, ExitCode, Preempted

#: Seconds in which a signal may arrive twice: torchrun and Slurm pass on what the processes may get directly.
_SIGNAL_ECHO = 5.0


def launch_processes(
    main: Callable[..., None],
    num_gpus: int = 1,
    num_machines: int = 1,
    machine_rank: int = 0,
    dist_url: str = "auto",
    args: tuple[Any, ...] = (),
    stop: StopRequest | None = None,
) -> None:
    """Run ``main(*args)`` in one process, or in one process for each GPU of every machine.

    Without a CUDA device, ``num_gpus`` processes share the CPU. Where torchrun or Slurm has started the
    processes, this one joins the others instead. When one fails, it prints its traceback, and all end.

    Args:
        main: a function that can be pickled. With several processes each calls it, in a fresh interpreter.
        num_gpus: processes on this machine, 1 or more.
        num_machines: number of machines.
        machine_rank: number of this machine, from 0.
        dist_url: where the processes meet, ``tcp://HOST:PORT`` of machine 0; "auto" is a free port.
        args: arguments of ``main``.
        stop: a request that is among them: a signal to this process counts in all that it has started.

    Raises:
        ConfigError: the numbers do not fit each other or this machine.
        Preempted: a signal has stopped ``main``.
        Exception: what ``main`` raised; from another process, INPUT_ERRORS come as they are and others as
            :class:`torch.multiprocessing.ProcessRaisedException`, or ``ProcessExitedException`` for one that
            was killed.
    """
    stop = StopRequest() if stop is None else stop  # one that was not asked to stop is false
    where = (num_gpus, num_machines, machine_rank, dist_url)
    place = find_place(*where)
    if place is not None:
        stop.echo = _SIGNAL_ECHO
        _run_in_place(place, main, args)
        return
    if count_processes(*where) == 1:
        main(*args)
        return
    errors = multiprocessing.get_context("spawn").SimpleQueue()
    # It warns of each process that it ends because another has failed, which that one's error says already.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    try:
        with stop.listening(pass_on=True, leave=_kill_children):
            start_method = multiprocessing.get_start_method()
            launch(_run_process, *where, args=(main, args, num_gpus, errors, start_method))
    except (multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException) as ended:
        if getattr(ended, "exit_code", 0) < 0:
            raise  # killed: what the others say of it is a consequence
        if errors.empty():
            if stop:
                raise Preempted("stopped by a signal before training started") from None
            raise
    if not errors.empty():
        raise errors.get()  # of the first process to fail, which need not be the first one to end


def _kill_children() -> None:
    for child in active_children():
        child.kill()


def _run_process(
    main: Callable[..., None], args: tuple[Any, ...], num_gpus: int, errors: SimpleQueue, start_method: str
) -> None:
    """Do the work of one process that was started here."""
    # Else a process that was spawned would spawn its data workers too: seconds and half a GB for each.
    multiprocessing.set_start_method(start_method, force=True)
    _share_threads(num_gpus)
    try:
        try:
            main(*args)
        except Preempted as stopped:  # in all of them
            errors.put(stopped)
        _part()
    except INPUT_ERRORS as error:
        errors.put(error)
        _leave_at_once(ExitCode.WRONG_INPUT)
    except Exception:
        text = traceback.format_exc()
        errors.put(multiprocessing.ProcessRaisedException(f"\n{text}", comm.get_rank(), os.getpid()))
        _leave_at_once(ExitCode.FAULT, text)
    _leave_at_once(ExitCode.OK)


def _run_in_place(place: Place, main: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Do the work of this process among others that torchrun or Slurm has started."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus:
        torch.cuda.set_device(place.local_rank % gpus)  # Slurm may show each process its own GPU alone
    _share_threads(place.local_processes)
    if place.rank == 0 and place.starter == "Slurm":
        text = (
            f"Waiting for the other {place.processes - 1} tasks of Slurm at {place.address}, which the same "
            "srun must start; a process that is to be alone must not have SLURM_NTASKS"
        )
        print(text, flush=True)
    try:
        group = {"world_size": place.processes, "rank": place.rank, "timeout": DEFAULT_TIMEOUT}
        distributed.init_process_group("NCCL" if gpus else "GLOO", place.address, **group)
        _check_order(place)
        comm.create_local_process_group(place.local_processes)
        comm.synchronize()
        main(*args)
    except Preempted:  # in all of them
        _part()
        raise
    except INPUT_ERRORS:
        raise
    except Exception:
        _leave_at_once(ExitCode.FAULT, traceback.format_exc())
    else:
        _part()


def _part() -> None:
    """Close the connections to the other processes, which are all done.

    A thread of Gloo's that still runs when the interpreter ends would now and then abort the process. So what
    holds on to one, such as a model, goes before, and with it the processes that load its data.
    """
    gc.collect()
    comm.synchronize()
    distributed.destroy_process_group()


def _check_order(place: Place) -> None:
    """Detectron2 takes the processes of a machine for consecutive ones."""
    places: list[Any] = [None] * place.processes
    distributed.all_gather_object(places, place)
    if any(other.local_rank != other.rank % place.local_processes for other in places):
        raise ConfigError(
            f"{place.starter} has numbered the processes across the machines: number them machine by "
            "machine, the same number on each (srun --distribution=block)"
        )


def _share_threads(processes: int) -> None:
    """Where processes share the cores of a machine, let each start its part of the threads."""
    if torch.cuda.is_available() or "OMP_NUM_THREADS" in os.environ:
        return
    bound = hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) < (os.cpu_count() or 1)
    if not bound:  # else Slurm has given each process cores of its own
        torch.set_num_threads(max(1, torch.get_num_threads() // processes))


def _leave_at_once(code: int, text: str = "") -> NoReturn:
    """Print what has failed, and end this process without waiting for threads or for other processes.

    The others notice that it has gone when the system closes its sockets.
    """
    if text:
        print(f"Process {comm.get_rank()} of {comm.get_world_size()} failed:\n{text}", file=sys.stderr)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
