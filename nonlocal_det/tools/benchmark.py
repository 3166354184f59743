"""Measure what blocks cost: one beside the plain matrix form, and a detector beside its baseline.

Examples:
    python -m nonlocal_det.tools.benchmark --json benchmark.json --chart benchmark.png
    python -m nonlocal_det.tools.benchmark --device cuda
    python -m nonlocal_det.tools.benchmark --only detector --config-file FILE --baseline FILE --pairs 20

Each figure of a block comes from a process of its own; the two that are compared take turns. Memory is the
peak above what the process holds just before. A detector is measured with random weights and one image.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nonlocal_det.errors import MeasurementError, UsageError
from nonlocal_det.tools.command import add_opts, command, make_parser, parse, positive

if TYPE_CHECKING:
    from nonlocal_det.benchmark.block import BlockCost
    from nonlocal_det.benchmark.detector import DetectorCost
    from nonlocal_det.benchmark.ratio import StepCost

CONFIG = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x_nl.yaml"
_MIB = 1 << 20


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code: 0, or 2 for wrong input."""
    args = _parse(argv)
    device = _device(args.device)
    outputs = [_output(path) for path in (args.json, args.chart) if path]
    configs = _configs(args, device) if args.only != "block" else None

    from nonlocal_det.benchmark.chart import draw_chart

    environment = _environment(device)
    title = "{device}, PyTorch {torch}, {threads} CPU threads".format(**environment)
    print(f"{title}\n")
    try:
        blocks, growth = _measure_blocks(args, device) if args.only != "detector" else ([], [])
        detector = _measure_detector(args, configs) if configs else None
    except MeasurementError as error:
        raise UsageError(f"{error}; give a smaller --size") from None
    if args.json:
        content = {
            "environment": environment,
            "blocks": [{**asdict(cost.case), **_step_record(cost, "reference")} for cost in blocks],
            "growth": [{**asdict(cost.case), **_step_record(cost, "reference")} for cost in growth],
            "detector": _detector_record(detector, args) if detector else None,
        }
        Path(args.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if args.chart:
        draw_chart(args.chart, blocks, detector, f"{title}, batch 1, float32")
    if outputs:
        print(f"Written: {', '.join(map(str, outputs))}")
    return 0


def _measure_blocks(args: argparse.Namespace, device: str) -> tuple[list[BlockCost], list[BlockCost]]:
    """Measure and print the two tables of blocks."""
    from tqdm import tqdm

    from nonlocal_det.benchmark import block

    work = [(block.measure_block, case) for case in block.block_cases(*args.size)]
    work += [(block.measure_growth, case) for case in block.growth_cases(*args.size)]
    costs: dict[Any, list[BlockCost]] = {block.measure_block: [], block.measure_growth: []}
    for measure, case in tqdm(work, desc="blocks", unit="case", disable=None, leave=False):
        costs[measure].append(measure(case, device, args.rounds))
    blocks, growth = costs.values()

    print("One block beside the plain matrix form (ratios below 1: the block is cheaper)")
    heads = "input|pool|f|work|block|matrix|time ratio|quartiles|block MiB|matrix MiB|memory ratio"
    rows = [
        [
            *_case_cells(cost),
            "forward + backward" if cost.case.backward else "forward",
            *map(_seconds, (cost.seconds, cost.reference_seconds)),
            _number(cost.time.median),
            _range(cost.time.quartiles),
            *map(_mebibytes, (cost.memory, cost.reference_memory)),
            _number(cost.memory_ratio),
        ]
        for cost in blocks
    ]
    _print_table(heads, rows)
    print("Growth with twice the positions, forward + backward")
    rows = [
        [*_case_cells(c), _number(c.time.median), _range(c.time.quartiles), _number(c.memory_ratio)]
        for c in growth
    ]
    _print_table("from|pool|f|time factor|quartiles|memory factor", rows)
    return blocks, growth


def _case_cells(cost: BlockCost) -> list[str]:
    return [f"{cost.case.stage} {cost.case.input}", cost.case.pool, cost.case.pairwise]


def _measure_detector(args: argparse.Namespace, configs: tuple[Any, Any]) -> DetectorCost:
    """Measure and print the table of the detector."""
    from nonlocal_det.benchmark.detector import compare_detectors
    from nonlocal_det.detection.cost import DETECTIONS, PROPOSALS

    height, width = args.size
    cost = compare_detectors(*configs, height, width, args.pairs)
    beside = args.baseline or "itself without blocks"
    print(f"{args.config_file} beside {beside}, one image of {height}x{width}")
    flops = (cost.baseline_flops.total / 1e9, cost.flops.total / 1e9)
    millions = (cost.baseline_parameters / 1e6, cost.parameters / 1e6)
    rows = [
        ["GFLOPs", *(_number(value, 1) for value in flops), _number(flops[1] / flops[0], 3), ""],
        ["million parameters", *map(_number, millions), _number(millions[1] / millions[0], 3), ""],
    ]
    for name, step in (("training step", cost.training), ("inference", cost.inference)):
        seconds = (_seconds(step.reference_seconds), _seconds(step.seconds))
        rows.append([name, *seconds, _number(step.time.median, 3), _range(step.time.interval, 3)])
        memory = (_mebibytes(step.reference_memory), _mebibytes(step.memory))
        rows.append([f"{name}, peak MiB", *memory, _number(step.memory_ratio, 3), ""])
    _print_table("|baseline|with blocks|ratio|95 % interval", rows)
    print(
        f"FLOPs are multiply-adds, counted for {PROPOSALS:,} proposals and {DETECTIONS} detections. Times "
        f"are medians of {args.pairs} pairs; inference had {cost.detections} detections.\n"
    )
    if cost.flops.uncounted:
        print(f"warning: these operators are not counted: {', '.join(sorted(cost.flops.uncounted))}")
    return cost


def _print_table(heads: str, rows: list[list[str]]) -> None:
    from tabulate import tabulate

    print(tabulate(rows, heads.split("|"), "pipe", disable_numparse=True), end="\n\n")


def _step_record(cost: StepCost, reference: str) -> dict[str, Any]:
    return {
        "seconds": cost.seconds,
        f"{reference}_seconds": cost.reference_seconds,
        "time_ratio": asdict(cost.time),
        "memory_bytes": cost.memory,
        f"{reference}_memory_bytes": cost.reference_memory,
        "memory_ratio": cost.memory_ratio,
    }


def _detector_record(cost: DetectorCost, args: argparse.Namespace) -> dict[str, Any]:
    return {
        "config_file": args.config_file,
        "baseline": args.baseline,
        "size": list(args.size),
        "flops": {**cost.flops.parts, "total": cost.flops.total},
        "baseline_flops": {**cost.baseline_flops.parts, "total": cost.baseline_flops.total},
        "flops_ratio": cost.flops.total / cost.baseline_flops.total,
        "uncounted": sorted(cost.flops.uncounted | cost.baseline_flops.uncounted),
        "parameters": cost.parameters,
        "baseline_parameters": cost.baseline_parameters,
        "parameters_ratio": cost.parameters / cost.baseline_parameters,
        "detections": cost.detections,
        "training": _step_record(cost.training, "baseline"),
        "inference": _step_record(cost.inference, "baseline"),
    }


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1000:.1f} ms"


