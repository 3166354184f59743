"""Reading and writing video through OpenCV, frame by frame, with every way to fail said in one line."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, TracebackType

import numpy as np

from nonlocal_det.errors import VideoError

#: Suffixes, in lower case, of the files that are taken for video without a look inside.
VIDEO_SUFFIXES = frozenset({
    ".3gp", ".avi", ".flv", ".m2ts", ".m4v", ".mjpeg", ".mkv", ".mov",
    ".mp4", ".mpeg", ".mpg", ".mts", ".ogv", ".ts", ".webm", ".wmv",
})  # fmt: skip

#: Frames a second where a file or a camera does not tell.
DEFAULT_RATE = 25.0

# Codecs to try, in order, for a file with this suffix; what no build lacks comes last.
_CODECS = {
    ".mp4": ("mp4v", "avc1"),
    ".m4v": ("mp4v", "avc1"),
    ".mov": ("mp4v", "avc1"),
    ".mkv": ("mp4v", "MJPG"),
    ".avi": ("MJPG", "XVID"),
}
_LAST_RESORT = (".avi", "MJPG")


class VideoReader:
    """The frames of a video file or a camera, upright, one at a time.

    Args:
        source: a file, or the index of a camera.

    Attributes:
        name: the file, or "camera N".
        rate: frames a second; :data:`DEFAULT_RATE` where ``rate_known`` is False.
        rate_known: whether the source told a rate that makes sense.
        frames_told: how many frames the file says that it has (an estimate in some formats); 0 if unknown.

    Raises:
        VideoError: OpenCV is missing, or it cannot open the source.
    """

    def __init__(self, source: str | os.PathLike[str] | int) -> None:
        cv2 = _import_cv2()
        camera = isinstance(source, int)
        self.name = f"camera {source}" if camera else os.fspath(source)
        if not camera and not os.path.isfile(self.name):
            raise VideoError(f"{self.name}: no such file")
        self._capture = cv2.VideoCapture(source if camera else self.name)
        if not self._capture.isOpened():
            self._capture.release()
            if camera:
                raise VideoError(f"{self.name}: there is no such camera, or it is in use or not permitted")
            raise VideoError(f"{self.name}: OpenCV cannot open this as a video; it may be damaged")
        rate = self._capture.get(cv2.CAP_PROP_FPS)
        # Above 1000 it is a clock's ticks, not a rate.
        self.rate_known = math.isfinite(rate) and 0 < rate <= 1000
        self.rate = rate if self.rate_known else DEFAULT_RATE
        told = self._capture.get(cv2.CAP_PROP_FRAME_COUNT)
        self.frames_told = int(told) if math.isfinite(told) and told > 0 else 0

    def __iter__(self) -> Iterator[np.ndarray]:
        """Yield each frame: array (H, W, 3), uint8, BGR. OpenCV applies the file's rotation itself."""
        while True:
            ok, frame = self._capture.read()
            if not ok:
                return
            yield frame

    def __enter__(self) -> VideoReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._capture.release()


