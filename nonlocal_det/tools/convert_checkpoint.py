r"""Convert weights of Detectron2, the authors, mmdetection, SlowFast, torchvision and others, and back.

Examples:
    python -m nonlocal_det.tools.convert_checkpoint resnet50.pth r50.pth \
        --config-file COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x_nl.yaml
    python -m nonlocal_det.tools.convert_checkpoint i3d_nonlocal.pkl i3d.safetensors --config-file FILE \
        --unpadded-pool
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from nonlocal_det.errors import UsageError
from nonlocal_det.tools.command import add_opts, command, make_parser, parse

# (flag, what it takes, help); a flag that takes nothing is a switch.
_FLAGS = (
    ("--base", "FILE", "weights that give what IN lacks, such as the backbone's"),
    ("--skip", "REGEX", "leave out tensors of IN in whose names REGEX is found"),
    ("--allow-missing", "REGEX", "go on without tensors of the model, if REGEX is found in the name of each"),
    ("--blocks-only", None, "take the non-local blocks of IN alone"),
    (
        "--unpadded-pool",
        None,
        "write a config whose stem does not pad its max pool, as the authors' nets",
    ),
    ("--allow-moved", None, "put mmdetection's blocks after the residual block, in whose branch they work"),
    ("--strip-trained", None, "with --to detectron2, leave out blocks that do something"),
    ("--overwrite", None, "replace OUT and its config"),
)


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; return the exit code: 0, or 2 for wrong input."""
    options = vars(parse(_parser(), argv))
    paths = (options.pop("input"), options.pop("output"), options.pop("config_file"), options.pop("opts"))
    places = {}
    for place in options.pop("place"):
        prefix, equals, where = place.rpartition("=")
        if not equals:
            raise UsageError(f"--place {place}: write PREFIX=PLACE, such as model.nl_1=res4.5")
        places[prefix] = where

    from nonlocal_det.convert.conversion import convert_checkpoint

    print(convert_checkpoint(*paths, places=places, **options))


def _parser() -> argparse.ArgumentParser:
    parser = make_parser(
        "convert_checkpoint",
        "Convert a weight file for a config's model. Says where every tensor went, and writes the config "
        "that goes with the weights beside them, with the suffix .yaml.",
    )
    add = parser.add_argument
    add("input", metavar="IN", help="a .pth, .pkl, .safetensors or .onnx file; nothing in it is run")
    add("output", metavar="OUT", help="a .pth or .safetensors file")
    add("--config-file", required=True, metavar="FILE", help="config of the model that gets the weights")
    sources = (
        "auto (default), authors, caffe2 (MSRA's ImageNet backbones), detectron2, mmaction2, "
        "mmdetection (and mmcv's blocks), nonlocal_pytorch, onnx, slowfast or torchvision"
    )
    add("--from", dest="source", default="auto", metavar="SOURCE", help=sources)
    targets = "detectron2: a baseline without blocks; mmcv: the blocks alone, with the names of NonLocal2d"
    choices = ("nonlocal_det", "detectron2", "mmcv")
    add("--to", dest="target", default="nonlocal_det", choices=choices, help=targets)
    place = "where a block goes whose name does not say it: res4.5 is before block 5 of res4"
    add("--place", action="append", default=[], metavar="PREFIX=PLACE", help=place)
    for flag, takes, what in _FLAGS:
        if takes:
            add(flag, default="", metavar=takes, help=what)
        else:
            add(flag, action="store_true", help=what)
    add_opts(parser, "overrides of the config; last")
    return parser


if __name__ == "__main__":
    sys.exit(main())
