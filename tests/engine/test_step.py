from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("detectron2")

from detectron2.engine import HookBase, create_ddp_model
from detectron2.utils import comm
from detectron2.utils.env import seed_all_rng
from detectron2.utils.events import EventStorage
from torch import nn

from nonlocal_det import ConfigError, get_config
from nonlocal_det.data.loader import TrainLoader
from nonlocal_det.data.order import EpochOrder
from nonlocal_det.engine.launch.processes import launch_processes
from nonlocal_det.engine.loop import Trainer
from nonlocal_det.engine.preemption import StopRequest
from nonlocal_det.engine.replay import replay_batch
from nonlocal_det.engine.step import TrainingStep
from nonlocal_det.engine.task import all_tasks
from nonlocal_det.errors import NonFiniteLossError

MASK = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x_nl.yaml"

pytestmark = pytest.mark.usefixtures("fresh_logging")


@pytest.fixture
def options(small_options, mini_coco):
    def make(output: Path, **changes) -> list:
        options = {
            "DATASETS.TRAIN": ("mini_train",),
            "DATASETS.TEST": (),
            "SOLVER.MAX_ITER": 4,
            "SEED": 1,
            "OUTPUT_DIR": str(output),
            **{key.replace("__", "."): value for key, value in changes.items()},
        }
        return small_options(options)

    return make


class Spoil(HookBase):
    """Spoils the output of a part of the model in some iterations, and notes which changed the model."""

    def __init__(self, part: str, iterations: list[int], rank: int = 0) -> None:
        self.part, self.iterations, self.active = part, iterations, comm.get_rank() == rank
        self.changed: list[int] = []

    def before_train(self) -> None:
        model = self.trainer.checkpointer.model
        model.get_submodule(self.part).register_forward_hook(self.spoil)

    def spoil(self, module, inputs, output):
        if not (self.active and self.trainer.iter in self.iterations):
            return None
        if self.part == "proposal_generator":
            raise FloatingPointError("Predicted boxes or scores contain Inf/NaN. Training has diverged.")
        if self.part == "backbone.bottom_up.stem":
            return output * math.inf
        proposals, losses = output
        return proposals, {**losses, "loss_mask": losses["loss_mask"] * math.inf}

    def before_step(self) -> None:
        self.before = {k: v.clone() for k, v in self.trainer.checkpointer.model.state_dict().items()}

    def after_step(self) -> None:
        after = self.trainer.checkpointer.model.state_dict()
        if any(not torch.equal(after[name], value) for name, value in self.before.items()):
            self.changed.append(self.trainer.iter)


def train(options: list, *hooks: HookBase) -> Trainer:
    cfg = get_config(MASK, options)
    seed_all_rng(cfg.SEED + comm.get_rank())
    trainer = Trainer(cfg)
    trainer.register_hooks(list(hooks))
    trainer.resume_or_load(resume=True)
    trainer.train()
    return trainer


def test_a_stop_names_everything_and_can_be_replayed(options, tmp_path, caplog):
    class Poison(HookBase):
        def before_step(self) -> None:
            if self.trainer.iter == 2:
                with torch.no_grad():
                    self.trainer.model.roi_heads.box_predictor.cls_score.bias[3] = math.nan

    with pytest.raises(NonFiniteLossError) as raised:
        train(options(tmp_path), Poison())
    message = str(raised.value)
    assert "Traceback" not in caplog.text
    path = tmp_path / "nonfinite_0000002_rank0.pth"
    found = re.fullmatch(
        r"SOLVER\.SKIP_NONFINITE_STEPS is 0: no step is left to skip in iteration 2: loss_cls is nan for "
        r"(\S+\.jpg) \(id (\d+)\), (\S+\.jpg) \(id (\d+)\); "
        rf"batch and weights are in {re.escape(str(path))}; "
        r"lower SOLVER\.BASE_LR, .*",
        message,
    )
    assert found, message
    assert int(Path(found[1]).stem) == int(found[2])
    batch = torch.load(path, weights_only=True)["batch"]
    assert [image["image_id"] for image in batch] == [int(found[2]), int(found[4])]

    trainer = Trainer(get_config(MASK, options(tmp_path / "other", SEED=5)))
    for _ in range(2):
        losses = replay_batch(trainer.model, path)
        assert [name for name, value in losses.items() if not value.isfinite()] == ["loss_cls"]
        assert losses["loss_mask"].item() == pytest.approx(0.6931, abs=0.01)
    # The batch is whole: masks and boxes are those of the data set.
    loaded = next(iter(trainer.task.build_train_loader(get_config(MASK, options(tmp_path)), 1)))
    assert loaded[0].keys() == batch[0].keys()


