"""Where this process stands among those of a run: alone, to start others, or started by torchrun or Slurm."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import NamedTuple

import torch

from nonlocal_det.errors import ConfigError

#: What torchrun tells each process that it starts.
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Place(NamedTuple):
    """The place of this process among those that torchrun or Slurm has started."""

    starter: str  # "torchrun" or "Slurm"
    rank: int  # of this process
    processes: int  # number of all
    local_rank: int  # of this process on its machine
    local_processes: int  # number of those on this machine
    address: str  # where they meet, as torch.distributed takes it


def find_place(
    num_gpus: int = 1,
    num_machines: int = 1,
    machine_rank: int = 0,
    dist_url: str = "auto",
    environment: Mapping[str, str] = os.environ,
) -> Place | None:
    """Return this process's place by what torchrun, or Slurm's srun, tells the processes that it starts.

    It is None for a process that is to start the others itself, or to stay alone. The arguments are those of
    :func:`launch_processes`; where the processes have been started, ``num_gpus`` is the number of those on
    this machine, or 1, and with more than one machine they are always started here.

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
    nodes = environment.get("SLURM_JOB_NODELIST", "127.0.0.1")
    host = environment.get("MASTER_ADDR") or _first_host(environment.get("SLURM_STEP_NODELIST", nodes))
    # Another one for each job and step that may run on the machine, below those that systems give away.
    job, step = (re.sub(r"\D", "", environment.get(f"SLURM_{key}_ID", "")) for key in ("JOB", "STEP"))
    port = environment.get("MASTER_PORT") or 10_000 + (int(job or 0) + 997 * int(step or 0)) % 20_000
    rank, local_rank = (_number(environment, name) for name in ("SLURM_PROCID", "SLURM_LOCALID"))
    return Place("Slurm", rank, processes, local_rank, int(found[1]), f"tcp://{host}:{port}")


def _first_host(nodes: str) -> str:
    """Return the first name of a list in Slurm's short form, such as ``gpu[07-09,12]-a,cpu3``."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise ConfigError(
            f"{name} is {environment[name]!r}: the environment variable must be a whole number"
        ) from None


def count_processes(
    num_gpus: int = 1, num_machines: int = 1, machine_rank: int = 0, dist_url: str = "auto"
) -> int:
    """Check the arguments of :func:`launch_processes`; return the number of processes on all machines.

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
