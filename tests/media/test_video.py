"""Video made here by OpenCV, read back, and written again."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from nonlocal_det.errors import VideoError
from nonlocal_det.media.video import DEFAULT_RATE, VideoReader, VideoWriter

cv2 = pytest.importorskip("cv2")


def make(path: Path, rate: float = 12.5, count: int = 6, size: tuple[int, int] = (64, 48)) -> Path:
    """Frames (size is width, height) that get lighter, with a white bar at the top."""
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"mp4v"), rate, size)
    assert writer.isOpened()
    for index in range(count):
        frame = np.full((size[1], size[0], 3), 20 * index, np.uint8)
        frame[:8] = 255
        writer.write(frame)
    writer.release()
    return path


def read(path: Path) -> tuple[list[np.ndarray], float]:
    capture = cv2.VideoCapture(str(path))
    rate = capture.get(cv2.CAP_PROP_FPS)
    frames = []
    while True:
        ok, frame = capture.read()
        if not ok:
            return frames, rate
        frames.append(frame)


def test_reads_frame_by_frame(tmp_path):
    with VideoReader(make(tmp_path / "a.mp4")) as reader:
        assert reader.rate == pytest.approx(12.5)
        assert reader.rate_known
        assert reader.frames_told == 6
        lightness = [frame[30, 30].mean() for frame in reader]
    np.testing.assert_allclose(lightness, [0, 20, 40, 60, 80, 100], atol=6)


def test_rotation_of_a_phone_is_applied(tmp_path):
    content = bytearray(make(tmp_path / "a.mp4").read_bytes())
    # The track's matrix: 16.16 fixed point, its last column 2.30.
    identity = struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    matrix = content.index(identity, content.index(b"tkhd"))
    turned = struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 48 << 16, 0, 1 << 30)
    content[matrix : matrix + 36] = turned
    (tmp_path / "b.mp4").write_bytes(content)

    with VideoReader(tmp_path / "b.mp4") as reader:
        frame = next(iter(reader))

    assert frame.shape == (64, 48, 3)
    assert frame[:, -4:].mean() > 200  # the bar at the top is now at the right
    assert frame[:, :30].mean() < 50


@pytest.mark.parametrize("suffix", VideoWriter.suffixes)
@pytest.mark.parametrize("rate", [30000 / 1001, 7.0])
def test_round_trip(tmp_path, suffix, rate):
    with VideoWriter(tmp_path / f"out{suffix}", rate) as writer:
        for index in range(5):
            writer.write(np.full((48, 64, 3), (40 * index, 100, 200), np.uint8))

    frames, read_rate = read(writer.path)

    assert writer.path == tmp_path / f"out{suffix}"
    assert len(frames) == writer.frames == 5
    assert read_rate == pytest.approx(rate, abs=1e-3)
    for index, frame in enumerate(frames):
        np.testing.assert_allclose(frame.mean(axis=(0, 1)), (40 * index, 100, 200), atol=6)
    assert [path.name for path in tmp_path.iterdir()] == [f"out{suffix}"]


@pytest.mark.parametrize("size", [(65, 49), (1, 1), (33, 20)])
def test_odd_sizes_lose_no_pixel(tmp_path, size):
    width, height = size
    frame = np.zeros((height, width, 3), np.uint8)
    frame[-1:, -1:] = 255
    with VideoWriter(tmp_path / "odd.avi", 25) as writer:
        writer.write(frame)
    ((back,), _) = read(writer.path)
    assert back.shape == (height + height % 2, width + width % 2, 3)
    assert back[height - 1, width - 1].mean() > 128


def test_frames_of_another_size_are_resized(tmp_path):
    with VideoWriter(tmp_path / "a.mp4", 25) as writer:
        writer.write(np.zeros((48, 64, 3), np.uint8))
        writer.write(np.zeros((96, 128, 3), np.uint8))
    assert [frame.shape for frame in read(writer.path)[0]] == [(48, 64, 3)] * 2


def without_codecs(monkeypatch: pytest.MonkeyPatch, *missing: str) -> None:
    codes = {cv2.VideoWriter_fourcc(*codec) for codec in missing}
    real = cv2.VideoWriter

    def build(path: str, code: int, *args):
        return real() if code in codes else real(path, code, *args)

    monkeypatch.setattr(cv2, "VideoWriter", build)


def test_missing_codec_falls_back(tmp_path, monkeypatch):
    without_codecs(monkeypatch, "mp4v", "avc1")
    with VideoWriter(tmp_path / "a.mp4", 25) as writer:
        writer.write(np.zeros((48, 64, 3), np.uint8))
    assert writer.path == tmp_path / "a.avi"
    assert writer.codec == "MJPG"
    assert len(read(writer.path)[0]) == 1

    with pytest.raises(VideoError, match=r"a\.avi is taken"), VideoWriter(tmp_path / "a.mp4", 25) as writer:
        writer.write(np.zeros((48, 64, 3), np.uint8))


def test_no_codec_is_an_error(tmp_path, monkeypatch):
    without_codecs(monkeypatch, "mp4v", "avc1", "MJPG")
    with pytest.raises(VideoError, match=r"a\.mp4"), VideoWriter(tmp_path / "a.mp4", 25) as writer:
        writer.write(np.zeros((48, 64, 3), np.uint8))
    assert not list(tmp_path.iterdir())


def test_no_frame_is_an_error(tmp_path):
    with pytest.raises(VideoError, match=r"a\.mp4: no frame"), VideoWriter(tmp_path / "a.mp4", 25):
        pass


def test_interrupted_writing_leaves_nothing(tmp_path):
    (tmp_path / "a.mp4").write_text("an older one")

    def frames():
        yield np.zeros((48, 64, 3), np.uint8)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), VideoWriter(tmp_path / "a.mp4", 25) as writer:  # noqa: PT012
        for frame in frames():
            writer.write(frame)
    assert [path.name for path in tmp_path.iterdir()] == ["a.mp4"]
    assert (tmp_path / "a.mp4").read_text() == "an older one"


def test_other_kinds_are_refused(tmp_path):
    with pytest.raises(VideoError, match=r"\.mp4"):
        VideoWriter(tmp_path / "a.gif", 25)


def test_unreadable_sources(tmp_path):
    (tmp_path / "text.mp4").write_text("no video")
    for source in (tmp_path / "text.mp4", tmp_path / "absent.mp4"):
        with pytest.raises(VideoError, match=rf"^{source}: "):
            VideoReader(source)
    with pytest.raises(VideoError, match="camera 97"):
        VideoReader(97)


@pytest.mark.parametrize("rate", [0.0, float("nan"), -1.0, 90000.0])
def test_unknown_rate(tmp_path, monkeypatch, rate):
    real = cv2.VideoCapture

    class Capture:
        def __init__(self, source: str) -> None:
            self._capture = real(source)

        def get(self, key: int) -> float:
            return rate if key == cv2.CAP_PROP_FPS else self._capture.get(key)

        def __getattr__(self, name: str):
            return getattr(self._capture, name)

    path = make(tmp_path / "a.mp4")
    monkeypatch.setattr(cv2, "VideoCapture", Capture)
    reader = VideoReader(path)
    assert not reader.rate_known
    assert reader.rate == DEFAULT_RATE
