"""Draw what a trained model finds in pictures, a video or a camera's view, and where its blocks look.

Examples (give the weights by --opts MODEL.WEIGHTS output/model_final.pth at the end):
    python -m nonlocal_det.tools.demo --config-file FILE --input photos/ more/*.jpg --output drawn/ --opts ...
    python -m nonlocal_det.tools.demo --config-file FILE --input walk.mp4 --output drawn.mp4 --json walk.json
    python -m nonlocal_det.tools.demo --config-file FILE --input a.jpg --output out/ --attention 320,240
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nonlocal_det.errors import ConfigError, ExitCode, ImageError, UsageError, VideoError
from nonlocal_det.tools.command import add_opts, command, make_parser, parse

if TYPE_CHECKING:
    import numpy as np
    from detectron2.config import CfgNode
    from detectron2.structures import Instances

    from nonlocal_det.attention import BlockAttention
    from nonlocal_det.detection.predictor import Predictor
    from nonlocal_det.detection.results import ResultsFile
    from nonlocal_det.media.inputs import Inputs

_THRESHOLD = 0.5  # the least score that is drawn where the user says nothing
_AUTO_POINTS = 3  # the strongest detections whose centres --attention auto takes


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; those of this process by default.

    Returns:
        The exit code: 0; 2 for wrong input; 3 if a picture or video could not be read while the rest is done.
    """
    args = _parse(argv)
    _require_opencv()
    from nonlocal_det.media.inputs import find_inputs, plan_outputs, spare_inputs

    inputs = find_inputs(args.input)
    if inputs.skipped:
        print(f"{inputs.skipped} other files in the folders were passed over")
    if args.attention and not inputs.pictures:
        raise UsageError("--attention is for pictures, not for video")
    _check_points(inputs.pictures, args.attention)
    cfg = _config(args)
    outputs = plan_outputs(inputs, args.output)
    spare_inputs(inputs, [*outputs, args.json])
    return ExitCode.SOME_FAILED if _run(cfg, inputs, outputs, args) else ExitCode.OK


def _run(cfg: CfgNode, inputs: Inputs, outputs: list[Path], args: argparse.Namespace) -> int:
    """Load the model and do all inputs; return how many could not be read."""
    from nonlocal_det.detection.predictor import Predictor
    from nonlocal_det.detection.results import results_file

    predictor = Predictor(cfg)
    run = _run_pictures if inputs.pictures else _run_video
    if args.json is None:
        return run(predictor, inputs, outputs, None, args)
    with results_file(args.json, predictor.metadata) as results:
        failed = run(predictor, inputs, outputs, results, args)
    print(f"{results.count} results written to {args.json}")
    return failed


def _run_pictures(
    predictor: Predictor,
    inputs: Inputs,
    outputs: list[Path],
    results: ResultsFile | None,
    args: argparse.Namespace,
) -> int:
    """Do all pictures, one at a time; return how many could not be read."""
    from nonlocal_det.detection.attention import record_attention
    from nonlocal_det.detection.results import image_ids
    from nonlocal_det.detection.visualization.instances import draw_instances
    from nonlocal_det.media.image import read_image, write_image

    pictures, ids = inputs.pictures, image_ids(inputs.pictures)
    try:
        recorder = record_attention(predictor.model) if args.attention else None
    except ValueError as error:
        raise UsageError(f"--attention: {error}") from None
    failed = 0
    with _progress(pictures, "picture") as (bar, say):
        for index, picture in enumerate(bar):
            try:
                image = read_image(picture)
            except ImageError as error:
                failed += 1
                say(f"error: {error}", sys.stderr)
                continue
            with recorder or nullcontext():
                instances, network_size = predictor(image)
            if not len(instances):
                say(f"{picture}: nothing above {args.confidence_threshold:g}")
            if results is not None:
                results.add(instances, ids[index], str(picture))
            if outputs:
                write_image(outputs[index], draw_instances(image, instances, predictor.metadata))
            if recorder is not None:
                points = _points(args.attention, instances)
                if not points:
                    say(f"{picture}: no detection whose centre --attention auto could take")
                attention = recorder.attention(points, image.shape[:2], network_size)
                _save_attention(image, attention, picture, outputs[index], say)
    done = len(pictures) - failed
    where = f", drawn in {outputs[0] if len(outputs) == 1 else outputs[0].parent}" if outputs and done else ""
    unread = f"; {failed} could not be read" if failed else ""
    print(f"{done} of {len(pictures)} pictures done{where}{unread}")
    return failed


