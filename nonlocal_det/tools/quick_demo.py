"""Train a small detector with non-local blocks on the built-in data set, evaluate it and draw what it finds.

Example:
    python -m nonlocal_det.tools.quick_demo --output output/demo

Needs no GPU, no data and no download. An interrupted run goes on where it was; one that is complete is
evaluated and drawn again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from nonlocal_det.tools.command import command, make_parser, parse

CONFIG = "Quick/mask_keypoint_rcnn_R_50_FPN_nl_people.yaml"
PICTURES = 8


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; those of this process by default.

    Returns:
        The exit code: 0, or what training or drawing returned.
    """
    args = _parse(argv)

    from detectron2.data import MetadataCatalog

    from nonlocal_det import get_config
    from nonlocal_det.data.cache import ensure_made
    from nonlocal_det.tools import demo, train

    run = Path(args.output)
    start = time.perf_counter()
    code = train.main(["--config-file", CONFIG, "--resume", "OUTPUT_DIR", str(run), *args.opts])
    minutes = (time.perf_counter() - start) / 60
    if code:
        return code

    val = get_config(CONFIG, args.opts).DATASETS.TEST[0]
    ensure_made(val)
    images = sorted(Path(MetadataCatalog.get(val).image_root).iterdir())[:PICTURES]
    pictures = run / "pictures"
    draw = ["--config-file", CONFIG, "--output", str(pictures), "--attention", "auto"]
    weights = ["MODEL.WEIGHTS", str(run / "model_final.pth")]
    code = demo.main([*draw, "--input", *map(str, images), "--opts", *args.opts, *weights])
    if code:
        return code
    _print_table(run, minutes)
    print(f"Pictures: {pictures.resolve()}")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    what = "Train a small detector on the built-in data set, evaluate it and draw what it finds."
    parser = make_parser("quick_demo", what)
    add = parser.add_argument
    add("--output", default="output/demo", metavar="DIR", help="folder for the run and its pictures")
    add("opts", nargs=argparse.REMAINDER, metavar="KEY VALUE", help="overrides of the config")
    return parse(parser, argv)


def _print_table(run: Path, minutes: float) -> None:
    from tabulate import tabulate

    from nonlocal_det.engine.curves import read_metrics

    metrics = read_metrics(run / "metrics.json")
    results = {name: list(values.values())[-1] for name, values in metrics.items()}
    rows = [
        (name, results[f"{task}/AP"], results[f"{task}/AP50"], results[f"{task}/AP75"])
        for name, task in (("boxes", "bbox"), ("masks", "segm"), ("keypoints", "keypoints"))
    ]
    print(tabulate(rows, ("", "AP", "AP50", "AP75"), "pipe", floatfmt=".1f"))
    print(f"{max(metrics['bbox/AP'])} iterations; training and evaluation took {minutes:.1f} minutes")


if __name__ == "__main__":
    sys.exit(main())
