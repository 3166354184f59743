"""Draw what a trained model finds in pictures, a video or a camera's view, and where its blocks look.

Examples (give the weights by --opts MODEL.WEIGHTS output/model_final.pth at the end):
    python -m nonlocal_det.tools.demo --config-file FILE --input photos/ more/*.jpg --output drawn/ --opts ...
    python -m nonlocal_det.tools.demo --config-file FILE --input walk.mp4 --output drawn.mp4 --json walk.json
    python -m nonlocal_det.tools.demo --config-file FILE --input a.jpg --output out/ --attention 320,240
"""

from __future__ import annotations

import argparse
import glob
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nonlocal_det.errors import UsageError
from nonlocal_det.tools.command import command, parse

if TYPE_CHECKING:
    import numpy as np
    from detectron2.config import CfgNode
    from detectron2.data.catalog import Metadata
    from detectron2.structures import Instances

    from nonlocal_det.attention import AttentionRecorder, BlockAttention

__all__ = ["main"]

#: Some inputs could not be read; the others are done.
EXIT_SOME_FAILED = 3

# The least score that is drawn where the user says nothing.
_THRESHOLD = 0.5
# The strongest detections whose centres --attention auto takes.
_AUTO_POINTS = 3


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
    inputs = find_inputs(args.input)
    if inputs.skipped:
        print(f"{inputs.skipped} other files in the folders were passed over")
    if args.attention and not inputs.pictures:
        raise UsageError("--attention is for pictures, not for video")
    _check_points(inputs.pictures, args.attention)
    cfg = _config(args)
    outputs = plan_outputs(inputs, args.output)
    _spare_inputs(inputs, [*outputs, args.json])

    predictor = Predictor(cfg)
    recorder = _recorder(predictor) if args.attention else None
    with ExitStack() as stack:
        results = stack.enter_context(_ResultsFile(args.json, predictor.metadata)) if args.json else None
        if inputs.pictures:
            failed = _run_pictures(predictor, inputs.pictures, outputs, results, recorder, args)
        else:
            failed = _run_video(predictor, inputs.video, outputs, results, args)
    if results is not None:
        print(f"{results.count} results written to {args.json}")
    return EXIT_SOME_FAILED if failed else 0


@dataclass
class Inputs:
    """What to draw on: pictures, or else one video.

    Attributes:
        pictures: files, in order, none twice.
        video: a file, the index of a camera, or None.
        skipped: how many files in the folders are no pictures by their suffix.
    """

    pictures: list[Path]
    video: Path | int | None = None
    skipped: int = 0


def find_inputs(words: Sequence[str]) -> Inputs:
    """Find the files that ``--input`` means.

    A word is a file, a folder (the pictures right in it, sorted by name; hidden files are passed over), a
    pattern such as ``'photos/**/*.jpg'`` that the shell has not expanded, or the index of a camera.

    Args:
        words: the arguments.

    Raises:
        UsageError: a word names nothing, or a video or camera is not alone.
    """
    from nonlocal_det.media.image import IMAGE_SUFFIXES

    found: list[Path] = []
    skipped = 0
    for word in words:
        path = Path(word).expanduser()
        if path.is_dir():
            files = sorted(file for file in path.iterdir() if file.is_file())
            pictures = [f for f in files if f.suffix.lower() in IMAGE_SUFFIXES and not f.name.startswith(".")]
            found += pictures
            skipped += len(files) - len(pictures)
        elif path.exists():
            found.append(path)
        elif word.isdecimal():
            if len(words) > 1:
                raise UsageError(f"--input {word} is a camera, which must be the only input")
            return Inputs([], video=int(word))
        elif glob.has_magic(word):
            matches = sorted(m for m in glob.glob(str(path), recursive=True) if os.path.isfile(m))
            if not matches:
                raise UsageError(f"--input {word}: no file matches this pattern")
            found += map(Path, matches)
        else:
            raise UsageError(f"--input {word}: no such file or folder")
    unique: dict[str, Path] = {}
    for file in found:
        unique.setdefault(os.path.realpath(file), file)
    found = list(unique.values())
    if not found:
        raise UsageError(f"--input {' '.join(words)}: no picture there ({skipped} files of other kinds)")
    videos = [file for file in found if _is_video(file)]
    if videos and len(found) > 1:
        raise UsageError(f"--input {videos[0]} is a video, which must be the only input")
    if videos:
        return Inputs([], video=videos[0])
    return Inputs(found, skipped=skipped)


