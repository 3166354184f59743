from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("detectron2")

from nonlocal_det import ConfigError
from nonlocal_det.engine.launch.places import count_processes, find_place


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"num_gpus": 0}, "--num-gpus 0: must be 1 or more"),
        ({"num_machines": 0}, "--num-machines 0: must be 1 or more"),
        ({"num_machines": 2, "machine_rank": 2}, "--machine-rank 2: must be 0 to 1"),
        ({"machine_rank": -1}, "--machine-rank -1"),
        ({"num_machines": 2}, "--dist-url is missing"),
    ],
)
def test_numbers_that_do_not_fit(numbers, message):
    with pytest.raises(ConfigError, match=message):
        count_processes(**numbers)


def test_more_gpus_than_there_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="--num-gpus 4: this machine has 1"):
        count_processes(num_gpus=4)


TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "8",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_JOB_NODELIST": "gpu[07-09,12],cpu3",
}


def place(environment: dict, **numbers):
    return find_place(environment=environment, **numbers)


def test_a_process_alone_has_no_place():
    assert place({}) is None
    assert place({**TORCHRUN, "WORLD_SIZE": "1", "RANK": "0"}) is None
    assert place({name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}) is None
    assert place({**SLURM, "SLURM_NTASKS": "1"}) is None
    # In an interactive shell of a larger job.
    assert place({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}) is None
    # The flags say that each machine starts its processes itself.
    assert place(SLURM, num_gpus=8, num_machines=2, dist_url="tcp://host:1") is None
    # A batch script without srun, which starts the processes of its machine.
    assert place({k: v for k, v in SLURM.items() if k != "SLURM_STEP_ID"}, num_gpus=4) is None


def test_the_place_that_torchrun_gives():
    found = place({**SLURM, **TORCHRUN})  # srun torchrun
    assert found == ("torchrun", 5, 8, 1, 4, "env://")
    assert place(TORCHRUN, num_gpus=4) == found


def test_the_place_that_slurm_gives():
    found = place(SLURM)
    assert found[:5] == ("Slurm", 5, 8, 1, 4)
    host, port = re.fullmatch(r"tcp://(.*):(\d+)", found.address).groups()
    assert host == "gpu07"
    assert 10_000 <= int(port) < 30_000
    assert place({**SLURM, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}).address == found.address
    assert place({**SLURM, "SLURM_JOB_ID": "123457"}).address != found.address
    assert place({**SLURM, "SLURM_STEP_ID": "3"}).address != found.address
    step = {"SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_TASKS_PER_NODE": "2(x3)", "SLURM_STEP_NODELIST": "b9"}
    assert place({**SLURM, **step}, num_gpus=2)[:5] == ("Slurm", 5, 6, 1, 2)
    assert place({**SLURM, **step}).address.startswith("tcp://b9:")
    own = place({**SLURM, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4321"})
    assert own.address == "tcp://10.0.0.1:4321"
    assert place(SLURM, dist_url="tcp://elsewhere:1").address == "tcp://elsewhere:1"
    # On one machine Slurm need not say where the tasks are.
    few = {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1"}
    assert place(few)[:5] == ("Slurm", 1, 2, 1, 2)
    assert place(few).address.startswith("tcp://127.0.0.1:")


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node1", "node1"),
        ("a,b", "a"),
        ("node[3-5]", "node3"),
        ("node[003,007-009],other", "node003"),
        ("gpu-[01-02]-ib,x[1-2]", "gpu-01-ib"),
        ("rack[0-1]n[10-12]", "rack0n10"),
    ],
)
def test_first_host_of_slurms_list(nodes, first):
    assert place({**SLURM, "SLURM_JOB_NODELIST": nodes}).address.startswith(f"tcp://{first}:")


@pytest.mark.parametrize(
    ("environment", "numbers", "message"),
    [
        (TORCHRUN, {"num_gpus": 2}, r"--num-gpus 2: torchrun has started 4 of 8 processes on this machine"),
        ({**TORCHRUN, "RANK": "five"}, {}, r"RANK is 'five': .* whole number"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, {}, r"torchrun has given this process numbers that do not fit"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "3"}, {}, r"start the same number on each"),
        ({**SLURM, "SLURM_TASKS_PER_NODE": "5,3"}, {}, r"SLURM_TASKS_PER_NODE is '5,3'"),
        (SLURM, {"num_gpus": 8}, r"--num-gpus 8: Slurm has started 4 of 8"),
    ],
)
def test_places_that_do_not_fit(environment, numbers, message):
    with pytest.raises(ConfigError, match=message):
        place(environment, **numbers)