def _mebibytes(value: int | None) -> str:
    return "-" if value is None else f"{value / _MIB:,.0f}"


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _range(ends: tuple[float, float] | None, digits: int = 2) -> str:
    return "-" if ends is None else f"{ends[0]:.{digits}f} to {ends[1]:.{digits}f}"


def _environment(device: str) -> dict[str, Any]:
    import torch

    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else f"CPU, {platform.machine()}"
    return {"device": name, "torch": torch.__version__, "threads": torch.get_num_threads()}


def _device(name: str | None) -> str:
    """Check --device; by default the GPU if there is one."""
    import torch

    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise UsageError(f"--device {name}: write cpu or cuda")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            raise UsageError(f"--device {name}: PyTorch sees no CUDA device here; write --device cpu")
        if (device.index or 0) >= count:
            raise UsageError(f"--device {name}: there are {count} CUDA devices, counted from 0")
    return name


def _configs(args: argparse.Namespace, device: str) -> tuple[Any, Any]:
    """Return the config with blocks and the one without."""
    from nonlocal_det import get_config
    from nonlocal_det.benchmark.detector import without_blocks
    from nonlocal_det.engine.task import find_task
    from nonlocal_det.modeling.build import build_on_meta

    options = ["MODEL.DEVICE", device, *args.opts]
    cfg = get_config(args.config_file, options)
    baseline = without_blocks(cfg)
    if args.baseline:
        baseline = get_config(args.baseline, options)
    find_task(cfg).release_data()
    for one in (cfg, baseline):  # what cannot be built is said before minutes are spent on the blocks
        build_on_meta(one)
    return cfg, baseline


def _output(path: str) -> Path:
    """Find out whether a file can be written before minutes are spent on its content."""
    file = Path(path)
    if file.is_dir():
        raise UsageError(f"{path} is a folder; name a file in it")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.open("a").close()
    return file


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(
        "benchmark",
        "Measure what blocks cost: one beside the plain matrix form, and a detector beside its baseline. "
        "Takes about 10 minutes on 2 CPU cores.",
    )
    add = parser.add_argument
    add("--device", metavar="cpu|cuda", help="by default the GPU if there is one")
    parts = ("block", "detector")
    add("--only", choices=parts, help="leave the other part out; by default both are measured")
    size = "the image, in multiples of 32 (default 800x1344); a block's input is 1/16 and 1/8 of it"
    add("--size", type=_size, default=(800, 1344), metavar="HxW", help=size)
    rounds = "runs of a block, fewer if they take long (default %(default)s)"
    add("--rounds", type=positive, default=5, help=rounds)
    pairs = "runs of the detector and its baseline (default %(default)s; 6 or more give an interval)"
    add("--pairs", type=positive, default=10, help=pairs)
    config = "a detector with blocks: a path, or a name under the project's configs/ (default %(default)s)"
    add("--config-file", default=CONFIG, metavar="FILE", help=config)
    add("--baseline", metavar="FILE", help="what it is compared with (default: itself without blocks)")
    add("--json", metavar="FILE", help="write all figures")
    add("--chart", metavar="FILE.png", help="draw the ratios")
    add_opts(parser, "overrides of both configs, last on the line, such as MODEL.NONLOCAL.POOL none")
    args = parse(parser, argv)
    if args.chart and Path(args.chart).suffix.lower() != ".png":
        raise UsageError(f"--chart {args.chart}: the chart is a PNG; write a name ending in .png")
    return args


def _size(text: str) -> tuple[int, int]:
    try:
        height, width = (int(part) for part in text.lower().split("x"))
    except ValueError:
        height = width = 0
    if height < 64 or width < 64 or height % 32 or width % 32:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not HEIGHTxWIDTH in multiples of 32 from 64 up, as 800x1344"
        )
    return height, width


if __name__ == "__main__":
    sys.exit(main())
