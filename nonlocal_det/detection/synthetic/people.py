"""Scenes of articulated figures with boxes, masks and COCO's 17 keypoints, drawn from a seed.

Every figure is seen from the front or from the back. Its body looks the same either way; only the head tells
(a face, or hair all over), and with it which arm is the left one. A keypoint detector therefore has to carry
information from the head to the feet, which is what non-local blocks are for (Wang, Girshick, Gupta and He,
"Non-local Neural Networks", CVPR 2018, Section 5.2). The direction comes from random numbers of its own, so
that pose, colours, drawing order, place and size know nothing about it.

Write a set of your own with
``python -m nonlocal_det.detection.synthetic.people --output DIR --count 100 --size 320``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from detectron2.data.datasets.builtin_meta import COCO_PERSON_KEYPOINT_NAMES, KEYPOINT_CONNECTION_RULES

from nonlocal_det.detection.annotations.coco_writer import mask_box, mask_to_polygons
from nonlocal_det.detection.synthetic.command import Scene, SceneSet
from nonlocal_det.detection.synthetic.figure import MIN_LIMB_RADIUS, Figure, Looks, Pose
from nonlocal_det.media.canvas import (
    SUBPIXELS,
    Colour,
    Layer,
    add_light_and_grain,
    chance,
    choice,
    colour_distance,
    ellipse_points,
    make_rng,
    randint,
    random_colour,
    rotate,
    shade,
    textured_background,
)

MAX_FIGURES = 5
_MIN_HEIGHT = 60  # pixels; limbs of smaller figures would be too thin to see

_SKINS: tuple[Colour, ...] = ((241, 204, 170), (224, 172, 132), (190, 132, 92), (141, 90, 60), (98, 62, 44))
_HAIRS: tuple[Colour, ...] = (
    *((28, 24, 24), (74, 46, 28), (128, 70, 30)),
    *((216, 178, 92), (170, 166, 162), (150, 50, 30)),
)
_NOBODY = 255  # owner of the pixels that belong to no figure


def _random_looks(rng: np.random.Generator) -> Looks:
    skin = choice(rng, _SKINS)
    # A face must not look like hair from afar: nothing else tells the front from the back.
    hair = choice(rng, [hair for hair in _HAIRS if colour_distance(hair, skin) >= 150])
    shirt = random_colour(rng)
    trousers = random_colour(rng)
    while colour_distance(shirt, trousers) < 100:
        trousers = random_colour(rng)
    return Looks(
        skin=skin,
        hair=hair,
        shirt=shirt,
        band=random_colour(rng) if chance(rng, 40) else None,
        trousers=trousers,
        shoes=random_colour(rng, 20, 120),
        long_sleeves=chance(rng, 50),
        long_trousers=chance(rng, 65),
    )


def _random_pose(rng: np.random.Generator, height: int, size: int, neighbour: Pose | None) -> Pose:
    """Return a pose of a figure of ``height`` pixels, near ``neighbour`` where one is given."""

    def pair(low: int, high: int) -> tuple[int, int]:
        return randint(rng, low, high), randint(rng, low, high)

    unit = height * SUBPIXELS
    side = size * SUBPIXELS
    # From the head's top to the feet a figure reaches from about 510 above its hips to 440 below.
    highest, lowest = unit * 540 // 1000, side - unit * 440 // 1000
    if chance(rng, 30):
        lowest = side - unit * randint(rng, 0, 300) // 1000  # the feet, perhaps the legs, are cut off
    y = randint(rng, min(highest, lowest), max(highest, lowest))
    if neighbour is not None:
        shift = neighbour.height * randint(rng, 150, 420) // 1000
        x = neighbour.hips[0] + (shift if chance(rng, 50) else -shift)
    else:
        x = randint(rng, unit * 100 // 1000, side - unit * 100 // 1000)
    return Pose(
        height=unit,
        hips=(x, y),
        lean=randint(rng, -18, 18),
        tilt=randint(rng, -14, 14),
        turn=randint(rng, -12, 12),
        shoulder_angles=pair(-8, 80) if chance(rng, 70) else pair(60, 165),
        elbow_angles=pair(-95, 60),
        hip_angles=pair(-6, 34),
        knee_angles=pair(-45, 25),
        arm_lengths=pair(80, 105),
        leg_lengths=pair(85, 102),
        arms_behind=(chance(rng, 25), chance(rng, 25)),
        order=(0, 1) if chance(rng, 50) else (1, 0),
    )


def _random_object(rng: np.random.Generator, size: int, colours: Sequence[Colour]) -> Layer:
    """Draw an object that could be taken for a limb, a head or a torso by its colour and shape alone."""
    side = size * SUBPIXELS
    x, y = randint(rng, 0, side), randint(rng, 0, side)
    reach = side * randint(rng, 4, 14) // 100
    kind = choice(rng, ("stick", "bent stick", "ball", "box"))
    colour, degrees, percent = choice(rng, colours), randint(rng, 0, 359), randint(rng, 50, 90)
    margin = 2 * reach // SUBPIXELS + 8
    centre = (x // SUBPIXELS, y // SUBPIXELS)
    box = (centre[0] - margin, centre[1] - margin, centre[0] + margin, centre[1] + margin)
    layer = Layer(box, (size, size))
    edges = ((3, shade(colour, 55)), (0, colour))  # a dark outline under the shape, as figures have
    if kind == "ball":
        radii = (reach * 2 // 3, reach * percent // 100)
        for extra, paint in edges:
            layer.polygon(ellipse_points((x, y), (radii[0] + extra, radii[1] + extra), degrees), paint, 1)
        layer.polygon(ellipse_points((x, y), radii, degrees, 0, 180), choice(rng, colours), 1)
        return layer
    radius = max(MIN_LIMB_RADIUS, reach // 5)
    if kind == "box":
        wide = reach * percent // 100
        corners = [(-wide, -reach), (wide, -reach), (wide, reach), (-wide, reach), (-wide, -reach)]
        radius = 3
    elif kind == "bent stick":
        corners = [(0, -reach), (reach * choice(rng, (-1, 1)) * percent // 100, 0), (0, reach)]
    else:
        corners = [(0, -reach), (0, reach)]
    path = [(x + dx, y + dy) for dx, dy in (rotate(corner, degrees) for corner in corners)]
    for extra, paint in edges:
        for start, end in pairwise(path):
            layer.capsule(start, end, radius + extra, paint, 1)
    if kind == "box":
        layer.polygon(path, colour, 1)
    return layer


def _owners(figures: Sequence[Figure], covers: Sequence[Layer], size: int) -> np.ndarray:
    """Return which figure (its index, or :data:`_NOBODY`) is on top at each pixel, uint8 [size, size]."""
    owner = np.full((size, size), _NOBODY, np.uint8)
    for index, figure in enumerate(figures):
        owner[figure.mask] = index
    for layer in covers:
        owner[layer.window][layer.mask()] = _NOBODY
    return owner


def _all_recognisable(figures: Sequence[Figure], owner: np.ndarray) -> bool:
    """Whether enough of every figure is in view, and nearly all of its head."""
    # It looks at shapes alone, which do not depend on the way that a figure faces.
    return all(
        10 * (figure.head_mask & (owner == index)).sum() >= 9 * figure.head_area
        and 100 * (owner == index).sum() >= 45 * figure.mask.sum()
        for index, figure in enumerate(figures)
    )


def draw_people(size: int, rng: np.random.Generator, facing_rng: np.random.Generator) -> Scene:
    """Draw one scene.

    Args:
        size: side of the picture in pixels.
        rng: source of everything but the way that the figures face.
        facing_rng: source of the way that they face.

    Returns:
        The picture, uint8 [size, size, 3], RGB; and one COCO annotation per figure, without ids:
        "category_id", "iscrowd", "bbox", "area" and "segmentation" of what is in view, "keypoints",
        "num_keypoints", and beyond COCO's keys "facing", "toward" the camera or "away" from it. At least one
        figure, at most :data:`MAX_FIGURES`.
    """
    toward = [chance(facing_rng, 50) for _ in range(MAX_FIGURES)]
    image = textured_background(rng, (size, size))
    count = randint(rng, 1, MAX_FIGURES)
    tallest = size * (82 if count <= 2 else 72) // 100
    low, high = max(_MIN_HEIGHT, size * 25 // 100), max(_MIN_HEIGHT, tallest)
    # What is near is taller and covers the rest.
    heights = sorted(randint(rng, low, high) for _ in range(count))
    looks = [_random_looks(rng) for _ in heights]
    colours = [colour for look in looks for colour in (look.skin, look.hair, look.shirt, look.trousers)]
    behind = [_random_object(rng, size, colours) for _ in range(randint(rng, 3, 8))]
    in_front = [_random_object(rng, size, colours) for _ in range(randint(rng, 0, 2))]

    figures: list[Figure] = []
    poses: list[Pose] = []
    while not figures:
        # A place where somebody's head would be hidden is tried again elsewhere; where there is none, the
        # scene has fewer figures.
        for height, look in zip(heights, looks, strict=True):
            for _ in range(8):
                neighbour = choice(rng, poses) if poses and chance(rng, 60) else None
                pose = _random_pose(rng, height, size, neighbour)
                tried = [*figures, Figure(pose, look, toward[len(figures)], size)]
                if _all_recognisable(tried, _owners(tried, in_front, size)):
                    figures = tried
                    poses.append(pose)
                    break

    for layer in [*behind, *(figure.layer for figure in figures), *in_front]:
        layer.blend_onto(image)
    add_light_and_grain(image, rng)

    owner = _owners(figures, in_front, size)
    return image, [_annotation(figure, owner == index) for index, figure in enumerate(figures)]


def _annotation(figure: Figure, in_view: np.ndarray) -> dict[str, Any]:
    keypoints = figure.keypoints(in_view)
    return {
        "category_id": 1,
        "iscrowd": 0,
        "bbox": mask_box(in_view),
        "area": int(in_view.sum()),
        "segmentation": mask_to_polygons(in_view),
        "keypoints": keypoints,
        "num_keypoints": sum(flag > 0 for flag in keypoints[2::3]),
        "facing": "toward" if figure.toward else "away",
    }


def _draw(size: int, seed: int, index: int) -> Scene:
    return draw_people(size, make_rng(seed, index, 0), make_rng(seed, index, 1))


_NAMES = list(COCO_PERSON_KEYPOINT_NAMES)
PEOPLE = SceneSet(
    module="nonlocal_det.detection.synthetic.people",
    draw=_draw,
    categories=[
        {
            "id": 1,
            "name": "person",
            "supercategory": "person",
            "keypoints": _NAMES,
            "skeleton": [[_NAMES.index(a) + 1, _NAMES.index(b) + 1] for a, b, _ in KEYPOINT_CONNECTION_RULES],
        }
    ],
    description="Drawn figures whose head alone tells left from right",
    help="Draw scenes of figures and write them as a COCO-format data set: DIR/annotations.json "
    "(boxes, polygons, 17 keypoints) and DIR/images/*.png. The same numbers give the same pictures.",
    size=256,
    # Figures whose parts can be told apart need 128 pixels. 2048 are drawn 4 times as large, in about 1 GB.
    sizes=(128, 2048),
)
write_people, main = PEOPLE.write, PEOPLE.main

if __name__ == "__main__":
    sys.exit(main())
