"""Two processes do what one would: gradients, synchronised batch norms and evaluation. They start once."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("detectron2")

from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.engine import create_ddp_model
from detectron2.layers import ShapeSpec
from detectron2.modeling import build_backbone, build_model
from detectron2.modeling.roi_heads import build_keypoint_head
from detectron2.structures import BitMasks, Boxes, Instances
from detectron2.utils import comm
from detectron2.utils.events import EventStorage

from nonlocal_det import get_config
from nonlocal_det.engine.evaluation import evaluate
from nonlocal_det.engine.launch.processes import launch_processes
from nonlocal_det.engine.preemption import StopRequest
from nonlocal_det.errors import Preempted
from nonlocal_det.layers import NonLocalBlock

MASK = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x_nl.yaml"
KEYPOINT = "COCO-Keypoints/keypoint_rcnn_R_101_FPN_3x_nl_head.yaml"
PAIRWISE = ("embedded_gaussian", "gaussian", "dot_product", "concatenation")
#: Number of RoIs in each process.
ROIS = ((3, 0), (0, 2), (2, 1), (0, 0))
SETS = {"five": 5, "one": 1, "two": 2}

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="starts processes on the CPU"),
    pytest.mark.usefixtures("fresh_logging"),
]


def filled(model: nn.Module) -> nn.Module:
    """The model in float64, with weights that are never 0, as W_z is at the start."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.double().parameters():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def mean_of_images(output) -> torch.Tensor:
    """A loss that is the mean over the images of a loss of each."""
    maps = output.values() if isinstance(output, dict) else [output]
    return sum((x.sin() + 0.1 * x**2).flatten(1).mean(1).mean() for x in maps)


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: x.grad.clone() for name, x in model.named_parameters() if x.grad is not None}


def part(batch, rank: int, processes: int):
    """The share of one process; all of it for a single one."""
    size = len(batch) // processes
    return batch[rank * size : (rank + 1) * size]


def of_blocks(options: dict, rank: int, processes: int) -> dict:
    found = {}
    for pairwise in PAIRWISE:
        model = filled(NonLocalBlock(6, pairwise=pairwise, norm="GN"))
        wrapped = create_ddp_model(model, device_ids=None)
        mean_of_images(wrapped(part(numbers(4, 6, 7, 5), rank, processes))).backward()
        found[pairwise] = gradients(model)
    return found


def of_backbone(options: dict, rank: int, processes: int) -> dict:
    cfg = get_config(MASK, [*options["mask"], "MODEL.RESNETS.NORM", "LN", "MODEL.RESNETS.DEPTH", 50])
    model = filled(build_backbone(cfg))
    assert any("non_local" in name for name, _ in model.named_parameters())
    wrapped = create_ddp_model(model, device_ids=None)
    mean_of_images(wrapped(part(numbers(4, 3, 64, 64), rank, processes))).backward()
    return gradients(model)


def detector_images() -> list[dict]:
    generator = torch.Generator().manual_seed(2)
    images = []
    for number in range(4):
        masks = torch.zeros(2, 64, 96, dtype=torch.bool)
        masks[0, 5:40, 8 + number : 50] = True
        masks[1, 20:60, 30 : 80 + number] = True
        boxes = Boxes(torch.tensor([[8.0 + number, 5, 50, 40], [30, 20, 80.0 + number, 60]]))
        instances = Instances(
            (64, 96), gt_boxes=boxes, gt_classes=torch.tensor([3, 7]), gt_masks=BitMasks(masks)
        )
        image = torch.randint(0, 255, (3, 64, 96), generator=generator, dtype=torch.uint8)
        images.append({"image": image, "instances": instances, "height": 64, "width": 96})
    return images


def of_detector(options: dict, rank: int, processes: int) -> dict:
    """The gradients of a half of the batch, or in two processes what they make of both halves."""
    torch.manual_seed(3)
    model = build_model(get_config(MASK, [*options["mask"], "INPUT.MASK_FORMAT", "bitmask"])).train()
    wrapped = create_ddp_model(model, device_ids=None, broadcast_buffers=False)
    torch.manual_seed(10 + rank)  # of the sampling of proposals
    with EventStorage():
        sum(wrapped(part(detector_images(), rank, 2)).values()).backward()
    return gradients(model)


