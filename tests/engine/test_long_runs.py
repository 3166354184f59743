"""Long runs keep their memory and their files: figures of the process and of those that load its data."""

from __future__ import annotations

import ctypes
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
from nonlocal_det.engine.loop import Trainer

MASK = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x_nl.yaml"
PROC = Path("/proc")
LIBC = ctypes.CDLL(None)

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
            if hasattr(LIBC, "malloc_trim"):
                LIBC.malloc_trim(0)  # else what is free, but not given back, moves the figures by 20 MB
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
    figures = Figures(iterations // 20)
    trainer.register_hooks([figures])
    trainer.train()

    # After the first evaluation and log. A thousand values are kept of each metric, so of a long run
    # the second half shows what goes on growing.
    memory, *counts = np.array(figures.found[5:]).T
    half = memory[-10:]
    slope = np.polyfit(np.arange(len(half)) * figures.period, half, 1)[0]
    print(
        f"{iterations} iterations, {workers} workers: {slope:.0f} bytes each in the second half, "
        f"{half[-1] / 2**20:.0f} MiB in the end; files, threads, children: {counts}"
    )
    for numbers in counts:
        first, second = np.array_split(numbers, 2)
        assert second.min() <= first.min(), numbers  # the writer's thread opens a file now and then
    if iterations >= 2000:
        assert slope < 2048  # 90,000 iterations: 180 MiB
    assert len(list(tmp_path.glob("model_*.pth"))) == 5
