"""Reading and writing video frame by frame, with every way to fail said in one line.

Files go through PyAV, which brings its own FFmpeg; cameras go through OpenCV.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from fractions import Fraction
from pathlib import Path
from types import TracebackType

import av
import numpy as np
from av.video.reformatter import VideoReformatter

from nonlocal_det.errors import VideoError, counted, one_line
from nonlocal_det.files import whole_file

#: Suffixes, in lower case, of the files that are taken for video without a look inside.
VIDEO_SUFFIXES = frozenset({
    ".3gp", ".avi", ".flv", ".m2ts", ".m4v", ".mjpeg", ".mkv", ".mov",
    ".mp4", ".mpeg", ".mpg", ".mts", ".ogv", ".ts", ".webm", ".wmv",
})  # fmt: skip

#: Frames a second where a file or a camera does not tell.
DEFAULT_RATE = Fraction(25)
_HIGHEST_RATE = 1000  # above, it is a clock's ticks, not a rate

# What FFmpeg may take a file for by its content: not pictures, text, or playlists, which would make it open
# other files and addresses.
_READ = "asf,avi,flv,h264,hevc,ivf,m4v,matroska,mjpeg,mov,mpeg,mpegts,mpegvideo,ogg"
_PICTURES = ("avif", "avis", "heic", "heix", "mif1")  # brands of MP4's container

# PyAV before 19 refuses a file of which a title is not UTF-8.
_LENIENT = {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}

_WRITTEN = {".mp4": "mp4", ".m4v": "mp4", ".mov": "mov", ".mkv": "matroska", ".avi": "avi"}
# Parts of a frame's time in which the times of a video without a constant rate are written.
_TICKS = 256


class VideoReader:
    """The frames of a video file, upright, one at a time.

    Args:
        path: the file.

    Attributes:
        name: the file.
        rate: frames a second, the mean where that varies; :data:`DEFAULT_RATE` where ``rate_known`` is False.
        rate_known: whether the file tells a rate that makes sense.
        frames_told: how many frames the file says that it has (an estimate in some formats); 0 if unknown.
        time: when the last frame is shown, in seconds after the first one; None before the first.

    Raises:
        VideoError: the file is absent, damaged at its start, or no video.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.name = os.fspath(path)
        self.time: Fraction | None = None
        if not os.path.isfile(self.name):
            raise VideoError(f"{self.name}: no such file")
        options = {"format_whitelist": _READ, "protocol_whitelist": "file"}
        try:
            self._file = av.open(f"file:{self.name}", container_options=options, **_LENIENT)
        except (av.FFmpegError, OSError) as error:
            reason = f"not a video that FFmpeg can read, or damaged at its start ({error.strerror})"
            raise VideoError(f"{self.name}: {reason}") from None
        streams = [s for s in self._file.streams.video if not s.disposition & s.disposition.attached_pic]
        if not streams or self._file.metadata.get("major_brand") in _PICTURES:
            self._file.close()
            raise VideoError(f"{self.name}: {'a picture, not a video' if streams else 'has no video stream'}")
        self._stream = streams[0]
        rate = self._stream.average_rate or self._stream.guessed_rate or 0
        self.rate_known = 0 < rate <= _HIGHEST_RATE
        self.rate = rate if self.rate_known else DEFAULT_RATE
        self._is_avi = self._file.format.name == "avi"
        self._length = self._told_length()
        self.frames_told = self._stream.frames or round(self._length * self.rate)

    def __iter__(self) -> Iterator[np.ndarray]:
        """Yield each frame: array (H, W, 3), uint8, BGR.

        Raises:
            VideoError: after the last frame that can be read: the file is damaged, or ends too early.
        """
        count = broken = 0
        reformatter = VideoReformatter()
        packets = self._file.demux(self._stream)
        while True:
            try:
                frames = next(packets).decode()
            except StopIteration:
                break
            except MemoryError:
                raise
            except Exception:  # on a damaged file PyAV raises more than its own errors
                broken += 1
                continue
            for frame in frames:
                self._take_time(frame, count)
                count += 1
                broken += frame.is_corrupt
                image = reformatter.reformat(frame, format="bgr24", threads=1).to_ndarray()
                yield np.ascontiguousarray(np.rot90(image, frame.rotation // 90)) if frame.rotation else image
        if not count:
            raise VideoError(f"{self.name}: no frame of it can be read")
        # What a file tells of its length may be off by a frame or two.
        if self.time + 1 / self.rate < Fraction(98, 100) * self._length - 2 / self.rate:
            raise VideoError(f"{self.name}: damaged after frame {count} of {self.frames_told}")
        if broken:
            raise VideoError(f"{self.name}: damaged, {counted(broken, 'frame')} cannot be decoded")

    def __enter__(self) -> VideoReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _told_length(self) -> Fraction:
        """Return how long the file says that it is, in seconds; 0 where it does not say."""
        if self._is_avi:  # FFmpeg corrects the duration by the size of the file
            return self._stream.frames / self.rate
        if self._stream.duration:
            return self._stream.duration * self._stream.time_base
        try:  # Matroska: 00:00:10.000000000
            hours, minutes, seconds = map(Fraction, self._stream.metadata.get("DURATION", "").split(":"))
        except ValueError:
            return Fraction(0)
        return 3600 * hours + 60 * minutes + seconds

    def _take_time(self, frame: av.VideoFrame, count: int) -> None:
        """Set ``time`` to that of the frame after ``count`` others; a file may have none, or a wrong one."""
        # AVI has numbers of packets alone.
        stamp, tick = frame.dts if self._is_avi else frame.pts, self._stream.time_base
        if self.time is None:
            self._first, self.time = stamp or 0, Fraction(0)
            return
        time = self.time if stamp is None else (stamp - self._first) * tick
        if time <= self.time:
            time = self.time + 1 / self.rate
        self.time = count / self.rate if abs(time - count / self.rate) < tick else time


class Camera:
    """The view of a camera: used as a :class:`VideoReader`, whose attributes it has.

    Args:
        index: its number.

    Raises:
        VideoError: it cannot be opened.
    """

    frames_told = 0
    time = None

    def __init__(self, index: int) -> None:
        import cv2

        with suppress(AttributeError):  # a build without this module
            cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)
        self.name = f"camera {index}"
        self._capture = cv2.VideoCapture(index)
        if not self._capture.isOpened():
            self._capture.release()
            raise VideoError(f"{self.name}: there is no such camera, or it is in use or not permitted")
        rate = self._capture.get(cv2.CAP_PROP_FPS)
        self.rate_known = math.isfinite(rate) and 0 < rate <= _HIGHEST_RATE
        self.rate = Fraction(rate) if self.rate_known else DEFAULT_RATE

    def __iter__(self) -> Iterator[np.ndarray]:
        """Yield each frame: array (H, W, 3), uint8, BGR."""
        count = 0
        while (read := self._capture.read())[0]:
            count += 1
            yield read[1]
        if not count:
            raise VideoError(f"{self.name}: no frame of it can be read")

    def __enter__(self) -> Camera:
        return self

    def __exit__(self, *_: object) -> None:
        self._capture.release()


class VideoWriter:
    """A video file that is either whole or absent, in H.264 as browsers play it.

    It appears under its name when the ``with`` block is left, but not by an exception.

    Args:
        path: the file to write; its suffix must be one of ``suffixes``.
        rate: frames a second, above 0 and at most 1000; a float stands for the nearest simple fraction, such
            as 30000/1001.

    Attributes:
        frames: how many frames were written.

    Raises:
        VideoError: the suffix is none that can be written.
    """

    suffixes = tuple(_WRITTEN)

    def __init__(self, path: str | os.PathLike[str], rate: Fraction | float) -> None:
        self._path = Path(path)
        self._format = _WRITTEN.get(self._path.suffix.lower(), "")
        if not self._format:
            raise VideoError(f"{self._path}: cannot write this kind of video; use {', '.join(_WRITTEN)}")
        self._rate = Fraction(rate).limit_denominator(1001)
        self._ticks = 1 if self._format == "avi" else _TICKS  # AVI has no finer times than its frames
        self._last = -1
        self._size = (0, 0)
        self._stack = ExitStack()
        self.frames = 0

    def write(self, frame: np.ndarray, time: Fraction | float | None = None) -> None:
        """Append a frame.

        Args:
            frame: array (H, W, 3), uint8, BGR. The first one sets the size of the video; a later one of
                another size is resized. The codec wants even sizes: an odd one grows by a copy of its last
                row or column.
            time: when it is shown, in seconds; by default as a constant rate says. With the times that a
                :class:`VideoReader` gives, a video of variable rate stays one.

        Raises:
            VideoError: it cannot be written.
        """
        if not self.frames:
            self._size = frame.shape[1], frame.shape[0]
        if (frame.shape[1], frame.shape[0]) != self._size:
            whole = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), "bgr24")
            frame = whole.reformat(*self._size, interpolation="AREA").to_ndarray()
        height, width = frame.shape[:2]
        padded = np.pad(frame, ((0, height % 2), (0, width % 2), (0, 0)), "edge")
        picture = av.VideoFrame.from_ndarray(padded, "bgr24")
        picture = picture.reformat(format="yuv420p", dst_colorspace="ITU601", dst_color_range="MPEG")
        with self._errors():
            if not self.frames:
                self._open(picture)
            place = self.frames * self._ticks if time is None else round(time * self._rate * self._ticks)
            self._last = picture.pts = max(place, self._last + 1)
            picture.time_base = 1 / (self._rate * self._ticks)
            picture.duration = self._ticks
            self._file.mux(self._stream.encode(picture))
        self.frames += 1

    def __enter__(self) -> VideoWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self.frames:
            with self._errors(), self._stack:
                self._file.mux(self._stream.encode(None))
            return
        nothing = VideoError(f"{self._path}: no frame to write")
        with suppress(Exception):  # what is thrown away may be in any state
            self._stack.__exit__(kind or VideoError, error or nothing, trace)
        if kind is None:
            raise nothing

    def _open(self, picture: av.VideoFrame) -> None:
        partial = self._stack.enter_context(whole_file(self._path))
        # The index in front: a browser can play before it has the whole file.
        options = {"movflags": "+faststart"} if self._format in ("mp4", "mov") else {}
        output = av.open(f"file:{partial}", mode="w", format=self._format, options=options)
        self._file = self._stack.enter_context(output)
        # Without B-frames, which AVI has no place for, and with which MP4's length depends on their order.
        self._stream = self._file.add_stream("libx264", self._rate, options={"crf": "18", "bf": "0"})
        self._stream.width, self._stream.height = picture.width, picture.height
        self._stream.pix_fmt = "yuv420p"
        context = self._stream.codec_context
        context.time_base = 1 / (self._rate * self._ticks)
        # Said, or players guess by the size: BT.601's matrix, as converted above, on sRGB's primaries.
        context.colorspace, context.color_range = picture.colorspace, picture.color_range
        context.color_primaries = context.color_trc = 1

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (av.FFmpegError, OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or one_line(error)
            raise VideoError(f"{self._path}: cannot be written: {reason}") from None