def _run_video(
    predictor: Predictor,
    inputs: Inputs,
    outputs: list[Path],
    results: ResultsFile | None,
    args: argparse.Namespace,
) -> int:
    """Do a video frame by frame; return 1 if it is damaged, else 0."""
    from nonlocal_det.detection.visualization.instances import InstanceColors, draw_instances
    from nonlocal_det.media.video import Camera, VideoReader, VideoWriter

    camera = isinstance(inputs.video, int)
    try:
        reader = Camera(inputs.video) if camera else VideoReader(inputs.video)
    except VideoError as error:
        if camera:
            raise
        print(f"error: {error}", file=sys.stderr)
        return 1
    colors, damage = InstanceColors(), []
    frames = found = 0
    try:
        with ExitStack() as stack:
            stack.enter_context(reader)
            if not reader.rate_known:
                print(f"{reader.name}: its rate is unknown; taken for {float(reader.rate):g} frames a second")
            if camera:
                print("press Ctrl-C to stop")
            writer = stack.enter_context(VideoWriter(outputs[0], reader.rate)) if outputs else None
            sound = _until_damage(reader, damage)
            bar, _ = stack.enter_context(_progress(sound, "frame", reader.frames_told or None))
            try:
                for frame in bar:
                    instances, _ = predictor(frame)
                    frames += 1
                    found += len(instances)
                    if results is not None:
                        results.add(instances, frames, reader.name)
                    if writer is not None:
                        drawn = draw_instances(frame, instances, predictor.metadata, colors)
                        writer.write(drawn, reader.time)
            except KeyboardInterrupt:
                if not camera or not frames:
                    raise
    except VideoError:
        if frames:  # else the damage says why there is nothing to write
            raise
    if frames:
        if not found:
            print(f"{reader.name}: nothing above {args.confidence_threshold:g} in any frame")
        print(f"{frames} frames done" + (f", drawn in {outputs[0]}" if outputs else ""))
    for error in damage:
        print(f"error: {error}", file=sys.stderr)
    return len(damage)


def _until_damage(frames: Iterable[np.ndarray], damage: list[VideoError]) -> Iterator[np.ndarray]:
    """Yield the frames that can be read; put what is wrong with the rest into ``damage``."""
    try:
        yield from frames
    except VideoError as error:
        damage.append(error)


def _save_attention(
    image: np.ndarray,
    attention: Sequence[BlockAttention],
    picture: Path,
    output: Path,
    say: Callable[..., None],
) -> None:
    """Write the pictures and weights of the blocks beside the picture's output, and say what differs."""
    from nonlocal_det.attention import draw_attention, save_attention
    from nonlocal_det.files import whole_file
    from nonlocal_det.media.image import write_image

    # The blocks of a head all have the same to say.
    for note in dict.fromkeys(note for block in attention for note in block.notes):
        say(f"{picture}: attention in the keypoint head: {note}")
    measured = [f"{b.short_name} {b.difference:.3f}" for b in attention if not math.isnan(b.difference)]
    if measured:
        say(f"{picture}: positions differ in attention (0 none, 1 all) by {', '.join(measured)}")
    for block in attention:
        if block.rows:
            name = f"{output.stem}_attention_{block.short_name}.png"
            write_image(output.with_name(name), draw_attention(image, block))
    with whole_file(output.with_name(f"{output.stem}_attention.npz")) as partial:
        save_attention(partial, attention)


def _points(wanted: Sequence[tuple[float, float] | str], instances: Instances) -> list[tuple[float, float]]:
    """Return the points to ask about: those given, and for "auto" the strongest detections' centres."""
    from nonlocal_det.detection.results import strongest_centers

    points = [point for point in wanted if point != "auto"]
    if "auto" in wanted:
        points = list(dict.fromkeys(points + strongest_centers(instances, _AUTO_POINTS)))
    return points


