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
from nonlocal_det.tools.command import command, parse

__all__ = ["main"]


@command
def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line.

    Args:
        argv: arguments without the program's name; those of this process by default.

    Returns:
        The exit code: 0, or 2 for wrong input.
    """
    args = parse(_parser(), argv)
    places = {}
    for place in args.place:
        prefix, equals, where = place.rpartition("=")
        if not equals:
            raise UsageError(f"--place {place}: write PREFIX=PLACE, such as model.nl_1=res4.5")
        places[prefix] = where

    from nonlocal_det.convert import convert_checkpoint

    report = convert_checkpoint(
        args.input,
        args.output,
        args.config_file,
        args.opts,
        source=args.source,
        target=args.target,
        places=places,
        base=args.base,
        skip=args.skip,
        blocks_only=args.blocks_only,
        allow_missing=args.allow_missing,
        unpadded_pool=args.unpadded_pool,
        allow_moved=args.allow_moved,
        strip_trained=args.strip_trained,
        overwrite=args.overwrite,
    )
    print(report)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m nonlocal_det.tools.convert_checkpoint",
        description="Convert a weight file for a config's model. Says where every tensor went, and writes "
        "the config that goes with the weights beside them, with the suffix .yaml.",
    )
    parser.add_argument(
        "input", metavar="IN", help="a .pth, .pkl, .safetensors or .onnx file; nothing in it is run"
    )
    parser.add_argument("output", metavar="OUT", help="a .pth or .safetensors file")
    parser.add_argument(
        "--config-file", required=True, metavar="FILE", help="config of the model that gets the weights"
    )
    parser.add_argument(
        "--from",
        dest="source",
        default="auto",
        metavar="SOURCE",
        help="auto (default), authors, caffe2 (MSRA's ImageNet backbones), detectron2, mmaction2, "
        "mmdetection (and mmcv's blocks), nonlocal_pytorch, onnx, slowfast or torchvision",
    )
    parser.add_argument(
        "--to",
        dest="target",
        default="nonlocal_det",
        choices=("nonlocal_det", "detectron2", "mmcv"),
        help="detectron2: a baseline without blocks; mmcv: the blocks alone, with the names of NonLocal2d",
    )
    parser.add_argument(
        "--place",
        action="append",
        default=[],
        metavar="PREFIX=PLACE",
        help="where a block goes whose name does not say it: res4.5 is before block 5 of res4",
    )
    parser.add_argument(
        "--base", metavar="FILE", help="weights that give what IN lacks, such as the backbone's"
    )
    parser.add_argument(
        "--skip", default="", metavar="REGEX", help="leave out tensors of IN in whose names REGEX is found"
    )
    parser.add_argument(
        "--allow-missing",
        default="",
        metavar="REGEX",
        help="go on although tensors of the model are missing, if REGEX is found in the name of each",
    )
    parser.add_argument("--blocks-only", action="store_true", help="take the non-local blocks of IN alone")
    parser.add_argument(
        "--unpadded-pool",
        action="store_true",
        help="write a config whose stem does not pad its max pool, as the authors' and Caffe's nets",
    )
    parser.add_argument(
        "--allow-moved",
        action="store_true",
        help="put mmdetection's blocks, which work inside a residual branch, after the residual block",
    )
    parser.add_argument(
        "--strip-trained",
        action="store_true",
        help="with --to detectron2, leave out blocks that do something",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUT and its config")
    parser.add_argument(
        "--opts",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="KEY VALUE",
        help="overrides of the config; last",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