def plan_outputs(inputs: Inputs, output: str | None) -> list[Path]:
    """Say where the drawing of every input goes; a folder is made if need be.

    ``output`` is a file if there is a single input and it has the suffix of a picture (or video), else a
    folder. In a folder a JPEG stays a JPEG, every other picture becomes a PNG. Where two inputs would get
    the same name, the later one gets ``_2``, ``_3``, ...

    Args:
        inputs: what :func:`find_inputs` found.
        output: the argument; None plans nothing.

    Returns:
        One path for every picture, or one for the video.

    Raises:
        UsageError: it is a file where a folder is needed, or of a kind that cannot be written.
    """
    from PIL import Image

    from nonlocal_det.media.video import VideoWriter

    if output is None:
        return []
    path = Path(output).expanduser()
    suffix = path.suffix.lower()
    if not inputs.pictures:
        if suffix in VideoWriter.suffixes and not path.is_dir():
            _make_folder(path.parent)
            return [path]
        if suffix and not path.is_dir():
            raise UsageError(f"--output {output}: a video is written as {', '.join(VideoWriter.suffixes)}")
        _make_folder(path)
        camera = isinstance(inputs.video, int)
        return [path / (f"camera_{inputs.video}.mp4" if camera else f"{inputs.video.stem}.mp4")]

    is_picture = Image.registered_extensions().get(suffix) in Image.SAVE
    if is_picture and not path.is_dir():
        if len(inputs.pictures) > 1:
            raise UsageError(
                f"--output {output}: a single file for {len(inputs.pictures)} inputs; give a folder"
            )
        _make_folder(path.parent)
        return [path]
    _make_folder(path)
    outputs: list[Path] = []
    owners: dict[str, Path] = {}
    for picture in inputs.pictures:
        suffix = picture.suffix if picture.suffix.lower() in (".jpg", ".jpeg") else ".png"
        name, number = picture.stem + suffix, 1
        while name.lower() in owners:  # some file systems take x.JPG for x.jpg
            number += 1
            name = f"{picture.stem}_{number}{suffix}"
        if number > 1:
            print(f"{picture}: drawn as {name}; {owners[(picture.stem + suffix).lower()]} has its name")
        owners[name.lower()] = picture
        outputs.append(path / name)
    return outputs


class Predictor:
    """A trained model that takes a BGR picture, as Detectron2's ``DefaultPredictor`` does.

    It differs in that it refuses weights that do not fit, resizes the thinnest picture to at least one
    pixel, and tells the size that the network got.

    Args:
        cfg: config with MODEL.WEIGHTS.

    Attributes:
        model: the model, in eval mode.
        metadata: names of classes and keypoints, as far as they are known and fit the model.

    Raises:
        CheckpointError: the weights cannot be used.
        ConfigError: the model cannot be built.
    """

    def __init__(self, cfg: CfgNode) -> None:
        from nonlocal_det.checkpoint.checkpointer import NonLocalCheckpointer
        from nonlocal_det.modeling.build import build_model

        self.cfg = cfg
        self.model = build_model(cfg).eval()
        checkpointer = NonLocalCheckpointer(self.model)
        checkpointer.load(cfg.MODEL.WEIGHTS)
        if checkpointer.report.untrained:
            count = len(checkpointer.report.untrained)
            print(
                f"warning: {count} tensors are not in {cfg.MODEL.WEIGHTS} and hold random values: what is "
                "drawn means nothing",
                file=sys.stderr,
            )
        self.metadata = _metadata(cfg)

    def __call__(self, image: np.ndarray) -> tuple[Instances, tuple[int, int]]:
        """Detect.

        Args:
            image: array (H, W, 3), uint8, BGR.

        Returns:
            The instances on the CPU, in the picture's coordinates, and the (height, width) of the network's
            input before its padding.

        Raises:
            UsageError: the model predicts no instances.
        """
        import numpy as np
        import torch
        from detectron2.data import transforms

        height, width = image.shape[:2]
        if self.cfg.INPUT.FORMAT == "RGB":
            image = image[:, :, ::-1]
        resized = image
        if self.cfg.INPUT.MIN_SIZE_TEST > 0:
            new_height, new_width = transforms.ResizeShortestEdge.get_output_shape(
                height, width, self.cfg.INPUT.MIN_SIZE_TEST, self.cfg.INPUT.MAX_SIZE_TEST
            )
            resize = transforms.ResizeTransform(height, width, max(1, new_height), max(1, new_width))
            resized = resize.apply_image(np.ascontiguousarray(image))
        tensor = torch.as_tensor(resized.astype("float32").transpose(2, 0, 1))
        with torch.no_grad():
            output = self.model([{"image": tensor, "height": height, "width": width}])[0]
        if "instances" not in output:
            raise UsageError(
                f"MODEL.META_ARCHITECTURE {self.cfg.MODEL.META_ARCHITECTURE} predicts no instances; use a "
                "config of Mask R-CNN, Keypoint R-CNN or RetinaNet"
            )
        return output["instances"].to("cpu"), resized.shape[:2]


