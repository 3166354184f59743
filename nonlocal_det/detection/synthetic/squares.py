"""Scenes of grey squares whose class is told by one disc elsewhere in the picture, drawn from a seed.

Every picture has one large disc, red or blue, and up to three grey squares. The class of a square is the
colour of its picture's disc and nothing else: the same random numbers draw the same squares on the same
background for both classes, and every pixel outside the disc is equal. So a detector finds the squares by
what is near them, but has to carry the colour over the distance to the disc to name them, which local
operations cannot beyond their receptive field and one non-local operation can (Wang, Girshick, Gupta and He,
"Non-local Neural Networks", CVPR 2018, Section 1). The distance is recorded with every square.

Write a set of your own with
``python -m nonlocal_det.detection.synthetic.squares --output DIR --count 100 --size 192``.
"""

from __future__ import annotations

import sys
from math import isqrt
from typing import Any

import numpy as np

from nonlocal_det.detection.synthetic import CONTEXT_CLASSES
from nonlocal_det.detection.synthetic.command import Scene, SceneSet
from nonlocal_det.media.canvas import (
    SUBPIXELS,
    Colour,
    Layer,
    add_light_and_grain,
    chance,
    make_rng,
    randint,
    shade,
    textured_background,
)

MAX_SQUARES = 3
_COLOURS: tuple[Colour, Colour] = ((205, 60, 55), (55, 80, 205))
# In pixels of a picture of 192 x 192: the disc has a radius of 28 and a square 18 to 36 a side.
_REFERENCE = 192
_DISC_RADIUS = 28
_SIDES = (18, 36)
_GAP = 4


def draw_context(size: int, rng: np.random.Generator, label: int) -> Scene:
    """Draw one scene.

    Args:
        size: side of the picture in pixels.
        rng: source of everything but the class.
        label: 0 or 1, the class of all squares: index into :data:`CONTEXT_CLASSES`.

    Returns:
        The picture, uint8 [size, size, 3], RGB; and one COCO annotation per square, without ids:
        "category_id", "iscrowd", "bbox", "area" and "segmentation", and beyond COCO's keys "disc", the disc's
        centre x, y and radius, and "distance" from the square's centre to it, in pixels, in steps of 1/4. At
        least one square, at most :data:`MAX_SQUARES`.
    """
    image = textured_background(rng, (size, size))
    radius = size * _DISC_RADIUS // _REFERENCE
    gap = max(1, size * _GAP // _REFERENCE)
    centre = tuple(randint(rng, radius + 1, size - radius - 1) for _ in range(2))
    boxes = _place_squares(rng, size, centre, radius, gap)

    # Drawn for either class alike, so that the random numbers that follow are the same.
    jitter = [randint(rng, -15, 15) for _ in range(3)]
    red, green, blue = (base + change for base, change in zip(_COLOURS[label], jitter, strict=True))
    x, y = centre
    layer = Layer((x - radius - 1, y - radius - 1, x + radius + 2, y + radius + 2), (size, size))
    layer.disc((x * SUBPIXELS, y * SUBPIXELS), radius * SUBPIXELS, (red, green, blue), 1)
    layer.blend_onto(image)

    border = max(1, size // 96)
    for left, top, side in boxes:
        level = randint(rng, 90, 200)
        grey = (level, level, level)
        image[top : top + side, left : left + side] = shade(grey, 45)
        image[top + border : top + side - border, left + border : left + side - border] = grey
    add_light_and_grain(image, rng)
    return image, [_annotation(box, (*centre, radius), label) for box in boxes]


def _place_squares(
    rng: np.random.Generator, size: int, centre: tuple[int, int], radius: int, gap: int
) -> list[tuple[int, int, int]]:
    """Return (left, top, side) of squares that keep ``gap`` pixels from the disc and from each other."""
    low, high = (size * side // _REFERENCE for side in _SIDES)
    boxes: list[tuple[int, int, int]] = []
    for attempt in range(200):
        if len(boxes) == MAX_SQUARES or (boxes and attempt >= 60):
            break
        side = randint(rng, low, high)
        left, top = randint(rng, 1, size - side - 1), randint(rng, 1, size - side - 1)
        # The point of the square that is nearest to the disc's centre.
        dx = centre[0] - min(max(centre[0], left), left + side)
        dy = centre[1] - min(max(centre[1], top), top + side)
        clear_of_disc = dx * dx + dy * dy > (radius + gap) ** 2
        if clear_of_disc and all(_apart((left, top, side), box, gap) for box in boxes):
            boxes.append((left, top, side))
    return boxes


def _apart(one: tuple[int, int, int], other: tuple[int, int, int], gap: int) -> bool:
    return any(
        a + one[2] + gap <= b or b + other[2] + gap <= a for a, b in zip(one[:2], other[:2], strict=True)
    )


def _annotation(box: tuple[int, int, int], disc: tuple[int, int, int], label: int) -> dict[str, Any]:
    left, top, side = box
    right, bottom = left + side, top + side
    # In quarters of a pixel, so that centres and distance are whole numbers.
    dx, dy = (4 * start + 2 * side - 4 * middle for start, middle in zip(box[:2], disc[:2], strict=True))
    return {
        "category_id": label + 1,
        "iscrowd": 0,
        "bbox": [left, top, side, side],
        "area": side * side,
        "segmentation": [[left, top, right, top, right, bottom, left, bottom]],
        "disc": list(disc),
        "distance": isqrt(dx * dx + dy * dy) / 4,
    }


def _draw(size: int, seed: int, index: int) -> Scene:
    # Of pictures 2k and 2k + 1 one is of each class, so the two are equally frequent.
    first = chance(make_rng(seed, index // 2, 1), 50)
    return draw_context(size, make_rng(seed, index, 0), int(first) ^ (index % 2))


CONTEXT = SceneSet(
    module="nonlocal_det.detection.synthetic.squares",
    draw=_draw,
    categories=[{"id": number, "name": name} for number, name in enumerate(CONTEXT_CLASSES, start=1)],
    description="Grey squares whose class is the colour of a disc",
    help="Draw scenes of grey squares whose class is the colour of a disc elsewhere, and write "
    "them as a COCO-format data set: DIR/annotations.json (boxes, polygons, the distance to the disc) "
    "and DIR/images/*.png. The same numbers give the same pictures.",
    size=_REFERENCE,
    sizes=(64, 2048),  # the smallest square is then 6 pixels wide
)
write_context, main = CONTEXT.write, CONTEXT.main

if __name__ == "__main__":
    sys.exit(main())