class Layers(nn.Module):
    """The layers of a keypoint head, without its loss."""

    def __init__(self, options: dict, norm: str) -> None:
        super().__init__()
        cfg = get_config(KEYPOINT, [*options["keypoint"], "MODEL.NONLOCAL.NORM", norm])
        self.head = build_keypoint_head(cfg, ShapeSpec(channels=16, height=14, width=14))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head.layers(x)


def of_heads(options: dict, rank: int, processes: int) -> list:
    found = []
    for counts in ROIS:
        model = filled(Layers(options, "naiveSyncBN" if processes > 1 else "BN"))
        wrapped = create_ddp_model(model, device_ids=None, broadcast_buffers=False)
        start, end = (sum(counts[:rank]), sum(counts[: rank + 1])) if processes > 1 else (0, sum(counts))
        output = wrapped(numbers(sum(counts), 16, 14, 14)[start:end])
        # The mean over all RoIs, of which each process adds its own; DDP divides by the number of processes.
        (processes / max(sum(counts), 1) * (output.sin() + 0.1 * output**2).sum()).backward()
        buffers = {name: x.clone() for name, x in model.named_buffers() if "running" in name}
        found.append({"output": output.detach(), "gradients": gradients(model), "buffers": buffers})
    return found


class Finder(nn.Module):
    """Finds the first object of each image, and nothing else."""

    def __init__(self, json_file: str, signal_at: int | None = None) -> None:
        super().__init__()
        content = json.loads(Path(json_file).read_text())
        self.objects = {x["image_id"]: x for x in reversed(content["annotations"])}
        self.classes = sorted(x["id"] for x in content["categories"])
        self.weight = nn.Parameter(torch.zeros(1))
        self.seen: list[int] = []
        self.signal_at = signal_at

    def forward(self, batch: list[dict]) -> list[dict]:
        (image,) = batch
        self.seen.append(image["image_id"])
        if len(self.seen) == self.signal_at:
            os.kill(os.getpid(), signal.SIGTERM)
        size = image["height"], image["width"]
        x, y, width, height = self.objects[image["image_id"]]["bbox"]
        place = Boxes(torch.tensor([[x, y, x + width, y + height]]))
        number = self.classes.index(self.objects[image["image_id"]]["category_id"])
        found = Instances(size, pred_boxes=place, scores=torch.tensor([0.5]))
        found.pred_classes = torch.tensor([number])
        return [{"instances": found}]


def of_evaluation(options: dict, rank: int, processes: int) -> dict:
    found = {}
    for name in SETS:
        folder = f"{options['folder']}/{processes}/{name}"
        changes = ["DATASETS.REGISTER", options["sets"], "DATASETS.TEST", (name,), "OUTPUT_DIR", folder]
        cfg = get_config(MASK, [*options["mask"], *changes, "MODEL.MASK_ON", False])
        model = Finder(f"{options['folder']}/{name}.json")
        found[name] = {"scores": evaluate(cfg, model), "seen": model.seen}
    if processes > 1:
        cfg.defrost()
        cfg.DATASETS.TEST = ("five",)
        model = Finder(f"{options['folder']}/five.json", signal_at=1 if rank == 1 else None)
        message = ""
        stop = StopRequest()
        with stop.listening():
            try:
                evaluate(cfg, model.train(), stop=stop)
            except Preempted as stopped:
                message = str(stopped)
        found["stopped"] = {"seen": model.seen, "message": message, "training": model.training}
    return found


def of_data_workers(options: dict, rank: int, processes: int) -> str:
    return multiprocessing.get_start_method()


WORK = (of_data_workers, of_blocks, of_backbone, of_detector, of_heads, of_evaluation)


def work(options: dict) -> None:
    rank, processes = comm.get_rank(), comm.get_world_size()
    found = {part.__name__: part(options, rank, processes) for part in WORK}
    torch.save(found, f"{options['folder']}/{rank}.pth")