def _check_points(pictures: Sequence[Path], wanted: Sequence[tuple[float, float] | str]) -> None:
    from nonlocal_det.media.image import read_image

    points = [point for point in wanted if point != "auto"]
    for picture in pictures if points else ():
        try:
            height, width = read_image(picture).shape[:2]
        except ImageError:  # said when its turn comes
            continue
        for x, y in points:
            if x > width or y > height:
                size = f"{width} x {height} pixels"
                raise UsageError(f"--attention {int(x)},{int(y)} is outside {picture}, which has {size}")


def _config(args: argparse.Namespace) -> CfgNode:
    from nonlocal_det import get_config
    from nonlocal_det.detection.config import detector_node
    from nonlocal_det.engine.task import find_task

    cfg = get_config(args.config_file, args.opts)
    find_task(cfg).release_data()
    if not cfg.MODEL.WEIGHTS:
        mend = "add --opts MODEL.WEIGHTS output/model_final.pth"
        raise ConfigError(f"MODEL.WEIGHTS is empty, and random weights draw nonsense; {mend}")
    detector = detector_node(cfg)
    threshold = args.confidence_threshold
    if not any(key.endswith(".SCORE_THRESH_TEST") for key in args.opts[::2]):
        detector.SCORE_THRESH_TEST = _THRESHOLD if threshold is None else threshold
    elif threshold is not None:
        raise UsageError("--confidence-threshold and SCORE_THRESH_TEST in --opts mean the same: give one")
    args.confidence_threshold = detector.SCORE_THRESH_TEST
    cfg.freeze()
    return cfg


@contextmanager
def _progress(items: Iterable[Any], unit: str, total: int | None = None) -> Iterator[tuple[Any, Callable]]:
    """Show a progress bar on stderr over ``items``; yield it, and a way to print that does not break it."""
    from tqdm import tqdm

    with tqdm(items, total=total, unit=unit, disable=None) as bar:  # None: not in a log file
        yield bar, bar.write


def _require_opencv() -> None:
    try:
        import cv2  # noqa: F401  (Detectron2 draws with it)
    except ImportError:
        raise UsageError("OpenCV is missing: pip install opencv-python-headless") from None


def _threshold(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def _point(text: str) -> tuple[float, float] | str:
    """Read "auto" or "X,Y", a pixel counted from 0,0; the result is its centre, (X + 0.5, Y + 0.5)."""
    if text == "auto":
        return text
    try:
        x, y = (float(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither auto nor a pixel X,Y such as 320,240"
        ) from None
    if not (0 <= x < math.inf and 0 <= y < math.inf):
        raise argparse.ArgumentTypeError(f"{text} is outside every picture; pixels count from 0,0")
    return int(x) + 0.5, int(y) + 0.5


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("demo", "Draw what a trained model finds in pictures, a video or a camera's view.")
    add = parser.add_argument
    add("--config-file", required=True, metavar="FILE", help="a path, or a name under the project's configs/")
    inputs = (
        "pictures, folders of them, quoted patterns such as 'a/**/*.jpg'; or a video; or a camera's index"
    )
    add("--input", required=True, nargs="+", metavar="PATH", help=inputs)
    output = "a file for one input, else a folder; pictures under 800 pixels are drawn enlarged"
    add("--output", metavar="PATH", help=output)
    least = f"the least score that is drawn and written (default {_THRESHOLD:g}); sets SCORE_THRESH_TEST"
    add("--confidence-threshold", type=_threshold, metavar="P", help=least)
    results = (
        "write COCO results; image_id is the number that the file is named by if all are named by different "
        "numbers, else 1, 2, 3, ... in order; of a video it is the frame"
    )
    add("--json", metavar="FILE", help=results)
    attention = (
        "draw where every non-local block looks from this pixel of the upright picture (repeatable), or from "
        f"the centres of the {_AUTO_POINTS} strongest detections; saves the weights as .npz beside it"
    )
    add("--attention", type=_point, action="append", default=[], metavar="X,Y|auto", help=attention)
    add_opts(parser, "config overrides, last on the line, such as MODEL.WEIGHTS model_final.pth")
    args = parse(parser, argv)
    if args.output is None and args.json is None:
        raise UsageError("nothing to do: give --output, --json or both")
    if args.attention and args.output is None:
        raise UsageError("--attention draws pictures: give --output")
    return args


if __name__ == "__main__":
    sys.exit(main())
