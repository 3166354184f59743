"""One command under torchrun and Slurm: the processes find each other, are stopped, and go on."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("detectron2")

MASK = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x_nl.yaml"
ROOT = Path(__file__).resolve().parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
SLOW = [pytest.mark.slow, pytest.mark.timeout(1200)]

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="starts processes on the CPU"),
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's signals"),
]

#: What each process is, by launch_processes; the last one fails if it is asked to.
SCRIPT = """
import json, sys
from torch import distributed
from detectron2.utils import comm
from nonlocal_det.engine.launch.processes import launch_processes

def main(folder, fail):
    rank, local = comm.get_rank(), [comm.get_local_rank(), comm.get_local_size()]
    found = [rank, comm.get_world_size(), *local, distributed.get_backend()]
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(found, file)
    if fail and rank == comm.get_world_size() - 1:
        raise ZeroDivisionError("a fault of the program")
    comm.synchronize()

if __name__ == "__main__":
    launch_processes(main, args=(sys.argv[1], len(sys.argv) > 2))
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def slurm(task: int, tasks: int = 2) -> dict[str, str]:
    """What srun sets for a task, all of them on this machine."""
    return {
        "SLURM_JOB_ID": str(free_port()),
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(task),
        "SLURM_LOCALID": str(task),
        "SLURM_NTASKS": str(tasks),
        "SLURM_TASKS_PER_NODE": str(tasks),
        "SLURM_JOB_NODELIST": "localhost",
    }


def start(*command: object, **environment: str) -> subprocess.Popen:
    known = {key: value for key, value in os.environ.items() if not key.startswith("SLURM")}
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        list(map(str, command)),
        env={**known, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(*processes: subprocess.Popen) -> list[tuple[int, str]]:
    """Exit code and output of each."""
    try:
        outputs = [process.communicate(timeout=280)[0] for process in processes]
        return [(process.returncode, text) for process, text in zip(processes, outputs, strict=True)]
    finally:
        for process in processes:
            process.kill()


def agents(*flags: object) -> list[list[object]]:
    """The command lines of two agents of torchrun, as on two machines."""
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "7"]
    return [[*TORCHRUN, "--nnodes", 2, "--node-rank", node, *meeting, *flags] for node in range(2)]


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_two_agents_of_torchrun(script, tmp_path):
    done = finish(*(start(*agent, "--nproc-per-node", 1, script, tmp_path) for agent in agents()))
    assert [code for code, _ in done] == [0, 0], done
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert found == [[0, 2, 0, 1, "gloo"], [1, 2, 0, 1, "gloo"]]


def test_tasks_of_slurm(script, tmp_path):
    environments = [{**slurm(task), "SLURM_JOB_ID": "4711"} for task in range(2)]
    tasks = [start(sys.executable, script, tmp_path, **environment) for environment in environments]
    done = finish(*tasks)
    assert [code for code, _ in done] == [0, 0], done
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert found == [[0, 2, 0, 2, "gloo"], [1, 2, 1, 2, "gloo"]]
    assert done[0][1].startswith("Waiting for the other 1 tasks of Slurm at tcp://localhost:")


def test_a_fault_under_torchrun_ends_all_and_its_traceback_comes_first(script, tmp_path):
    command = [*TORCHRUN, "--standalone", "--nproc-per-node", 2, script, tmp_path, "fail"]
    ((code, text),) = finish(start(*command))
    assert code == 1
    first = text[text.index("failed:\nTraceback") :]
    assert text.index("Process 1 of 2 failed:") < text.index(first)
    assert "ZeroDivisionError: a fault of the program" in first.split("\n\n")[0]


@pytest.fixture
def train(small_options, mini_coco, tmp_path):
    """A function: the command line of a small run after the launcher's."""

    def command(name: str, iterations: int, *flags: str) -> list[object]:
        options = {
            "DATASETS.TRAIN": ("coco_2017_train",),
            "DATASETS.TEST": ("coco_2017_val",),
            "DATALOADER.NUM_WORKERS": 1,
            "SOLVER.MAX_ITER": iterations,
            "SEED": 1,
            "OUTPUT_DIR": str(tmp_path / name),
        }
        return [ROOT / "train_net.py", "--config-file", MASK, *flags, *small_options(options)]

    return command


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(folder / "model_final.pth", weights_only=True)["model"]


