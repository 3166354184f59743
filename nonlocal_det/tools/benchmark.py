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
import dataclasses
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nonlocal_det.errors import UsageError
from nonlocal_det.tools.command import command, parse, positive

if TYPE_CHECKING:
    from nonlocal_det.benchmark import BlockCost, DetectorCost, Ratio

__all__ = ["main"]

CONFIG = "COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x_nl.yaml"
_MIB = 1 << 20


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; those of this process by default.

    Returns:
        The exit code: 0, or 2 for wrong input.
    """
    args = _parse(argv)
    device = _device(args.device)
    outputs = [_output(path) for path in (args.json, args.chart) if path]
    configs = _configs(args, device) if args.only != "block" else None

    from nonlocal_det.benchmark import draw_chart
    from nonlocal_det.errors import MeasurementError

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
            "blocks": [_block_record(cost) for cost in blocks],
            "growth": [_block_record(cost) for cost in growth],
            "detector": _detector_record(detector, args) if detector else None,
        }
        Path(args.json).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    if args.chart:
        caption = f"{title}, batch 1, float32"
        draw_chart(args.chart, blocks, detector, caption)
    if outputs:
        print(f"Written: {', '.join(map(str, outputs))}")
    return 0


def _measure_blocks(args: argparse.Namespace, device: str) -> tuple[list[BlockCost], list[BlockCost]]:
    """Measure and print the two tables of blocks."""
    from tqdm import tqdm

    from nonlocal_det.benchmark import block_cases, growth_cases, measure_block, measure_growth

    work = [(measure_block, case) for case in block_cases(*args.size)]
    work += [(measure_growth, case) for case in growth_cases(*args.size)]
    blocks: list[BlockCost] = []
    growth: list[BlockCost] = []
    for measure, case in tqdm(work, desc="blocks", unit="case", disable=None, leave=False):
        (blocks if measure is measure_block else growth).append(measure(case, device, args.rounds))

    print("One block beside the plain matrix form (ratios below 1: the block is cheaper)")
    rows = [
        [
            f"{cost.case.stage} {cost.case.input}",
            cost.case.pool,
            cost.case.pairwise,
            cost.case.work,
            _seconds(cost.seconds),
            _seconds(cost.reference_seconds),
            f"{cost.time.median:.2f}",
            _range(cost.time.quartiles),
            _mebibytes(cost.memory),
            _mebibytes(cost.reference_memory),
            _number(cost.memory_ratio),
        ]
        for cost in blocks
    ]
    _print_table(
        "input|pool|f|work|block|matrix|time ratio|quartiles|block MiB|matrix MiB|memory ratio", rows
    )
    print("Growth with twice the positions, forward + backward")
    rows = [
        [
            f"{cost.case.stage} {cost.case.input}",
            cost.case.pool,
            cost.case.pairwise,
            f"{cost.time.median:.2f}",
            _range(cost.time.quartiles),
            _number(cost.memory_ratio),
        ]
        for cost in growth
    ]
    _print_table("from|pool|f|time factor|quartiles|memory factor", rows)
    return blocks, growth


def _measure_detector(args: argparse.Namespace, configs: tuple[Any, Any]) -> DetectorCost:
    """Measure and print the table of the detector."""
    from nonlocal_det.benchmark import compare_detectors
    from nonlocal_det.detection.cost import DETECTIONS, PROPOSALS

    height, width = args.size
    cost = compare_detectors(*configs, height, width, args.pairs)
    print(
        f"{args.config_file} beside {args.baseline or 'itself without blocks'}, one image of {height}x{width}"
    )
    rows = [
        ["GFLOPs", *(f"{f.total / 1e9:.1f}" for f in (cost.baseline_flops, cost.flops))],
        ["million parameters", *(f"{p / 1e6:.2f}" for p in (cost.baseline_parameters, cost.parameters))],
    ]
    rows[0] += [f"{cost.flops.total / cost.baseline_flops.total:.3f}", ""]
    rows[1] += [f"{cost.parameters / cost.baseline_parameters:.3f}", ""]
    for name, step in (("training step", cost.training), ("inference", cost.inference)):
        rows.append(
            [
                name,
                _seconds(step.baseline_seconds),
                _seconds(step.seconds),
                f"{step.time.median:.3f}",
                _range(step.time.interval, 3),
            ]
        )
        rows.append(
            [
                f"{name}, peak MiB",
                _mebibytes(step.baseline_memory),
                _mebibytes(step.memory),
                _number(step.memory_ratio, 3),
                "",
            ]
        )
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


def _block_record(cost: BlockCost) -> dict[str, Any]:
    return {
        **dataclasses.asdict(cost.case),
        "seconds": cost.seconds,
        "reference_seconds": cost.reference_seconds,
        "time_ratio": _ratio_record(cost.time),
        "memory_bytes": cost.memory,
        "reference_memory_bytes": cost.reference_memory,
        "memory_ratio": cost.memory_ratio,
    }


def _detector_record(cost: DetectorCost, args: argparse.Namespace) -> dict[str, Any]:
    record: dict[str, Any] = {
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
    }
    for name, step in (("training", cost.training), ("inference", cost.inference)):
        record[name] = {
            "seconds": step.seconds,
            "baseline_seconds": step.baseline_seconds,
            "time_ratio": _ratio_record(step.time),
            "memory_bytes": step.memory,
            "baseline_memory_bytes": step.baseline_memory,
            "memory_ratio": step.memory_ratio,
        }
    return record


def _ratio_record(ratio: Ratio) -> dict[str, Any]:
    return dataclasses.asdict(ratio)


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
    """The config with blocks and the one without."""
    from nonlocal_det import get_config
    from nonlocal_det.benchmark import without_blocks
    from nonlocal_det.modeling.build import build_on_meta

    options = ["MODEL.DEVICE", device, *args.opts]
    cfg = get_config(args.config_file, options)
    baseline = without_blocks(cfg)
    if args.baseline:
        baseline = get_config(args.baseline, options)
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
    parser = argparse.ArgumentParser(
        prog="python -m nonlocal_det.tools.benchmark",
        description="Measure what blocks cost: one beside the plain matrix form, and a detector beside its "
        "baseline. Takes about 10 minutes on 2 CPU cores.",
    )
    parser.add_argument("--device", metavar="cpu|cuda", help="by default the GPU if there is one")
    parser.add_argument(
        "--only", choices=("block", "detector"), help="leave the other part out; by default both are measured"
    )
    parser.add_argument(
        "--size",
        type=_size,
        default=(800, 1344),
        metavar="HxW",
        help="the image, in multiples of 32 (default 800x1344); a block's input is 1/16 and 1/8 of it",
    )
    parser.add_argument(
        "--rounds",
        type=positive,
        default=5,
        help="runs of a block, fewer if they take long (default %(default)s)",
    )
    parser.add_argument(
        "--pairs",
        type=positive,
        default=10,
        help="runs of the detector and its baseline (default %(default)s; 6 or more give an interval)",
    )
    parser.add_argument(
        "--config-file",
        default=CONFIG,
        metavar="FILE",
        help="a detector with blocks: a path, or a name under the project's configs/ (default %(default)s)",
    )
    parser.add_argument(
        "--baseline", metavar="FILE", help="what it is compared with (default: itself without blocks)"
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    parser.add_argument("--chart", metavar="FILE.png", help="draw the ratios")
    parser.add_argument(
        "--opts",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="KEY VALUE",
        help="overrides of both configs, last on the line, such as MODEL.NONLOCAL.POOL none",
    )
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