class _ResultsFile:
    """A list of COCO results, written as it grows; the file is whole or absent."""

    def __init__(self, path: str, metadata: Metadata) -> None:
        self.count = 0
        self._path = Path(path).expanduser()
        _make_folder(self._path.parent)
        to_contiguous = metadata.get("thing_dataset_id_to_contiguous_id") or {}
        self._category_ids = {contiguous: category for category, contiguous in to_contiguous.items()}

    def add(self, instances: Instances, image_id: int, file_name: str) -> None:
        from detectron2.evaluation.coco_evaluation import instances_to_coco_json

        # A copy: upstream shifts the keypoints in place.
        copy = type(instances)(instances.image_size, **instances.get_fields())
        if copy.has("pred_keypoints"):
            copy.pred_keypoints = copy.pred_keypoints.clone()
        for result in instances_to_coco_json(copy, image_id):
            result["category_id"] = self._category_ids.get(result["category_id"], result["category_id"])
            result["file_name"] = file_name
            self._file.write((",\n" if self.count else "") + json.dumps(result))
            self.count += 1

    def __enter__(self) -> _ResultsFile:
        self._partial = _partial(self._path)
        self._file = self._partial.open("w", encoding="utf-8")
        self._file.write("[\n")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._file:
            self._file.write("\n]\n")
        if kind is None:
            os.replace(self._partial, self._path)
        else:
            self._partial.unlink(missing_ok=True)


def _run_pictures(
    predictor: Predictor,
    pictures: list[Path],
    outputs: list[Path],
    results: _ResultsFile | None,
    recorder: AttentionRecorder | None,
    args: argparse.Namespace,
) -> int:
    """Do all pictures, one at a time; return how many could not be read."""
    from nonlocal_det.detection.visualization.instances import draw_instances
    from nonlocal_det.errors import ImageError
    from nonlocal_det.media.image import read_image

    ids = _image_ids(pictures)
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
                _save(draw_instances(image, instances, predictor.metadata), outputs[index])
            if recorder is not None:
                points = _points(args.attention, instances)
                if not points:
                    say(f"{picture}: no detection whose centre --attention auto could take")
                attention = recorder.attention(points, image.shape[:2], network_size)
                _save_attention(image, attention, picture, outputs[index], say)
    done = len(pictures) - failed
    where = f", drawn in {outputs[0] if len(outputs) == 1 else outputs[0].parent}" if outputs and done else ""
    print(
        f"{done} of {len(pictures)} pictures done{where}"
        + (f"; {failed} could not be read" if failed else "")
    )
    return failed


