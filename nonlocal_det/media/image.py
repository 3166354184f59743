"""Reading one picture of any kind as the pixels that a person sees, or saying in one line why not."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
from detectron2.data.detection_utils import convert_PIL_to_numpy
from detectron2.utils.file_io import PathManager
from PIL import Image, UnidentifiedImageError

from nonlocal_det.errors import ImageError, one_line
from nonlocal_det.files import whole_file
from nonlocal_det.upstream import apply_exif_orientation

#: Suffixes, in lower case, of the files that a folder is searched for.
IMAGE_SUFFIXES = frozenset({
    ".avif", ".bmp", ".dib", ".gif", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg",
    ".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tga", ".tif", ".tiff", ".webp",
})  # fmt: skip

# What Pillow reads by running it: an EPS is a program for Ghostscript. Pillow goes by the content, so the
# name may end in .jpg.
_RUNS_PROGRAMS = frozenset({"EPS"})

# The depths of usual sensors and files: 10, 12 and 14 bits come in 16-bit files.
_DEPTHS = (8, 10, 12, 14, 16)


@contextmanager
def image_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    """Report what goes wrong in the block as the fault of a picture.

    Args:
        path: its file.

    Raises:
        ImageError: anything went wrong.
    """
    name = os.fspath(path)
    try:
        # Pillow warns of odd metadata in files that it then reads well.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except ImageError:
        raise
    except FileNotFoundError:
        raise ImageError(f"{name}: no such file") from None
    except UnidentifiedImageError:
        raise ImageError(f"{name}: not a picture that Pillow can read, or damaged at its start") from None
    except Image.DecompressionBombError as error:
        raise ImageError(
            f"{name}: too large: {one_line(error)} Make it smaller, or set PIL.Image.MAX_IMAGE_PIXELS to "
            "half the limit that you want in the script that you start"
        ) from None
    except MemoryError:
        raise ImageError(f"{name}: does not fit into the memory") from None
    except Exception as error:  # Pillow's readers raise nearly anything on a damaged file
        raise ImageError(f"{name}: cannot be read: {one_line(error)}") from None


@contextmanager
def open_image(path: str | os.PathLike[str]) -> Iterator[Image.Image]:
    """Open a picture, of which the header alone is read: the one rule for what is taken for a picture.

    Args:
        path: a file that Pillow can read, or an address that Detectron2's ``PathManager`` opens.

    Yields:
        The picture, not decoded.

    Raises:
        Exception: of any type; :func:`image_errors` makes it an ImageError. The file is absent, damaged at
            its start, empty, not a picture, or by its header so large (more than twice
            ``PIL.Image.MAX_IMAGE_PIXELS``) that it may be an attack on the memory.
    """
    name = os.fspath(path)
    if "://" not in name and os.path.exists(name) and not os.path.isfile(name):
        # Opening a pipe would wait for ever.
        raise ImageError(f"{name}: a folder or a device, not a picture")
    with PathManager.open(name, "rb") as file, Image.open(file, formats=_formats()) as image:
        yield image


def read_image(path: str | os.PathLike[str]) -> np.ndarray:
    """Read a picture upright, in colour, 8 bits a channel.

    Detectron2's ``read_image`` serves training; this one differs where a picture found in the wild would
    come out wrong there:

    - the EXIF orientation is applied exactly once, to TIFF too;
    - 16-bit gray is scaled to 8 bits, not cut off at 255. The divisor is the largest value of the smallest
      depth of 8, 10, 12, 14 and 16 bits that holds the picture: 257 for a true 16-bit one. Float gray in
      [0, 1] is multiplied by 255; any other range is stretched;
    - what is transparent shows white, as in most viewers. Dropping alpha shows the colours hidden under it;
    - of an animation or a file of several pages the first one is taken.

    Args:
        path: as for :func:`open_image`.

    Returns:
        Array (H, W, 3), uint8, BGR, contiguous.

    Raises:
        ImageError: it is no picture, or damaged, or too large.
    """
    with image_errors(path), open_image(path) as image:
        image.load()  # first: Pillow turns a TIFF while it loads it
        upright = apply_exif_orientation(image)
        pixels = convert_PIL_to_numpy(_to_rgb(upright), "BGR")
        if pixels.size == 0:
            raise ImageError(f"{os.fspath(path)}: has no pixels")
    return np.ascontiguousarray(pixels)


def write_image(path: str | os.PathLike[str], image: np.ndarray) -> None:
    """Write a picture; the file is whole or absent.

    Args:
        path: the file; its suffix says the format.
        image: array (H, W, 3), uint8, BGR.
    """
    with whole_file(path) as partial:
        Image.fromarray(image[:, :, ::-1]).save(partial, quality=95)


@cache
def _formats() -> tuple[str, ...]:
    Image.init()
    return tuple(kind for kind in Image.ID if kind not in _RUNS_PROGRAMS)


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert a loaded picture of any mode to "RGB"."""
    if image.mode in ("I", "F") or image.mode.startswith("I;16"):
        values = np.asarray(image)
        gray = _to_8_bits(values)
        if "transparency" in image.info:  # a PNG may name one value as transparent
            gray[values == image.info["transparency"]] = 255
        return Image.fromarray(gray).convert("RGB")
    if image.mode in ("La", "RGBa"):  # colours multiplied by alpha beforehand
        image = image.convert({"La": "LA", "RGBa": "RGBA"}[image.mode])
    if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGB", image.size, (255, 255, 255))
        white.paste(image, mask=image.getchannel("A"))
        return white
    return image.convert("RGB")


def _to_8_bits(values: np.ndarray) -> np.ndarray:
    """Scale gray values (H, W), integers of more than 8 bits or floats, to uint8 (H, W)."""
    whole = values.dtype.kind in "iu"
    values = np.nan_to_num(values.astype(np.float64), posinf=0.0, neginf=0.0)
    low, high = values.min(), values.max()
    if low >= 0 and whole and high < 2 ** _DEPTHS[-1]:
        low, high = 0, next(2**depth - 1 for depth in _DEPTHS if high < 2**depth)
    elif low >= 0 and high <= 1:
        low, high = 0, 1
    return np.rint((values - low) * (255.0 / max(high - low, 1e-12))).astype(np.uint8)