def assert_same(folder: Path, other: Path) -> None:
    found, expected = weights(folder), weights(other)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    results = "inference/coco_instances_results.json"
    assert sorted((folder / results).read_text()) == sorted((other / results).read_text())


def wait_for(path: Path, text: str, process: subprocess.Popen) -> None:
    until = time.monotonic() + 200
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < until
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


class TestTraining:
    """The same run by all launchers ends with the same bits."""

    pytestmark = SLOW

    def test_all_launchers(self, train, tmp_path, mini_coco):
        data = {"DETECTRON2_DATASETS": str(mini_coco)}
        own = start(sys.executable, *train("own", 4, "--num-gpus", "2"), **data)
        assert finish(own)[0][0] == 0
        one = start(*TORCHRUN, "--standalone", "--nproc-per-node", 2, *train("one", 4), **data)
        assert finish(one)[0][0] == 0
        two = [start(*agent, "--nproc-per-node", 1, *train("two", 4), **data) for agent in agents()]
        assert [code for code, _ in finish(*two)] == [0, 0]
        job = str(free_port())
        three = [
            start(sys.executable, *train("three", 4), **data, **{**slurm(task), "SLURM_JOB_ID": job})
            for task in range(2)
        ]
        assert [code for code, _ in finish(*three)] == [0, 0]
        for name in ("one", "two", "three"):
            assert_same(tmp_path / name, tmp_path / "own")

    def test_preemption_under_torchrun(self, train, tmp_path, mini_coco):
        data = {"DETECTRON2_DATASETS": str(mini_coco)}
        launcher = [*TORCHRUN, "--standalone", "--nproc-per-node", 2]
        straight = start(*launcher, *train("straight", 60, "--resume"), **data)
        assert finish(straight)[0][0] == 0
        command = train("stopped", 60, "--resume")
        first = start(*launcher, *command, **data)
        wait_for(tmp_path / "stopped" / "log.txt", "Starting training from iteration 0", first)
        time.sleep(1)
        # As a scheduler does: to the agent, which passes it on, and to all that it has started.
        children = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
        for process in (first.pid, *map(int, children)):
            os.kill(process, signal.SIGTERM)
        ((code, text),) = finish(first)
        assert code != 0
        assert text.count("stopped by a signal after") == 2
        assert not (tmp_path / "stopped" / "model_final.pth").exists()
        ((code, text),) = finish(start(*launcher, *command, **data))
        assert code == 0, text
        assert "Starting training from iteration 0" not in text
        assert_same(tmp_path / "stopped", tmp_path / "straight")

    def test_preemption_of_a_worker_under_torchrun(self, train, tmp_path, mini_coco):
        data = {"DETECTRON2_DATASETS": str(mini_coco)}
        command = [*TORCHRUN, "--standalone", "--nproc-per-node", 2, *train("run", 10_000, "--resume")]
        agent = start(*command, **data)
        wait_for(tmp_path / "run" / "log.txt", "Starting training from iteration 0", agent)
        children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGUSR1)
        ((code, text),) = finish(agent)
        assert code == 1
        assert text.count("stopped by a signal after") == 2
        assert "exitcode  : 75" in text

    def test_preemption_under_slurm(self, train, tmp_path, mini_coco):
        data = {"DETECTRON2_DATASETS": str(mini_coco), "SLURM_JOB_ID": str(free_port())}
        environments = [{**slurm(task), **data} for task in range(2)]
        command = train("run", 10_000, "--resume")
        tasks = [start(sys.executable, *command, **environment) for environment in environments]
        wait_for(tmp_path / "run" / "log.txt", "Starting training from iteration 0", tasks[0])
        for task in tasks:
            task.send_signal(signal.SIGUSR1)
        assert [code for code, _ in finish(*tasks)] == [75, 75]
        (last,) = [tmp_path / "run" / (tmp_path / "run" / "last_checkpoint").read_text()]
        assert last.exists()