@pytest.mark.parametrize("part", ["roi_heads", "proposal_generator", "backbone.bottom_up.stem"])
def test_skipped_steps_change_nothing(options, tmp_path, caplog, part):
    spoil = Spoil(part, [1, 2])
    trainer = train(options(tmp_path, SOLVER__SKIP_NONFINITE_STEPS=2), spoil)
    assert spoil.changed == [0, 3]  # running statistics are restored, too
    assert all(value.isfinite().all() for value in trainer.model.state_dict().values())
    assert "Skipped step 2 of at most 2, iteration 2: " in caplog.text
    what = "loss_mask is inf" if part == "roi_heads" else "the proposals are not finite"
    assert f"iteration 1: {what} for " in caplog.text
    # The count is part of the checkpoint.
    changes = {"SOLVER__SKIP_NONFINITE_STEPS": 2, "SOLVER__MAX_ITER": 6}
    with pytest.raises(NonFiniteLossError, match="is 2: no step is left to skip in iteration 5"):
        train(options(tmp_path, **changes), Spoil(part, [5]))


def skip_in_rank_1(options: list, folder: str) -> None:
    for part in ("roi_heads", "proposal_generator"):
        spoil = Spoil(part, [1], rank=1)
        trainer = train([*options, "OUTPUT_DIR", f"{folder}/{part}"], spoil)
        assert spoil.changed == [0, 2, 3]
        weights = torch.cat([value.flatten() for value in trainer.model.parameters()])
        first, second = comm.all_gather(weights.detach())
        assert torch.equal(first, second)
    train(
        [*options, "OUTPUT_DIR", f"{folder}/stopped", "SOLVER.SKIP_NONFINITE_STEPS", 0], Spoil(part, [1], 1)
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="starts processes on the CPU")
def test_all_processes_skip_what_one_must(options, mini_coco, tmp_path, monkeypatch):
    monkeypatch.setenv("DETECTRON2_DATASETS", str(mini_coco))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    changes = {"DATASETS__TRAIN": ("coco_2017_train",), "SOLVER__SKIP_NONFINITE_STEPS": 1}
    with pytest.raises(NonFiniteLossError, match=r"is 0: .* iteration 1: the proposals .*_rank1\.pth"):
        launch_processes(skip_in_rank_1, 2, args=(options(tmp_path, **changes), str(tmp_path)))
    assert (tmp_path / "roi_heads" / "nonfinite_0000001_rank1.pth").is_file()
    assert not list(tmp_path.glob("*/nonfinite_*_rank0.pth"))


@pytest.mark.parametrize(
    ("key", "value"), [("SOLVER.SKIP_NONFINITE_STEPS", -1), ("DATALOADER.MAX_BAD_FRACTION", 1.5)]
)
def test_wrong_limits(options, tmp_path, key, value):
    with pytest.raises(ConfigError, match=f"{key} is {value}: must be "):
        get_config(MASK, options(tmp_path, **{key: value}))


class Line(nn.Module):
    """A loss that is a weight times the mean of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, batch: list) -> dict:
        return {"loss": self.weight * sum(batch) / len(batch), "loss_other": self.weight**2}


#: What torch.distributed's users and Detectron2's comm call. DDP's own collectives go another way.
COLLECTIVES = ("all_gather", "all_reduce", "all_gather_object", "gather_object", "broadcast", "barrier")


def count_collectives(folder: str) -> None:
    """Do four steps; write which collectives the last three have called."""
    data = [{"file_name": f"{number}.png", "image_id": number} for number in range(9)]
    loader = TrainLoader(
        *(data, lambda image: float(image["image_id"]), EpochOrder(len(data))),
        **{"seed": 1, "batch_size": 2, "rank": comm.get_rank(), "processes": comm.get_world_size()},
    )
    model = create_ddp_model(Line(), broadcast_buffers=False, device_ids=None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = TrainingStep(model, loader, optimizer, task=all_tasks()[0], folder=folder, stop=StopRequest())
    called = []

    def counted(name: str):
        original = getattr(torch.distributed, name)
        return lambda *args, **kwargs: called.append(name) or original(*args, **kwargs)

    with EventStorage() as storage, pytest.MonkeyPatch.context() as patch:
        step(0, storage)
        for name in COLLECTIVES:
            patch.setattr(torch.distributed, name, counted(name))
        for iteration in range(1, 4):
            step(iteration, storage)
    Path(folder, f"{comm.get_rank()}.json").write_text(json.dumps(called))


def test_one_process_uses_no_collective(tmp_path):
    count_collectives(str(tmp_path))
    assert json.loads((tmp_path / "0.json").read_text()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="starts processes on the CPU")
def test_a_step_of_several_processes_uses_one_collective_beside_ddps(tmp_path):
    launch_processes(count_collectives, 2, args=(str(tmp_path),))
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == ["all_gather"] * 3
