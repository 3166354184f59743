"""Long runs keep their memory and their files: figures of the process and of those that load its data."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("detectron2")

from detectron2.engine import HookBase

from nonlocal_det import get_config
from nonlocal_det.engine import Trainer

MASK = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x_nl.yaml"
PROC = Path("/proc")

SLOW = [pytest.mark.slow, pytest.mark.timeout(3600)]

pytestmark = [
    pytest.mark.usefixtures("fresh_logging"),
    pytest.mark.filterwarnings("ignore"),  # pytest would keep every warning
    pytest.mark.skipif(not (PROC / "self" / "smaps_rollup").exists(), reason="reads Linux's /proc"),
]


class Figures(HookBase):
    """Notes memory in bytes, open files, threads and child processes, all children included.

    Memory that several processes share counts once.
    """

    def __init__(self, period: int) -> None:
        self.period = period
        self.found: list[tuple[int, int, int, int]] = []

    def after_step(self) -> None:
        if (self.trainer.iter + 1) % self.period == 0:
            gc.collect()
            children = multiprocessing.active_children()
            processes = [
                PROC / str(process.pid) for process in (multiprocessing.current_process(), *children)
            ]
            self.found.append(
                (
                    sum(proportional_memory(process) for process in processes),
                    sum(len(os.listdir(process / "fd")) for process in processes),
                    sum(len(os.listdir(process / "task")) for process in processes),
                    len(children),
                )
            )


def proportional_memory(process: Path) -> int:
    # Not that of files: other programs share the libraries, and come and go.
    (found,) = re.findall(r"^Pss_Anon:\s+(\d+) kB", (process / "smaps_rollup").read_text(), re.MULTILINE)
    return 1024 * int(found)


@pytest.mark.parametrize(
    ("iterations", "workers"),
    [(100, 1), pytest.param(2000, 0, marks=SLOW), pytest.param(2000, 2, marks=SLOW)],
)
def test_memory_and_files_stay_flat(small_options, mini_coco, tmp_path, iterations, workers):
    options = {
        "DATASETS.TRAIN": ("mini_train",),
        "DATASETS.TEST": ("mini_val",),
        "SOLVER.MAX_ITER": iterations,
        "SOLVER.CHECKPOINT_PERIOD": iterations // 20,
        "TEST.EVAL_PERIOD": iterations // 4,
        "DATALOADER.NUM_WORKERS": workers,
        "SEED": 1,
        "OUTPUT_DIR": str(tmp_path),
    }
    trainer = Trainer(get_config(MASK, small_options(options)))
    figures = Figures(iterations // 50)
    trainer.register_hooks([figures])
    trainer.train()

    memory, *counts = np.array(figures.found[15:]).T  # after the first evaluation and the first log
    # Evaluations move it by some MB up or down; after the last one it must stay where it is.
    after = memory[-12:]
    slope = np.polyfit(np.arange(len(after)) * figures.period, after, 1)[0]
    grown = (memory[-1] - memory[0]) / 2**20
    print(
        f"{iterations} iterations, {workers} workers: {slope:.0f} bytes each after the last evaluation, "
        f"{grown:+.0f} MiB since the first, {memory[-1] / 2**20:.0f} MiB in the end"
    )
    for numbers in counts:
        first, second = np.array_split(numbers, 2)
        assert second.min() <= first.min(), numbers  # the writer's thread opens a file now and then
    if iterations >= 2000:
        assert slope < 2048  # 90,000 iterations: 180 MiB
        assert grown < 64  # by three evaluations
    assert len(list(tmp_path.glob("model_*.pth"))) == 5
