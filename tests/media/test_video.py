"""Video read and written, against real clips, and files made and read by OpenCV."""

from __future__ import annotations

import os
import struct
from fractions import Fraction
from pathlib import Path

import av
import cv2
import numpy as np
import pytest
from PIL import Image

from nonlocal_det.errors import VideoError
from nonlocal_det.media.video import DEFAULT_RATE, Camera, VideoReader, VideoWriter

NTSC = Fraction(30000, 1001)


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


def times(path: Path) -> list[Fraction]:
    with VideoReader(path) as reader:
        return [reader.time for _ in reader]


def noise(count: int, size: tuple[int, int] = (64, 48)) -> list[np.ndarray]:
    """Frames that do not compress well, so that a file can be cut between them."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8) for _ in range(count)]


def write(path: Path, frames: list[np.ndarray], rate: float = 25, at: list[float] | None = None) -> Path:
    with VideoWriter(path, rate) as writer:
        for index, frame in enumerate(frames):
            writer.write(frame, None if at is None else at[index])
    return path


def test_reads_frame_by_frame(tmp_path):
    with VideoReader(make(tmp_path / "a.mp4")) as reader:
        assert reader.rate == pytest.approx(12.5)
        assert reader.rate_known
        assert reader.frames_told == 6
        assert reader.time is None
        lightness = [frame[30, 30].mean() for frame in reader]
    np.testing.assert_allclose(lightness, [0, 20, 40, 60, 80, 100], atol=6)


@pytest.mark.parametrize(
    ("name", "count", "rate", "shape"),
    [
        ("abseiling_k400.mp4", 250, 25, (256, 454, 3)),
        ("arm_wrestling.mp4", 280, 28, (256, 340, 3)),
        ("archery.avi", 131, 25, (240, 320, 3)),
        ("mpeg4_320.avi", 164, 25, (240, 320, 3)),
        ("people_6fps.mp4", 57, 6, (256, 340, 3)),
        ("short_32_frames.mp4", 32, 30, (256, 340, 3)),
    ],
)
def test_real_clips(data_dir, name, count, rate, shape):
    path = data_dir / "video" / name
    with VideoReader(path) as reader:
        assert (reader.rate, reader.rate_known, reader.frames_told) == (rate, True, count)
        shown, frames = zip(*((reader.time, frame) for frame in reader), strict=True)
    assert len(frames) == count
    expected = [Fraction(index, rate) for index in range(count)]
    if name.startswith("short"):  # its last frame comes later
        expected[-1] = Fraction(32, 30)
    assert list(shown) == expected
    for frame, other in zip(frames[::50], read(path)[0][::50], strict=True):
        assert frame.shape == shape
        np.testing.assert_allclose(frame.astype(int), other.astype(int), atol=3)


@pytest.mark.parametrize("turn", [1, 2, 3])
def test_rotation_of_a_phone_is_applied(tmp_path, turn):
    content = bytearray(make(tmp_path / "a.mp4").read_bytes())
    # The track's matrix: 16.16 fixed point, its last column 2.30.
    identity = struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    matrix = content.index(identity, content.index(b"tkhd"))
    one = 1 << 16
    a, b, x, y = {1: (0, one, 48, 0), 2: (-one, 0, 64, 48), 3: (0, -one, 0, 64)}[turn]  # quarters, clockwise
    content[matrix : matrix + 36] = struct.pack(">9i", a, b, 0, -b, a, 0, x << 16, y << 16, 1 << 30)
    (tmp_path / "b.mp4").write_bytes(content)

    with VideoReader(tmp_path / "b.mp4") as reader, VideoReader(tmp_path / "a.mp4") as stored:
        frame, original = next(iter(reader)), next(iter(stored))

    assert frame.flags.c_contiguous
    np.testing.assert_array_equal(frame, np.rot90(original, -turn))


@pytest.mark.parametrize("suffix", VideoWriter.suffixes)
@pytest.mark.parametrize("rate", [30000 / 1001, NTSC, 7.0, 29.97])
def test_round_trip(tmp_path, suffix, rate):
    path = tmp_path / f"out{suffix}"
    write(path, [np.full((48, 64, 3), (40 * index, 100, 200), np.uint8) for index in range(5)], rate)

    frames, read_rate = read(path)

    exact = NTSC if abs(rate - NTSC) < 1e-9 else Fraction(rate).limit_denominator(100)
    assert len(frames) == 5
    assert read_rate == pytest.approx(rate, abs=1e-9)
    with VideoReader(path) as reader:
        assert (reader.rate, reader.frames_told) == (exact, 5)
        for index, frame in enumerate(reader):
            np.testing.assert_allclose(frame.mean(axis=(0, 1)), (40 * index, 100, 200), atol=6)
            np.testing.assert_allclose(frame.astype(int), frames[index].astype(int), atol=3)
            assert reader.time == index / exact
    assert [path.name for path in tmp_path.iterdir()] == [f"out{suffix}"]


def test_what_browsers_ask_for(tmp_path):
    path = write(tmp_path / "a.mp4", noise(10))
    with av.open(str(path)) as file:
        context = file.streams.video[0].codec_context
        assert (context.name, context.pix_fmt) == ("h264", "yuv420p")
        assert (context.colorspace, context.color_range) == (6, 1)  # said, not guessed by the size
    content = path.read_bytes()
    assert content.index(b"moov") < content.index(b"mdat")  # the index first


@pytest.mark.parametrize("suffix", [".mp4", ".mkv"])
def test_frames_of_a_variable_rate_keep_their_times(tmp_path, suffix):
    shown = [0.0, 0.1, 0.5, 0.55, 3.0]
    first = write(tmp_path / f"a{suffix}", noise(5), at=shown)
    np.testing.assert_allclose(np.array(times(first), float), shown, atol=1e-3)
    with VideoReader(first) as reader, VideoWriter(tmp_path / f"b{suffix}", reader.rate) as writer:
        for frame in reader:
            writer.write(frame, reader.time)
    np.testing.assert_allclose(np.array(times(tmp_path / f"b{suffix}"), float), shown, atol=2e-3)


def test_a_rounded_clock_does_not_spoil_a_constant_rate(tmp_path):
    """Matroska has milliseconds."""
    first = write(tmp_path / "a.mkv", noise(40), NTSC)
    with VideoReader(first) as reader, VideoWriter(tmp_path / "b.mp4", reader.rate) as writer:
        for frame in reader:
            writer.write(frame, reader.time)
    with VideoReader(tmp_path / "b.mp4") as reader:
        assert reader.rate == NTSC
        assert [reader.time for _ in reader] == [index / NTSC for index in range(40)]


@pytest.mark.parametrize("suffix", [".avi", ".mp4"])
@pytest.mark.parametrize("size", [(65, 49), (1, 1), (33, 20)])
def test_odd_sizes_lose_no_pixel(tmp_path, size, suffix):
    width, height = size
    frame = np.zeros((height, width, 3), np.uint8)
    frame[-1:, -1:] = 255
    ((back,), _) = read(write(tmp_path / f"odd{suffix}", [frame]))
    assert back.shape == (height + height % 2, width + width % 2, 3)
    assert back[height - 1, width - 1].mean() > 128


def test_frames_of_another_size_are_resized(tmp_path):
    frames = [np.zeros((48, 64, 3), np.uint8), np.full((96, 128, 3), 200, np.uint8)]
    back = read(write(tmp_path / "a.mp4", frames))[0]
    assert [frame.shape for frame in back] == [(48, 64, 3)] * 2
    np.testing.assert_allclose(back[1].mean(axis=(0, 1)), 200, atol=6)


def test_no_frame_is_an_error(tmp_path):
    with pytest.raises(VideoError, match=r"a\.mp4: no frame"), VideoWriter(tmp_path / "a.mp4", 25):
        pass
    assert not list(tmp_path.iterdir())


def test_a_first_frame_that_failed_is_no_frame(tmp_path):
    writer = VideoWriter(tmp_path / "a.mp4", 25)
    with (
        pytest.raises(VideoError, match=r"a\.mp4: no frame"),
        writer,
        pytest.raises(VideoError, match="written"),
    ):
        writer.write(np.zeros((2, 70_000, 3), np.uint8))
    assert not list(tmp_path.iterdir())


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


def test_what_cannot_be_written_is_said_in_one_line(tmp_path):
    with pytest.raises(VideoError, match=r"none/a\.mp4: cannot be written: No such file") as raised:
        write(tmp_path / "none" / "a.mp4", noise(1))
    assert "\n" not in str(raised.value)
    with pytest.raises(VideoError, match=r"a\.mp4: cannot be written"):
        write(tmp_path / "a.mp4", [np.zeros((2, 70_000, 3), np.uint8)])
    assert not list(tmp_path.iterdir())


def test_other_kinds_are_refused(tmp_path):
    with pytest.raises(VideoError, match=r"\.mp4"):
        VideoWriter(tmp_path / "a.gif", 25)


def test_unreadable_sources(tmp_path):
    (tmp_path / "text.mp4").write_text("no video")
    for source in (tmp_path / "text.mp4", tmp_path / "absent.mp4", tmp_path):
        with pytest.raises(VideoError, match=rf"^{source}: "):
            VideoReader(source)
    with pytest.raises(VideoError, match="camera 97"):
        Camera(97)


@pytest.mark.parametrize("kind", ["jpg", "png", "gif", "webp", "tif", "bmp", "avif"])
def test_a_picture_is_no_video(tmp_path, kind):
    Image.new("RGB", (64, 48), "red").save(tmp_path / f"a.{kind}")
    for name in (f"a.{kind}", "a.mp4"):
        os.replace(tmp_path / f"a.{kind}", tmp_path / name)
        with pytest.raises(VideoError, match=rf"{name}: (not|a picture, not) a video"):
            VideoReader(tmp_path / name)
        os.replace(tmp_path / name, tmp_path / f"a.{kind}")


def test_what_is_in_a_file_opens_no_other(tmp_path):
    make(tmp_path / "a.mp4")
    (tmp_path / "list.mp4").write_text(
        "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\na.mp4\n#EXT-X-ENDLIST\n"
    )
    (tmp_path / "list.txt").write_text("ffconcat version 1.0\nfile a.mp4\n")
    for name in ("list.mp4", "list.txt"):
        with pytest.raises(VideoError, match="not a video"):
            VideoReader(tmp_path / name)


def test_a_title_in_another_encoding(tmp_path):
    with av.open(str(tmp_path / "a.mp4"), mode="w") as file:
        file.metadata["title"] = "CAFE"
        stream = file.add_stream("libx264", 25)
        stream.width, stream.height = 64, 48
        file.mux(stream.encode(av.VideoFrame.from_ndarray(noise(1)[0], "bgr24")))
        file.mux(stream.encode(None))
    content = (tmp_path / "a.mp4").read_bytes()
    assert b"CAFE" in content
    (tmp_path / "a.mp4").write_bytes(content.replace(b"CAFE", b"CAF\xe9"))
    assert times(tmp_path / "a.mp4") == [0]


def test_sound_alone_is_no_video(tmp_path):
    with av.open(str(tmp_path / "a.mp4"), mode="w") as file:
        stream = file.add_stream("aac", 8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 8000), np.float32), "fltp", "mono")
        frame.sample_rate = 8000
        file.mux(stream.encode(frame))
        file.mux(stream.encode(None))
    with pytest.raises(VideoError, match=r"a\.mp4: has no video stream"):
        VideoReader(tmp_path / "a.mp4")


@pytest.mark.parametrize("suffix", VideoWriter.suffixes)
def test_a_cut_file_gives_what_it_has_and_says_so(tmp_path, suffix):
    content = write(tmp_path / f"a{suffix}", noise(50)).read_bytes()
    path = tmp_path / f"cut{suffix}"
    path.write_bytes(content[: len(content) * 6 // 10])
    count = 0
    with VideoReader(path) as reader, pytest.raises(VideoError) as raised:  # noqa: PT012
        for _ in reader:
            count += 1
    assert 20 < count < 35
    assert str(raised.value) == f"{path}: damaged after frame {count} of 50"
    path.write_bytes(content[: len(content) // 100])
    with pytest.raises(VideoError, match=rf"^{path}: ") as raised, VideoReader(path) as reader:
        list(reader)
    assert "\n" not in str(raised.value)


def test_damage_in_the_middle_is_said_at_the_end(tmp_path):
    path = write(tmp_path / "a.mkv", noise(50))
    content = bytearray(path.read_bytes())
    for place in range(len(content) // 3, len(content) // 2, 50):
        content[place] ^= 255
    path.write_bytes(content)
    shown = []
    with VideoReader(path) as reader, pytest.raises(VideoError, match=rf"^{path}: damaged") as raised:  # noqa: PT012
        for _ in reader:
            shown.append(reader.time)
    assert len(shown) > 25
    assert shown[-1] > 1.8
    assert "\n" not in str(raised.value)


def test_names_are_no_addresses(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "a.mp4")
    for name in ("12:30.mp4", "http:x.mp4", "-i.mp4", "100%d.mp4"):
        os.replace("a.mp4", name)
        with VideoReader(name) as reader:
            assert len(list(reader)) == 6
        assert times(write(Path(f"w{name}"), noise(2))) == [0, Fraction(1, 25)]
        os.replace(name, "a.mp4")


def test_unknown_rate_of_a_file(tmp_path):
    with av.open(str(tmp_path / "a.mp4"), mode="w") as file:
        stream = file.add_stream("libx264", 90000)
        stream.width, stream.height = 64, 48
        for frame in noise(3):
            file.mux(stream.encode(av.VideoFrame.from_ndarray(frame, "bgr24")))
        file.mux(stream.encode(None))
    with VideoReader(tmp_path / "a.mp4") as reader:
        assert not reader.rate_known
        assert reader.rate == DEFAULT_RATE
        assert len(list(reader)) == 3


@pytest.mark.parametrize("rate", [12.5, 0.0, float("nan"), -1.0, 90000.0])
def test_camera(tmp_path, monkeypatch, rate):
    real = cv2.VideoCapture(str(make(tmp_path / "a.mp4")))

    class Capture:
        def __init__(self, index: int) -> None:
            assert index == 3

        def get(self, key: int) -> float:
            return rate if key == cv2.CAP_PROP_FPS else real.get(key)

        def __getattr__(self, name: str):
            return getattr(real, name)

    monkeypatch.setattr(cv2, "VideoCapture", Capture)
    with Camera(3) as camera:
        assert camera.name == "camera 3"
        assert camera.rate_known == (rate == 12.5)
        assert camera.rate == (12.5 if camera.rate_known else DEFAULT_RATE)
        assert [frame.shape for frame in camera] == [(48, 64, 3)] * 6
