"""Pictures as they are found in the wild, against pixels worked out by hand or by another decoder."""

from __future__ import annotations

import os

import numpy as np
import pytest
from image_cases import growth, write_png
from PIL import Image

from nonlocal_det.errors import ImageError
from nonlocal_det.media.image import read_image, write_image

# What the EXIF standard says about the stored rows and columns, as numpy does it.
UPRIGHT = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: np.rot90(a),
}


def pattern(height: int = 24, width: int = 40) -> np.ndarray:
    """A picture (H, W, 3), RGB, no part of which is like another."""
    y, x = np.mgrid[:height, :width]
    return np.stack([x * 6, y * 10, (x + y) % 7 * 30], axis=2).astype(np.uint8)


def exif(orientation: int) -> Image.Exif:
    tags = Image.Exif()
    tags[274] = orientation
    return tags


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("suffix", [".png", ".tif", ".webp"])
def test_orientation_is_applied_once(tmp_path, orientation, suffix):
    stored = pattern()
    path = tmp_path / f"picture{suffix}"
    options = {"lossless": True} if suffix == ".webp" else {}
    Image.fromarray(stored).save(path, exif=exif(orientation), **options)

    image = read_image(path)

    assert image.dtype == np.uint8
    assert image.flags.c_contiguous
    np.testing.assert_array_equal(image, UPRIGHT[orientation](stored)[:, :, ::-1])


@pytest.mark.parametrize("orientation", range(2, 9))
def test_real_files_of_all_orientations_show_one_scene(data_dir, orientation):
    first = np.asarray(Image.open(data_dir / "images" / "exif_orientation_1.jpg"))[:, :, ::-1]

    other = read_image(data_dir / "images" / f"exif_orientation_{orientation}.jpg")

    assert other.shape == first.shape
    # They differ by JPEG's noise and by the digit in the middle.
    differ = np.abs(other.astype(int) - first).max(axis=2) > 60
    assert differ.mean() < 0.01
    rows, columns = np.nonzero(differ)
    inside = (abs(rows - 600) < 120) & (abs(columns - 900) < 120)
    assert inside.mean() > 0.9


def test_one_by_two_pixels(data_dir):
    stored = np.asarray(Image.open(data_dir / "images" / "exif_2x1.jpg"))
    assert stored.shape == (1, 2, 3)

    image = read_image(data_dir / "images" / "exif_2x1.jpg")

    np.testing.assert_array_equal(image, np.rot90(stored)[:, :, ::-1])  # its tag is 8


def test_webp_with_exif(data_dir):
    stored = np.asarray(Image.open(data_dir / "images" / "exif_orientation_6.webp"))
    image = read_image(data_dir / "images" / "exif_orientation_6.webp")
    np.testing.assert_array_equal(image, np.rot90(stored, -1)[:, :, ::-1])


def test_cmyk(data_dir):
    """Red letters on black: the inks of Adobe's files are stored inverted."""
    cv2 = pytest.importorskip("cv2")
    expected = cv2.imread(str(data_dir / "images" / "cmyk.jpg"))
    image = read_image(data_dir / "images" / "cmyk.jpg").astype(int)
    assert np.abs(image - expected).mean() < 8
    assert image[50].max(axis=0).tolist()[2] > 200  # red, in the row of the letters
    assert image[-1].max() < 30


def test_gray(data_dir):
    stored = np.asarray(Image.open(data_dir / "images" / "gray.jpg"))
    image = read_image(data_dir / "images" / "gray.jpg")
    for channel in range(3):
        np.testing.assert_array_equal(image[:, :, channel], stored)


def test_16_bit_gray_file(data_dir):
    """It holds 0 to 255 in 16 bits, and names 255 as transparent."""
    stored = np.asarray(Image.open(data_dir / "images" / "gray16.png"))
    assert stored.dtype == np.uint16
    image = read_image(data_dir / "images" / "gray16.png")
    for channel in range(3):
        np.testing.assert_array_equal(image[:, :, channel], stored)


@pytest.mark.parametrize("suffix", [".png", ".tif"])
@pytest.mark.parametrize("highest", [255, 1023, 4095, 16383, 65535])
def test_16_bit_gray_is_scaled(tmp_path, highest, suffix):
    values = np.linspace(0, highest, 256).round().astype(np.uint16).reshape(16, 16)
    path = tmp_path / f"deep{suffix}"
    Image.fromarray(values).save(path)
    image = read_image(path)
    assert np.abs(image[:, :, 0].astype(int).ravel() - np.arange(256)).max() <= 1
    assert (image == image[:, :, :1]).all()


def test_float_gray(tmp_path):
    values = np.linspace(0, 1, 256, dtype=np.float32).reshape(16, 16)
    Image.fromarray(values).save(tmp_path / "unit.tif")
    Image.fromarray(values * 5000 - 2000).save(tmp_path / "any.tif")
    for name in ("unit.tif", "any.tif"):
        assert np.abs(read_image(tmp_path / name)[:, :, 0].astype(int).ravel() - np.arange(256)).max() <= 1


