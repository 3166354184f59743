"""Drawing with integers: the same random numbers give the same pixels on every machine.

Shapes are drawn on a canvas that is :data:`SUBPIXELS` times finer than the picture and then averaged, which
smooths the edges. Coordinates are integers in those sub-pixels, sines come from an integer table, and only
OpenCV's fixed-point primitives are used, so nothing depends on how a platform rounds floating-point numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import cv2
import numpy as np

DRAWING_VERSION = 1
"""Part of the names of cached data sets. Raise it with every change to what is drawn or written."""

SUBPIXELS = 4
"""Sub-pixels per pixel on each axis: 4, so that two halvings reach the picture's size."""

_TRIG_BITS = 14
_SINES = tuple(round(math.sin(math.radians(degree)) * (1 << _TRIG_BITS)) for degree in range(360))

T = TypeVar("T")
Point = tuple[int, int]
Colour = tuple[int, int, int]


def make_rng(*key: int) -> np.random.Generator:
    """Return a generator whose stream depends on the whole ``key`` (non-negative integers) alone."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))


def randint(rng: np.random.Generator, low: int, high: int) -> int:
    """Return a random integer of the closed interval [``low``, ``high``]."""
    return int(rng.integers(low, high, endpoint=True))


def chance(rng: np.random.Generator, percent: int) -> bool:
    """Return True in ``percent`` of 100 cases."""
    return randint(rng, 0, 99) < percent


def choice(rng: np.random.Generator, options: Sequence[T]) -> T:
    """Return one of ``options``."""
    return options[randint(rng, 0, len(options) - 1)]


def rotate(point: Point, degrees: int) -> Point:
    """Return ``point`` turned about the origin by whole ``degrees``, clockwise on the screen."""
    sine, cosine = _SINES[degrees % 360], _SINES[(degrees + 90) % 360]
    half = 1 << (_TRIG_BITS - 1)
    x, y = point
    return (x * cosine - y * sine + half) >> _TRIG_BITS, (x * sine + y * cosine + half) >> _TRIG_BITS


def ellipse_points(
    centre: Point, radii: Point, degrees: int = 0, start: int = 0, stop: int = 360
) -> list[Point]:
    """Return the outline of an ellipse, or of the arc from ``start`` to ``stop``, in steps of 6 degrees.

    Angle 0 points right, 90 down. The whole is turned by ``degrees`` about ``centre``, clockwise.
    """
    points = []
    for angle in range(start, stop + 1, 6):
        dx, dy = rotate((rotate((radii[0], 0), angle)[0], rotate((radii[1], 0), angle)[1]), degrees)
        points.append((centre[0] + dx, centre[1] + dy))
    return points


def shade(colour: Colour, percent: int) -> Colour:
    """Return ``colour`` (channels in 0-255) with its brightness at ``percent``."""
    red, green, blue = (min(255, channel * percent // 100) for channel in colour)
    return red, green, blue


def colour_distance(first: Colour, second: Colour) -> int:
    """Return the sum of the absolute differences of the three channels, 0-765."""
    return sum(abs(a - b) for a, b in zip(first, second, strict=True))


class Layer:
    """A transparent rectangle of the picture that shapes are drawn on.

    Every shape carries a part number, so that one knows afterwards which part is on top at a point.

    Args:
        box: (x0, y0, x1, y1) in pixels, x1 and y1 exclusive: where the layer lies. It is cut to the picture.
        size: (width, height) of the picture in pixels.
    """

    def __init__(self, box: tuple[int, int, int, int], size: tuple[int, int]) -> None:
        (x0, y0), (x1, y1) = np.clip(np.reshape(box, (2, 2)), 0, size).tolist()
        #: The rows and columns of the picture that the layer covers.
        self.window = slice(y0, y1), slice(x0, x1)
        self._size = (x1 - x0, y1 - y0)
        self._origin = (x0 * SUBPIXELS, y0 * SUBPIXELS)
        shape = ((y1 - y0) * SUBPIXELS, (x1 - x0) * SUBPIXELS, 4)
        self._canvas = np.zeros(shape, np.uint8)  # red, green, blue, part

    @property
    def empty(self) -> bool:
        """Whether the layer lies outside the picture."""
        return self._canvas.size == 0

    def polygon(self, points: Sequence[Point] | np.ndarray, colour: Colour, part: int) -> None:
        """Fill a convex polygon; ``points`` are in sub-pixels of the picture, ``part`` is 1 to 255.

        OpenCV 4 and 5 agree on the pixels of convex polygons, but not on those of ``cv2.fillPoly``.
        """
        if not self.empty:
            corners = np.subtract(points, self._origin).astype(np.int32)
            cv2.fillConvexPoly(self._canvas, corners, (*colour, part))

    def disc(self, centre: Point, radius: int, colour: Colour, part: int) -> None:
        """Fill a disc."""
        if not self.empty:
            x, y = centre[0] - self._origin[0], centre[1] - self._origin[1]
            cv2.circle(self._canvas, (x, y), radius, (*colour, part), cv2.FILLED)

    def capsule(self, start: Point, end: Point, radius: int, colour: Colour, part: int) -> None:
        """Fill a thick line with round ends."""
        # cv2.line finds the corners of a thick line in floating point, hence the polygon.
        dx, dy = end[0] - start[0], end[1] - start[1]
        length = math.isqrt(dx * dx + dy * dy)
        if length:
            nx, ny = -dy * radius // length, dx * radius // length
            corners = np.array([start, end, end, start]) + np.outer((1, 1, -1, -1), (nx, ny))
            self.polygon(corners, colour, part)
        self.disc(start, radius, colour, part)
        self.disc(end, radius, colour, part)

    def part_at(self, point: Point) -> int:
        """Return the part on top at ``point`` (sub-pixels of the picture); 0 where there is none."""
        x, y = point[0] - self._origin[0], point[1] - self._origin[1]
        height, width = self._canvas.shape[:2]
        return int(self._canvas[y, x, 3]) if 0 <= x < width and 0 <= y < height else 0

    def mask(self, part: int | None = None) -> np.ndarray:
        """Return which pixels of the window a part, or all, cover at least by half, bool [height, width]."""
        return self._coverage(part) >= SUBPIXELS * SUBPIXELS // 2

    def blend_onto(self, image: np.ndarray) -> None:
        """Draw the layer over ``image``, a uint8 array [height, width, 3] of the whole picture, in place."""
        if self.empty:
            return
        whole = SUBPIXELS * SUBPIXELS
        below = image[self.window].astype(np.int32)
        uncovered = (whole - self._coverage(None))[..., None]
        # What was not drawn on is black, so the mean over a pixel is already weighted by its coverage.
        drawn = self._shrink(self._canvas)[..., :3]
        image[self.window] = np.minimum(below * uncovered // whole + drawn, 255)

    def _coverage(self, part: int | None) -> np.ndarray:
        """Return the number of drawn sub-pixels of every pixel, int32 [height, width]."""
        drawn = self._canvas[..., 3] > 0 if part is None else self._canvas[..., 3] == part
        return self._shrink(drawn.astype(np.uint8) * (SUBPIXELS * SUBPIXELS))

    def _shrink(self, array: np.ndarray) -> np.ndarray:
        width, height = self._size
        if self.empty:
            return np.zeros((height, width, *array.shape[2:]), np.int32)
        # Halving is OpenCV's fast path, three times as fast as shrinking by 4 at once.
        for factor in (2, 1):
            array = cv2.resize(array, (width * factor, height * factor), interpolation=cv2.INTER_AREA)
        return array.astype(np.int32)


def smooth_noise(rng: np.random.Generator, size: tuple[int, int], cells: int, amplitude: int) -> np.ndarray:
    """Return smooth random values in [-``amplitude``, ``amplitude``], int32 [height, width].

    Args:
        rng: source of the values.
        size: (width, height) in pixels.
        cells: random values on each axis; between them it is interpolated.
        amplitude: 0 to 127.
    """
    grid = rng.integers(0, 256, (cells, cells), np.uint8)
    values = cv2.resize(grid, size, interpolation=cv2.INTER_LINEAR_EXACT).astype(np.int32)
    return (values - 128) * amplitude >> 7


def _pattern(rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """Return a faint regular pattern (planks, tiles, slanted stripes) or none, int32 [height, width]."""
    width, height = size
    y, x = np.mgrid[0:height, 0:width]
    kind = choice(rng, ("none", "planks", "rows", "bricks", "stripes"))
    pitch, strength = randint(rng, 10, 36), randint(rng, 8, 22)
    if kind == "planks":
        return np.where(x % pitch < 2, -strength, (x // pitch * 7919 % 5 - 2) * 3)
    if kind == "rows":
        return np.where(y % pitch < 2, -strength, (y // pitch * 7919 % 5 - 2) * 3)
    if kind == "bricks":
        row = y // pitch
        joint = (y % pitch < 2) | ((x + row % 2 * pitch) % (2 * pitch) < 2)
        return np.where(joint, -strength, ((x + row % 2 * pitch) // (2 * pitch) * 31 + row * 17) % 5 * 3 - 6)
    if kind == "stripes":
        slope = choice(rng, (-2, -1, 1, 2))
        return np.where((2 * x + slope * y) // pitch % 2 == 0, strength // 2, -strength // 2)
    return np.zeros((height, width), np.int32)


def random_colour(rng: np.random.Generator, low: int = 20, high: int = 235) -> Colour:
    """Return a colour whose three channels are independent and uniform in [``low``, ``high``]."""
    red, green, blue = (randint(rng, low, high) for _ in range(3))
    return red, green, blue


def textured_background(rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """Return a wall over a floor, each with its own muted colour, pattern and uneven light.

    It is RGB, uint8 [height, width, 3], of a ``size`` (width, height).
    """
    width, height = size
    horizon = height * randint(rng, 45, 80) // 100
    image = np.empty((height, width, 3), np.uint8)
    for rows in (slice(0, horizon), slice(horizon, height)):
        zone = (width, len(range(*rows.indices(height))))
        grey = randint(rng, 70, 210)
        colour = np.array([(grey * 3 + channel) // 4 for channel in random_colour(rng)], np.int32)
        light = smooth_noise(rng, zone, 4, 30) + smooth_noise(rng, zone, 24, 12) + _pattern(rng, zone)
        tint = np.stack([smooth_noise(rng, zone, 6, 6) for _ in range(3)], axis=-1)
        image[rows] = np.clip(colour + light[..., None] + tint, 0, 255)
    return image


def add_light_and_grain(image: np.ndarray, rng: np.random.Generator) -> None:
    """Put uneven light and fine grain on ``image`` (uint8 [height, width, 3]), in place."""
    height, width = image.shape[:2]
    light = smooth_noise(rng, (width, height), 5, 18) + rng.integers(-4, 5, (height, width), np.int8)
    image[...] = np.clip(image.astype(np.int32) + light[..., None], 0, 255)