def _run_video(
    predictor: Predictor,
    source: Path | int,
    outputs: list[Path],
    results: _ResultsFile | None,
    args: argparse.Namespace,
) -> int:
    """Do a video frame by frame; return 1 if it is damaged, else 0."""
    from nonlocal_det.detection.visualization.instances import InstanceColors, draw_instances
    from nonlocal_det.errors import VideoError
    from nonlocal_det.media.video import VideoReader, VideoWriter

    camera = isinstance(source, int)
    try:
        reader = VideoReader(source)
    except VideoError as error:
        if camera:
            raise UsageError(str(error)) from None
        print(f"error: {error}", file=sys.stderr)
        return 1
    colors = InstanceColors()
    frames = found = 0
    writer = None
    try:
        with ExitStack() as stack:
            stack.enter_context(reader)
            if not reader.rate_known:
                print(f"{reader.name}: its rate is unknown; taken for {reader.rate:g} frames a second")
            if camera:
                print("press Ctrl-C to stop")
            if outputs:
                writer = stack.enter_context(VideoWriter(outputs[0], reader.rate))
            bar, _ = stack.enter_context(_progress(reader, "frame", reader.frames_told or None))
            try:
                for frame in bar:
                    instances, _ = predictor(frame)
                    frames += 1
                    found += len(instances)
                    if results is not None:
                        results.add(instances, frames, reader.name)
                    if writer is not None:
                        writer.write(draw_instances(frame, instances, predictor.metadata, colors))
            except KeyboardInterrupt:
                if not camera or not frames:
                    raise
    except VideoError as error:
        if frames:  # the output's fault
            raise UsageError(str(error)) from None
    if not frames:
        print(f"error: {reader.name}: no frame of it can be read", file=sys.stderr)
        return 1
    if not found:
        print(f"{reader.name}: nothing above {args.confidence_threshold:g} in any frame")
    if writer is not None and writer.path != outputs[0]:
        print(f"no codec for {outputs[0].name} here; written as {writer.path.name}")
    print(f"{frames} frames done" + (f", drawn in {writer.path}" if writer is not None else ""))
    # Containers that estimate their length are off by a frame or two.
    if not camera and frames < 0.98 * reader.frames_told - 2:
        print(f"error: {reader.name}: damaged after frame {frames} of {reader.frames_told}", file=sys.stderr)
        return 1
    return 0


def _save_attention(
    image: np.ndarray,
    attention: Sequence[BlockAttention],
    picture: Path,
    output: Path,
    say: Callable[..., None],
) -> None:
    """Write the pictures and weights of the blocks beside the picture's output, and say what differs."""
    from nonlocal_det.attention import draw_attention, save_attention

    # The blocks of a head all have the same to say.
    for note in dict.fromkeys(note for block in attention for note in block.notes):
        say(f"{picture}: attention in the keypoint head: {note}")
    measured = [f"{b.short_name} {b.difference:.3f}" for b in attention if not math.isnan(b.difference)]
    if measured:
        say(f"{picture}: positions differ in attention (0 none, 1 all) by {', '.join(measured)}")
    for block in attention:
        if block.rows:
            name = f"{output.stem}_attention_{block.short_name}.png"
            _save(draw_attention(image, block), output.with_name(name))
    partial = _partial(output.with_name(f"{output.stem}_attention.npz"))
    try:
        save_attention(partial, attention)
        os.replace(partial, output.with_name(f"{output.stem}_attention.npz"))
    finally:
        partial.unlink(missing_ok=True)


def _recorder(predictor: Predictor) -> AttentionRecorder:
    from nonlocal_det.detection.attention import record_attention

    try:
        return record_attention(predictor.model)
    except ValueError as error:
        raise UsageError(f"--attention: {error}") from None


def _points(wanted: Sequence[tuple[float, float] | str], instances: Instances) -> list[tuple[float, float]]:
    """The points (x, y) to ask about: those given, and for "auto" the strongest detections' centres."""
    from detectron2.structures import Boxes, pairwise_iou

    points = [point for point in wanted if point != "auto"]
    if "auto" not in wanted:
        return points
    chosen: list[int] = []
    boxes = instances.pred_boxes
    for index in instances.scores.argsort(descending=True, stable=True).tolist():
        # Two detections of one thing would give the same picture twice.
        if not chosen or pairwise_iou(boxes[index], boxes[chosen]).max() <= 0.5:
            chosen.append(index)
    chosen = chosen[:_AUTO_POINTS]
    height, width = instances.image_size
    for x, y in Boxes(boxes.tensor[chosen]).get_centers().tolist():
        # To a pixel's centre: the words on the screen are then exact.
        points.append((min(int(x), width - 1) + 0.5, min(int(y), height - 1) + 0.5))
    return list(dict.fromkeys(points))