@pytest.mark.parametrize("name", ["gray_alpha.png", "rgba.png"])
def test_alpha_shows_white(data_dir, name):
    rgba = np.asarray(Image.open(data_dir / "images" / name).convert("RGBA")).astype(float)
    alpha = rgba[:, :, 3:] / 255
    expected = rgba[:, :, :3] * alpha + 255 * (1 - alpha)
    image = read_image(data_dir / "images" / name)
    assert np.abs(image[:, :, ::-1] - expected).max() <= 1
    assert (image[alpha[:, :, 0] == 0] == 255).all()


def test_gray_with_alpha(tmp_path):
    pixels = np.array([[[0, 0], [0, 255], [100, 255], [0, 128]]], np.uint8)
    Image.fromarray(pixels).save(tmp_path / "la.png")
    image = read_image(tmp_path / "la.png")
    assert (image == image[:, :, :1]).all()
    np.testing.assert_allclose(image[0, :, 0], [255, 0, 100, 127], atol=1)


def test_palettes(data_dir, tmp_path):
    assert (read_image(data_dir / "images" / "palette.png") == [0, 0, 255]).all()  # BGR: red

    see_through = Image.new("P", (4, 3), 1)
    see_through.putpalette([10, 20, 30, 40, 50, 60])
    see_through.putpixel((0, 0), 0)
    see_through.save(tmp_path / "p.png", transparency=0)
    image = read_image(tmp_path / "p.png")
    assert image[0, 0].tolist() == [255, 255, 255]
    assert image[0, 1].tolist() == [60, 50, 40]


def test_animation_gives_its_first_frame(data_dir, tmp_path):
    stored = Image.open(data_dir / "images" / "animated.gif")
    stored.seek(0)
    expected = np.asarray(stored.convert("RGBA"))
    assert stored.n_frames > 1
    image = read_image(data_dir / "images" / "animated.gif")
    shown = expected[:, :, 3] == 255
    np.testing.assert_array_equal(image[shown], expected[shown][:, 2::-1])

    colors = [Image.new("RGB", (5, 4), color) for color in ("red", "blue")]
    colors[0].save(tmp_path / "two.gif", save_all=True, append_images=colors[1:])
    assert (read_image(tmp_path / "two.gif") == [0, 0, 255]).all()


@pytest.mark.parametrize("name", ["truncated.jpg", "broken.png", "zero_width.gif", "absent.png"])
def test_damaged_files_are_refused_by_one_line_with_their_name(data_dir, name):
    path = data_dir / "images" / name
    with pytest.raises(ImageError) as caught:
        read_image(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_every_prefix_of_a_file_is_refused_or_read(data_dir, tmp_path):
    """Whatever Pillow raises on a file cut short, it comes as an ImageError."""
    messages = []
    for name in ("rgba.png", "gray.jpg", "exif_orientation_6.webp", "animated.gif", "cmyk.jpg"):
        content = (data_dir / "images" / name).read_bytes()
        path = tmp_path / name
        for part in range(1, 24):
            path.write_bytes(content[: len(content) * part // 40])
            try:
                read_image(path)  # the first frame of an animation may be whole already
            except ImageError as error:
                messages.append(str(error))
    assert len(messages) > 60
    assert not any("\n" in message for message in messages)


def test_other_things_are_refused(tmp_path, monkeypatch):
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "empty.png").touch()
    for name in ("text.png", "empty.png", "."):
        with pytest.raises(ImageError, match="picture"):
            read_image(tmp_path / name)

    Image.new("L", (100, 100)).save(tmp_path / "bomb.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(ImageError, match=r"bomb\.png: too large"):
        read_image(tmp_path / "bomb.png")


def test_a_bomb_is_refused_by_its_header(tmp_path):
    write_png(tmp_path / "bomb.png", 14_000, rows=14_000)
    write_png(tmp_path / "below.png", 6_000, rows=6_000)
    assert (tmp_path / "bomb.png").stat().st_size < 2**20
    error, bytes_more = growth(read_image, tmp_path / "bomb.png")
    assert error.startswith(f"{tmp_path}/bomb.png: too large: ")
    assert "\n" not in error
    assert bytes_more < 32 * 2**20
    error, bytes_more = growth(read_image, tmp_path / "below.png")  # what is decoded is seen
    assert not error
    assert bytes_more > 3 * 6_000**2


def test_pillow_runs_no_program(tmp_path, monkeypatch):
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    (programs / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
    path = tmp_path / "photo.jpg"
    path.write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n")
    with Image.open(path) as image:
        assert image.format == "EPS"  # what Pillow would do
    with pytest.raises(ImageError, match=r"photo\.jpg: not a picture"):
        read_image(path)
    assert not (tmp_path / "ran").exists()


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    for name in ("pipe.png", "."):
        with pytest.raises(ImageError, match="a folder or a device, not a picture"):
            read_image(tmp_path / name)


def test_written_whole_in_the_format_of_the_suffix(tmp_path):
    pixels = pattern()
    for suffix, kind in ((".png", "PNG"), (".JPG", "JPEG"), (".tif", "TIFF")):
        write_image(tmp_path / f"a{suffix}", pixels)
        with Image.open(tmp_path / f"a{suffix}") as image:
            assert image.format == kind
    np.testing.assert_array_equal(read_image(tmp_path / "a.png"), pixels)
    assert len(list(tmp_path.iterdir())) == 3
    with pytest.raises(ValueError, match="unknown file extension"):
        write_image(tmp_path / "a.nothing", pixels)
    assert len(list(tmp_path.iterdir())) == 3