@pytest.fixture(scope="module")
def options(small_options, mini_coco, tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("processes")
    source = json.loads((mini_coco / "coco" / "annotations" / "instances_val2017.json").read_text())
    entries = []
    for name, count in SETS.items():
        images = source["images"][:count]
        ids = {image["id"] for image in images}
        annotations = [x for x in source["annotations"] if x["image_id"] in ids]
        path = folder / f"{name}.json"
        path.write_text(json.dumps({**source, "images": images, "annotations": annotations}))
        entries.append([name, str(path), str(mini_coco / "coco" / "val2017")])
    changes = {"DATASETS.TRAIN": (), "DATASETS.TEST": ()}
    return {
        "folder": str(folder),
        "sets": entries,
        "mask": small_options(changes),
        "keypoint": small_options(changes),
    }


@pytest.fixture(scope="module")
def both(options) -> list[dict]:
    """What each of two processes found."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        launch_processes(work, 2, args=(options,))
    return [torch.load(f"{options['folder']}/{rank}.pth", weights_only=False) for rank in range(2)]


@pytest.fixture
def alone(options):
    """A function: what this process finds alone."""
    yield lambda part, rank=0: part(options, rank, 1)
    for name in SETS:
        if name in DatasetCatalog:
            DatasetCatalog.remove(name)
            MetadataCatalog.remove(name)


def assert_equal(found: dict, expected: dict, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= tolerance * max(1, value.abs().max()), name
    assert max(value.abs().max() for value in expected.values()) > 1e-3


def test_processes_start_data_workers_as_one_alone_does(both, alone):
    assert {found["of_data_workers"] for found in both} == {alone(of_data_workers)}


def test_gradients_of_the_block_are_those_of_the_whole_batch(both, alone):
    expected = alone(of_blocks)
    for found in both:
        for pairwise in PAIRWISE:
            assert_equal(found["of_blocks"][pairwise], expected[pairwise], 1e-6)


def test_gradients_of_the_wrapped_backbone_are_those_of_the_whole_batch(both, alone):
    expected = alone(of_backbone)
    for found in both:
        assert_equal(found["of_backbone"], expected, 1e-6)


def test_gradients_of_a_detector_are_the_mean_of_those_of_the_halves(both, alone):
    halves = [alone(of_detector, rank) for rank in range(2)]
    first, second = halves
    assert any((first[name] - second[name]).abs().max() > 1e-3 for name in first)
    mean = {name: (first[name] + second[name]) / 2 for name in first}
    for found in both:
        assert_equal(found["of_detector"], mean, 1e-5)  # in float32, whose rounding depends on the threads


@pytest.mark.parametrize("case", range(len(ROIS)), ids=[f"{a} and {b} RoIs" for a, b in ROIS])
def test_synchronised_norms_of_the_keypoint_head_are_those_of_all_rois(both, alone, case):
    first, second = (found["of_heads"][case] for found in both)
    for name, value in first["buffers"].items():
        assert torch.equal(value, second["buffers"][name]), name
    for name, value in first["gradients"].items():
        assert torch.equal(value, second["gradients"][name]), name
    assert (len(first["output"]), len(second["output"])) == ROIS[case]
    count = sum(ROIS[case])
    if count == 0:
        assert all((value == 0).all() for value in first["gradients"].values())
        assert all((value == ("var" in name)).all() for name, value in first["buffers"].items())
        return
    expected = alone(of_heads)[case]
    output = torch.cat([first["output"], second["output"]])
    assert (output - expected["output"]).abs().max() < 1e-9
    assert_equal(first["gradients"], expected["gradients"], 1e-6)
    samples = count * 14 * 14
    assert len(expected["buffers"]) == 8
    for name, value in expected["buffers"].items():
        if "var" in name:  # PyTorch's is multiplied by n / (n - 1)
            value = 0.9 + (value - 0.9) * (samples - 1) / samples
        assert (first["buffers"][name] - value).abs().max() < 1e-9, name


@pytest.mark.parametrize("name", SETS)
def test_evaluation_takes_each_image_once(both, alone, options, name):
    expected = alone(of_evaluation)[name]
    first, second = (found["of_evaluation"][name] for found in both)
    assert sorted(first["seen"] + second["seen"]) == sorted(expected["seen"])
    assert len(expected["seen"]) == SETS[name]
    assert abs(len(first["seen"]) - len(second["seen"])) <= 1
    one, two = (
        json.loads(Path(f"{options['folder']}/{n}/{name}/inference/coco_instances_results.json").read_text())
        for n in (1, 2)
    )
    assert len(two) == SETS[name]
    assert sorted(map(str, one)) == sorted(map(str, two))
    assert first["scores"]["bbox"] == pytest.approx(expected["scores"]["bbox"], nan_ok=True)
    assert first["scores"]["bbox"]["AP"] > 1
    assert not second["scores"]


def test_a_signal_to_one_process_cuts_the_evaluation_short_in_all(both):
    first, second = (found["of_evaluation"]["stopped"] for found in both)
    assert len(second["seen"]) == 1
    assert len(first["seen"]) == 3  # it did not know
    for found in (first, second):
        assert found["message"] == "stopped by a signal during an evaluation"
        assert found["training"]