class VideoWriter:
    """A video file that is either whole or absent.

    Frames go to a hidden file beside ``path``. Leaving the ``with`` block closes it, opens it again to see
    that nothing is missing, and renames it; leaving by an exception deletes it.

    The codec is the first of the suffix's that this OpenCV can write and read back. Where none works, the
    file becomes a Motion JPEG ``.avi``, which OpenCV writes without help.

    Args:
        path: the file to write; its suffix must be one of ``suffixes``.
        rate: frames a second, above 0 and at most 1000.

    Attributes:
        path: where the file is; another suffix than asked for after a fallback.
        codec: the four letters in use, "" before the first frame.
        frames: how many frames were written.

    Raises:
        VideoError: OpenCV is missing, or the suffix is none that it can write.
    """

    suffixes = tuple(_CODECS)

    def __init__(self, path: str | os.PathLike[str], rate: float) -> None:
        self._cv2 = _import_cv2()
        self.path = Path(path)
        if self.path.suffix.lower() not in _CODECS:
            raise VideoError(f"{self.path}: cannot write this kind of video; use {', '.join(_CODECS)}")
        self.rate = rate
        self.codec = ""
        self.frames = 0
        self._size = (0, 0)
        self._writer = None
        self._partial: Path | None = None

    def write(self, frame: np.ndarray) -> None:
        """Append a frame.

        Args:
            frame: array (H, W, 3), uint8, BGR. The first one sets the size of the video; a later one of
                another size is resized. Codecs want even sizes: an odd one grows by a copy of its last
                row or column.

        Raises:
            VideoError: no codec works.
        """
        cv2 = self._cv2
        if self._writer is None:
            self._size = frame.shape[1], frame.shape[0]
            self._open()
        if (frame.shape[1], frame.shape[0]) != self._size:
            frame = cv2.resize(frame, self._size, interpolation=cv2.INTER_AREA)
        width, height = self._size
        if width % 2 or height % 2:
            frame = cv2.copyMakeBorder(frame, 0, height % 2, 0, width % 2, cv2.BORDER_REPLICATE)
        self._writer.write(np.ascontiguousarray(frame))
        self.frames += 1

    def __enter__(self) -> VideoWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._writer is not None:
            self._writer.release()
        try:
            if kind is None:
                self._finish()
        finally:
            if self._partial is not None:
                self._partial.unlink(missing_ok=True)

    def _open(self) -> None:
        wanted = self.path.suffix
        for suffix, codec in [*((wanted, codec) for codec in _CODECS[wanted.lower()]), _LAST_RESORT]:
            path = self.path.with_suffix(suffix)
            if path != self.path and path.exists():  # nobody asked to overwrite that one
                raise VideoError(f"{self.path}: no codec for it, and {path.name} is taken; use another name")
            partial = path.with_name(f".{path.stem}.{os.getpid()}.partial{suffix}")
            if self._works(partial, codec):
                self.path, self.codec, self._partial = path, codec, partial
                self._writer = self._new(partial, codec)
                return
        raise VideoError(f"{self.path}: this OpenCV can write no video here (folder not writable, no codec)")

    def _new(self, path: Path, codec: str):  # noqa: ANN202  (cv2 is imported late)
        size = tuple(side + side % 2 for side in self._size)
        return self._cv2.VideoWriter(str(path), self._cv2.VideoWriter_fourcc(*codec), self.rate, size)

    def _works(self, path: Path, codec: str) -> bool:
        """Whether one frame written with this codec can be read back; OpenCV may fail silently."""
        try:
            writer = self._new(path, codec)
            if not writer.isOpened():
                return False
            width, height = (side + side % 2 for side in self._size)
            writer.write(np.zeros((height, width, 3), np.uint8))
            writer.release()
            return self._inspect(path)[0] == 1
        finally:
            path.unlink(missing_ok=True)

    def _inspect(self, path: Path) -> tuple[int, float]:
        """The number of frames and the rate of a file; (0, 0) where its first frame cannot be read."""
        cv2 = self._cv2
        capture = cv2.VideoCapture(str(path))
        try:
            if not capture.isOpened() or not capture.grab():
                return 0, 0.0
            return int(capture.get(cv2.CAP_PROP_FRAME_COUNT)), capture.get(cv2.CAP_PROP_FPS)
        finally:
            capture.release()

    def _finish(self) -> None:
        if self.frames == 0 or self._partial is None:
            raise VideoError(f"{self.path}: no frame to write")
        frames, rate = self._inspect(self._partial)
        # OpenCV keeps rates to a thousandth.
        if frames != self.frames or abs(rate - self.rate) > 1e-3 + 1e-3 * self.rate:
            raise VideoError(
                f"{self.path}: wrote {self.frames} frames at {self.rate:g} a second but reads back {frames} "
                f"at {rate:g}; is the disk full?"
            )
        os.replace(self._partial, self.path)


def _import_cv2() -> ModuleType:
    """OpenCV, with its own messages switched off: what matters is said by :class:`VideoError`.

    Raises:
        VideoError: it is not installed.
    """
    # Read by OpenCV's FFmpeg when it opens its first file.
    os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")
    try:
        import cv2
    except ImportError:
        raise VideoError("OpenCV is missing: pip install opencv-python-headless") from None
    with contextlib.suppress(AttributeError):  # a build without this module
        cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
    return cv2