def _check_points(pictures: Sequence[Path], wanted: Sequence[tuple[float, float] | str]) -> None:
    from nonlocal_det.errors import ImageError
    from nonlocal_det.media.image import read_image

    points = [point for point in wanted if point != "auto"]
    for picture in pictures if points else ():
        try:
            height, width = read_image(picture).shape[:2]
        except ImageError:  # said when its turn comes
            continue
        for x, y in points:
            if x > width or y > height:
                raise UsageError(
                    f"--attention {int(x)},{int(y)} is outside {picture}, which has {width} x {height} pixels"
                )


def _config(args: argparse.Namespace) -> CfgNode:
    from nonlocal_det import get_config
    from nonlocal_det.errors import ConfigError

    cfg = get_config(args.config_file, args.opts)
    if not cfg.MODEL.WEIGHTS:
        raise ConfigError(
            "MODEL.WEIGHTS is empty, and random weights draw nonsense; add --opts MODEL.WEIGHTS "
            "output/model_final.pth"
        )
    of_retinanet = cfg.MODEL.META_ARCHITECTURE == "RetinaNet"
    detector = cfg.MODEL.RETINANET if of_retinanet else cfg.MODEL.ROI_HEADS
    threshold = args.confidence_threshold
    if not any(key.endswith(".SCORE_THRESH_TEST") for key in args.opts[::2]):
        detector.SCORE_THRESH_TEST = _THRESHOLD if threshold is None else threshold
    elif threshold is not None:
        raise UsageError("--confidence-threshold and SCORE_THRESH_TEST in --opts mean the same: give one")
    args.confidence_threshold = detector.SCORE_THRESH_TEST
    cfg.freeze()
    return cfg


def _metadata(cfg: CfgNode) -> Metadata:
    """The names that fit the model, from the first test set; what does not fit is left out, and said."""
    from detectron2.data import DatasetCatalog, MetadataCatalog
    from detectron2.data.catalog import Metadata
    from detectron2.data.datasets.builtin_meta import COCO_CATEGORIES

    metadata = Metadata()
    if not cfg.DATASETS.TEST:
        return metadata
    name = cfg.DATASETS.TEST[0]
    source = MetadataCatalog.get(name)
    if source.get("thing_dataset_id_to_contiguous_id") is None and name in DatasetCatalog:
        try:
            DatasetCatalog.get(name)  # the JSON file has the names and ids
        except Exception as error:
            if source.get("thing_classes") is None:
                reason = " ".join(str(error).split())
                print(f"class names unknown, numbers are shown: {name} cannot be loaded: {reason}")
                return metadata
    retinanet = cfg.MODEL.META_ARCHITECTURE == "RetinaNet"
    classes = (cfg.MODEL.RETINANET if retinanet else cfg.MODEL.ROI_HEADS).NUM_CLASSES
    names = source.get("thing_classes") or []
    if len(names) == classes:
        metadata.thing_classes = names
        ids = source.get("thing_dataset_id_to_contiguous_id")
        if ids is None:  # COCO's persons where COCO is not installed
            coco = {category["name"]: category["id"] for category in COCO_CATEGORIES}
            ids = {coco[n]: index for index, n in enumerate(names)} if set(names) <= set(coco) else {}
        metadata.thing_dataset_id_to_contiguous_id = ids
    else:
        print(
            f"the model has {classes} classes and {name} (DATASETS.TEST) {len(names)}: numbers are shown, "
            "and category_id counts from 0"
        )
    keypoints = source.get("keypoint_names")
    if cfg.MODEL.KEYPOINT_ON and keypoints and len(keypoints) == cfg.MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS:
        metadata.keypoint_names = keypoints
        metadata.keypoint_connection_rules = source.get("keypoint_connection_rules") or []
    return metadata


