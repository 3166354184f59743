"""The pictures, or the video, that words of a command line mean, and where what is drawn on them goes."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from nonlocal_det.errors import UsageError, VideoError
from nonlocal_det.media.image import IMAGE_SUFFIXES
from nonlocal_det.media.video import VIDEO_SUFFIXES, VideoReader, VideoWriter


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
    return Inputs([], video=videos[0]) if videos else Inputs(found, skipped=skipped)


def plan_outputs(inputs: Inputs, output: str | None) -> list[Path]:
    """Return where the drawing of every input goes; a folder is made if need be.

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
    if output is None:
        return []
    path = Path(output).expanduser()
    suffix = "" if path.is_dir() else path.suffix.lower()
    if inputs.pictures:
        is_file, count = Image.registered_extensions().get(suffix) in Image.SAVE, len(inputs.pictures)
        if is_file and count > 1:
            raise UsageError(f"--output {output}: a single file for {count} inputs; give a folder")
    else:
        is_file = suffix in VideoWriter.suffixes
        if suffix and not is_file:
            raise UsageError(f"--output {output}: a video is written as {', '.join(VideoWriter.suffixes)}")
    make_folder(path.parent if is_file else path)
    if is_file:
        return [path]
    if not inputs.pictures:
        name = inputs.video.stem if isinstance(inputs.video, Path) else f"camera_{inputs.video}"
        return [path / f"{name}.mp4"]
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


def spare_inputs(inputs: Inputs, outputs: Iterable[Path | str | None]) -> None:
    """Refuse to write over what is read.

    Args:
        inputs: what is read.
        outputs: the files to write; None is none.

    Raises:
        UsageError: one of them is an input, by this name or another.
    """
    sources = inputs.pictures or ([inputs.video] if isinstance(inputs.video, Path) else [])
    for output in outputs:
        if output and os.path.exists(output) and any(os.path.samefile(output, file) for file in sources):
            raise UsageError(f"{output} is an input and would be overwritten; use another --output or --json")


def make_folder(path: Path) -> None:
    """Make a folder, and those that it lies in.

    Raises:
        UsageError: it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{path}: cannot make this folder: {error.strerror}") from None


def _is_video(path: Path) -> bool:
    suffix = path.suffix.lower()
    if suffix in VIDEO_SUFFIXES or suffix in IMAGE_SUFFIXES:
        return suffix in VIDEO_SUFFIXES
    try:
        with VideoReader(path):
            return True
    except VideoError:
        return False
