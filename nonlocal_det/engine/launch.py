"""The processes of a run: started here, one for each GPU or several on CPUs, or by torchrun or Slurm."""

from __future__ import annotations

import gc
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import active_children
from multiprocessing.queues import SimpleQueue
from typing import Any, NamedTuple, NoReturn

import torch
from detectron2.engine import launch
from detectron2.engine.launch import DEFAULT_TIMEOUT
from detectron2.utils import comm
from torch import distributed, multiprocessing

from nonlocal_det.engine.preemption import StopRequest, set_stop_request, stop_request
from nonlocal_det.errors import (
    BadDataError,
    CheckpointError,
    ConfigError,
    ImageError,
    NonFiniteLossError,
    Preempted,
)

__all__ = ["INPUT_ERRORS", "Place", "count_processes", "find_place", "launch_processes"]

logger = logging.getLogger(__name__)

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


#: What torchrun tells each process that it starts.
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

#: Seconds in which a signal may arrive twice: torchrun and Slurm pass on what the processes may get directly.
_SIGNAL_ECHO = 5.0


class Place(NamedTuple):
    """The place of this process among those that torchrun or Slurm has started.

    Attributes:
        starter: "torchrun" or "Slurm".
        rank: number of this process.
        processes: number of all.
        local_rank: number of this process on its machine.
        local_processes: number of those on this machine.
        address: where they meet, as ``torch.distributed`` takes it.
    """

    starter: str
    rank: int
    processes: int
    local_rank: int
    local_processes: int
    address: str


def find_place(
    num_gpus: int = 1,
    num_machines: int = 1,
    machine_rank: int = 0,
    dist_url: str = "auto",
    environment: Mapping[str, str] = os.environ,
) -> Place | None:
    """Look for what torchrun, or Slurm's srun, tells the processes that it starts.

    Args:
        num_gpus: see :func:`launch_processes`, for the first four. Where the processes are there already,
            their number on this machine, or 1.
        num_machines: more than 1 says that the processes of each machine are started here.
        machine_rank: as there.
        dist_url: as there; "auto" is a port of the first machine that follows from the number of the job.
        environment: the variables.

    Returns:
        The place; None for a process that is to start the others itself, or to stay alone.

    Raises:
        ConfigError: a variable makes no sense, or the numbers do not fit what was started.
    """
    if num_machines > 1:
        return None
    if all(name in environment for name in _TORCHRUN):
        numbers = [_number(environment, name) for name in _TORCHRUN[:4]]
        place = Place("torchrun", *numbers, address="env://")
    else:
        place = _find_slurm_place(num_gpus, environment)
    if place is None or place.processes == 1:
        return None
    if not (0 <= place.local_rank < place.local_processes and 0 <= place.rank < place.processes):
        raise ConfigError(f"{place.starter} has given this process numbers that do not fit: {place}")
    if num_gpus not in (1, place.local_processes):
        raise ConfigError(
            f"--num-gpus {num_gpus}: {place.starter} has started {place.local_processes} of "
            f"{place.processes} processes on this machine; leave --num-gpus out, or start as many"
        )
    if place.processes % place.local_processes:
        raise ConfigError(
            f"{place.starter} has started {place.processes} processes, {place.local_processes} of them on "
            "this machine: start the same number on each"
        )
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if 1 < gpus < place.local_processes:
        raise ConfigError(
            f"{place.starter} has started {place.local_processes} processes on this machine, which has "
            f"{gpus} GPUs; start one for each"
        )
    return place if dist_url == "auto" else place._replace(address=dist_url)