def _image_ids(pictures: Sequence[Path]) -> list[int]:
    """COCO's ids: the numbers that the files are named by if all are and they differ, else 1, 2, 3, ..."""
    stems = [picture.stem for picture in pictures]
    if all(stem.isascii() and stem.isdecimal() for stem in stems):
        numbers = [int(stem) for stem in stems]
        if len(set(numbers)) == len(numbers):
            return numbers
    return list(range(1, len(pictures) + 1))


def _is_video(path: Path) -> bool:
    from nonlocal_det.errors import VideoError
    from nonlocal_det.media.image import IMAGE_SUFFIXES
    from nonlocal_det.media.video import VIDEO_SUFFIXES, VideoReader

    suffix = path.suffix.lower()
    if suffix in VIDEO_SUFFIXES or suffix in IMAGE_SUFFIXES:
        return suffix in VIDEO_SUFFIXES
    from PIL import Image

    try:
        with Image.open(path):
            return False
    except Exception:  # no picture; Pillow raises many types
        try:
            with VideoReader(path):
                return True
        except VideoError:
            return False


def _spare_inputs(inputs: Inputs, outputs: Iterable[Path | str | None]) -> None:
    """Refuse to write over what is read."""
    sources = inputs.pictures or ([inputs.video] if isinstance(inputs.video, Path) else [])
    known = {_identity(path): path for path in sources}
    for output in outputs:
        if output and os.path.exists(output) and _identity(output) in known:
            raise UsageError(f"{output} is an input and would be overwritten; use another --output or --json")


def _identity(path: Path | str) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _save(image: np.ndarray, path: Path) -> None:
    """Write a picture (H, W, 3), uint8, BGR; the file is whole or absent."""
    from PIL import Image

    partial = _partial(path)
    try:
        Image.fromarray(image[:, :, ::-1]).save(partial, quality=95)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _partial(path: Path) -> Path:
    return path.with_name(f".{path.stem}.{os.getpid()}.partial{path.suffix}")


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{path}: cannot make this folder: {error.strerror}") from None


@contextmanager
def _progress(items: Iterable[Any], unit: str, total: int | None = None) -> Iterator[tuple[Any, Callable]]:
    """A progress bar on stderr over ``items``, and a way to print that does not break it."""
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
    """Parse "auto" or "X,Y", a pixel counted from 0,0; the result is its centre, (X + 0.5, Y + 0.5)."""
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
    parser = argparse.ArgumentParser(
        prog="python -m nonlocal_det.tools.demo",
        description="Draw what a trained model finds in pictures, a video or a camera's view.",
    )
    parser.add_argument(
        "--config-file", required=True, metavar="FILE", help="a path, or a name under the project's configs/"
    )
    parser.add_argument(
        "--input",
        required=True,
        nargs="+",
        metavar="PATH",
        help="pictures, folders of pictures, quoted patterns such as 'a/**/*.jpg'; or one video; or a "
        "camera's index",
    )
    parser.add_argument(
        "--output",
        metavar="PATH",
        help="a file for one input, else a folder; pictures under 800 pixels are drawn enlarged",
    )
    parser.add_argument(
        "--confidence-threshold",
        type=_threshold,
        metavar="P",
        help=f"the least score that is drawn and written (default {_THRESHOLD:g}); sets SCORE_THRESH_TEST",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write COCO results; image_id is the number that the file is named by if all are named by "
        "different numbers, else 1, 2, 3, ... in order; of a video it is the frame",
    )
    parser.add_argument(
        "--attention",
        type=_point,
        action="append",
        default=[],
        metavar="X,Y|auto",
        help="draw where every non-local block looks from this pixel of the upright picture (repeatable), or "
        f"from the centres of the {_AUTO_POINTS} strongest detections; saves the weights as .npz beside the "
        "picture",
    )
    parser.add_argument(
        "--opts",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="KEY VALUE",
        help="config overrides, last on the line, such as MODEL.WEIGHTS model_final.pth",
    )
    args = parse(parser, argv)
    if args.output is None and args.json is None:
        raise UsageError("nothing to do: give --output, --json or both")
    if args.attention and args.output is None:
        raise UsageError("--attention draws pictures: give --output")
    return args


if __name__ == "__main__":
    sys.exit(main())