def _find_slurm_place(num_gpus: int, environment: Mapping[str, str]) -> Place | None:
    tasks = next((key for key in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if key in environment), None)
    if tasks is None or not {"SLURM_PROCID", "SLURM_LOCALID"} <= environment.keys():
        return None
    if "SLURM_STEP_ID" not in environment and num_gpus > 1:
        return None  # a batch script without srun has these variables, too
    processes = _number(environment, tasks)
    layout = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE")
    found = re.match(r"(\d+)(\(x\d+\))?$", layout or str(processes))  # "8(x2)"; "8,4" are different numbers
    if found is None:
        raise ConfigError(
            f"SLURM_TASKS_PER_NODE is {layout!r}: start the same number of tasks on each machine "
            "(srun --ntasks-per-node)"
        )
    nodes = next(
        (environment[key] for key in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST") if key in environment),
        "127.0.0.1",
    )
    host = environment.get("MASTER_ADDR") or _first_host(nodes)
    # Another one for each job and step that may run on the machine, below those that systems give away.
    job, step = (re.sub(r"\D", "", environment.get(f"SLURM_{key}_ID", "")) for key in ("JOB", "STEP"))
    port = environment.get("MASTER_PORT") or 10_000 + (int(job or 0) + 997 * int(step or 0)) % 20_000
    return Place(
        "Slurm",
        _number(environment, "SLURM_PROCID"),
        processes,
        _number(environment, "SLURM_LOCALID"),
        int(found[1]),
        f"tcp://{host}:{port}",
    )


def _first_host(nodes: str) -> str:
    """Return the first name of Slurm's short form of a list, such as ``gpu[07-09,12]-a,cpu3``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise ConfigError(
            f"{name} is {environment[name]!r}: the environment variable must be a whole number"
        ) from None


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
    is sent to this process counts in all of them. Where torchrun or Slurm has started the processes, this one
    joins the others instead.

    A process that fails prints its traceback before the others can notice, and all end.

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
            :class:`torch.multiprocessing.ProcessRaisedException`, or ``ProcessExitedException`` for one that
            was killed.
    """
    place = find_place(num_gpus, num_machines, machine_rank, dist_url)
    if place is not None:
        _run_in_place(place, main, args)
        return
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
                args=(main, args, num_gpus, errors, stop_request(), multiprocessing.get_start_method()),
            )
    except (multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException) as ended:
        if getattr(ended, "exit_code", 0) < 0:
            raise  # killed: what the others say of it is a consequence
        if errors.empty():
            if stop_request():
                raise Preempted("stopped by a signal before training started") from None
            raise
    if not errors.empty():
        # That of the first process to fail, which need not be the first one to end.
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
    if place := find_place(num_gpus, num_machines, machine_rank, dist_url):
        return place.processes
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
    main: Callable[..., None],
    args: tuple[Any, ...],
    num_gpus: int,
    errors: SimpleQueue,
    stop: StopRequest,
    start_method: str,
) -> None:
    """Do the work of one process that was started here."""
    # A process that was spawned would spawn those that load its data, too: seconds and half a GB for each.
    multiprocessing.set_start_method(start_method, force=True)
    set_stop_request(stop)
    _share_threads(num_gpus)
    try:
        try:
            main(*args)
        except Preempted as stopped:  # in all of them
            errors.put(stopped)
        _part()
    except Exception as error:
        wrong_input = isinstance(error, INPUT_ERRORS)
        rank = comm.get_rank()
        fault = multiprocessing.ProcessRaisedException(f"\n{traceback.format_exc()}", rank, os.getpid())
        errors.put(error if wrong_input else fault)
        _leave_at_once(2 if wrong_input else 1, "" if wrong_input else traceback.format_exc())
    _leave_at_once(0, "")


def _run_in_place(place: Place, main: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Do the work of this process among others that torchrun or Slurm has started."""
    stop_request().echo = _SIGNAL_ECHO
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus:
        torch.cuda.set_device(place.local_rank % gpus)  # Slurm may show each process its own GPU alone
    _share_threads(place.local_processes)
    if place.rank == 0 and place.starter == "Slurm":
        print(
            f"Waiting for the other {place.processes - 1} tasks of Slurm at {place.address}, which the same "
            "srun must start; a process that is to be alone must not have SLURM_NTASKS",
            flush=True,
        )
    try:
        distributed.init_process_group(
            backend="NCCL" if gpus else "GLOO",
            init_method=place.address,
            world_size=place.processes,
            rank=place.rank,
            timeout=DEFAULT_TIMEOUT,
        )
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
        _leave_at_once(1, traceback.format_exc())
    else:
        _part()


def _part() -> None:
    """Close the connections to the other processes, all of which have come to their end.

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


def _leave_at_once(code: int, text: str) -> NoReturn:
    """Print, and end this process without waiting for threads or for other processes.

    Those that wait for one that has failed notice that it has gone when the system closes its sockets.
    """
    if text:
        processes = comm.get_world_size()
        print(f"Process {comm.get_rank()} of {processes} failed:\n{text}", file=sys.stderr)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
