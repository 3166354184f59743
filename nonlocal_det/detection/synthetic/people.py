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
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from detectron2.data.datasets.builtin_meta import (
    COCO_PERSON_KEYPOINT_NAMES,
    KEYPOINT_CONNECTION_RULES,
)

from nonlocal_det.detection.annotations.coco_writer import mask_box, mask_to_polygons, write_coco
from nonlocal_det.detection.synthetic.command import check_numbers, draw_scenes, scene_command
from nonlocal_det.media.canvas import (
    DRAWING_VERSION,
    SUBPIXELS,
    Colour,
    Layer,
    Point,
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

MIN_SIZE = 128
"""Smallest side of a picture in pixels: figures whose parts can be told apart need this room."""

MAX_SIZE = 2048
"""Largest side of a picture in pixels: it is drawn 4 times as large, in about 1 GB of memory."""

MAX_FIGURES = 5
_MIN_HEIGHT = 60  # pixels; limbs of smaller figures would be too thin to see
_MIN_LIMB_RADIUS = 10  # sub-pixels: limbs are at least 5 pixels wide

# The body when it stands upright, in thousandths of the figure's height from the middle of the hips; y points
# down.
_SHOULDER, _HIP, _NECK, _HEAD = (102, -285), (55, 0), (0, -320), (0, -415)
_UPPER_ARM, _FOREARM, _HAND, _THIGH, _SHIN, _FOOT = 145, 135, 22, 210, 200, 45
_HEAD_RADII = (78, 96)
_NOSE, _EYE, _EAR = (0, 18), (31, -8), (74, 4)

# Part numbers on a figure's layer. Those of a limb are doubled: + 0 on the left of the picture, + 1 on the
# right.
_PART_TORSO, _PART_NECK, _PART_HEAD = 1, 2, 3
_PART_ARM_UPPER, _PART_ARM_FORE, _PART_HAND = 10, 12, 14
_PART_THIGH, _PART_SHIN, _PART_FOOT = 16, 18, 20

# Keypoints that every figure shows, whichever way it faces, with the parts that they lie on.
_BODY_KEYPOINTS: dict[str, tuple[int, ...]] = {
    "ear": (_PART_HEAD,),
    "shoulder": (_PART_TORSO, _PART_ARM_UPPER),
    "elbow": (_PART_ARM_UPPER, _PART_ARM_FORE),
    "wrist": (_PART_ARM_FORE, _PART_HAND),
    "hip": (_PART_TORSO, _PART_THIGH),
    "knee": (_PART_THIGH, _PART_SHIN),
    "ankle": (_PART_SHIN, _PART_FOOT),
}

_SKINS: tuple[Colour, ...] = ((241, 204, 170), (224, 172, 132), (190, 132, 92), (141, 90, 60), (98, 62, 44))
_HAIRS: tuple[Colour, ...] = (
    (28, 24, 24),
    (74, 46, 28),
    (128, 70, 30),
    (216, 178, 92),
    (170, 166, 162),
    (150, 50, 30),
)
_NOBODY = 255  # owner of the pixels that belong to no figure


@dataclass(frozen=True)
class _Looks:
    """Colours of a figure and its shapes, the same on both sides of the body."""

    skin: Colour
    hair: Colour
    shirt: Colour
    band: Colour | None
    trousers: Colour
    shoes: Colour
    long_sleeves: bool
    long_trousers: bool


@dataclass(frozen=True)
class _Pose:
    """Where a figure is and how it stands; lengths in sub-pixels, angles in degrees.

    Arms and legs are pairs: first the one that hangs on the left of the picture, then the one on the right.
    """

    height: int
    hips: Point
    lean: int
    tilt: int
    turn: int  # how far the face is off the middle of the head, in thousandths of the height
    shoulder_angles: tuple[int, int]  # away from the body
    elbow_angles: tuple[int, int]
    hip_angles: tuple[int, int]
    knee_angles: tuple[int, int]
    arm_lengths: tuple[int, int]  # percent, foreshortening
    leg_lengths: tuple[int, int]
    arms_behind: tuple[bool, bool]
    order: tuple[int, int]  # which side is drawn first

    def scale(self, thousandths: int) -> int:
        return (thousandths * self.height + 500) // 1000

    def radius(self, thousandths: int) -> int:
        return max(self.scale(thousandths), _MIN_LIMB_RADIUS)

    def place(self, point: Point, centre: Point | None = None, degrees: int | None = None) -> Point:
        """Return where a ``point`` of the upright body is, turned with the body about the hips by default."""
        centre = self.hips if centre is None else centre
        x, y = rotate((self.scale(point[0]), self.scale(point[1])), self.lean if degrees is None else degrees)
        return centre[0] + x, centre[1] + y

    def limb(self, start: Point, length: int, degrees: int) -> Point:
        """Return the end of a limb that points straight down at 0 ``degrees`` and to the right at 90."""
        return self.place((0, length), start, -degrees)


class _Figure:
    """A figure drawn on a layer of its own.

    Args:
        pose: Place and posture.
        looks: Colours.
        toward: Whether it faces the camera.
        size: Side of the picture in pixels.
    """

    def __init__(self, pose: _Pose, looks: _Looks, toward: bool, size: int) -> None:
        self.toward = toward
        self._pose, self._looks = pose, looks
        self._outline = max(2, pose.scale(7))
        self._joints = self._place_joints()
        self.layer = Layer(self._box(), (size, size))
        self._draw()
        self.mask = np.zeros((size, size), bool)
        self.mask[self.layer.window] = self.layer.mask()
        self.head_mask = np.zeros((size, size), bool)
        self.head_mask[self.layer.window] = self.layer.mask(_PART_HEAD)

    @property
    def head_area(self) -> int:
        """Pixels of the whole head, in view or not: the area of an ellipse, with 355 / 113 for pi."""
        rx, ry = (self._pose.scale(radius) for radius in _HEAD_RADII)
        return rx * ry * 355 // (113 * SUBPIXELS * SUBPIXELS)

    def keypoints(self, in_view: np.ndarray) -> list[int]:
        """Return COCO's keypoints: 17 times x, y (pixels) and visibility.

        Args:
            in_view: Bool array [size, size], the pixels where this figure is on top.

        Returns:
            Visibility is 2 in view, 1 in the picture but hidden (by something else, by another part of the
            same figure, or on the far side of the head), 0 outside the picture, where x and y are 0.
        """
        values: list[int] = []
        for name in COCO_PERSON_KEYPOINT_NAMES:
            point, parts = self._find(name)
            x, y = point[0] // SUBPIXELS, point[1] // SUBPIXELS
            if not (0 <= x < in_view.shape[1] and 0 <= y < in_view.shape[0]):
                values += [0, 0, 0]
            else:
                values += [x, y, 2 if in_view[y, x] and self.layer.part_at(point) in parts else 1]
        return values

    def _find(self, name: str) -> tuple[Point, tuple[int, ...]]:
        """Return a keypoint's place in sub-pixels and the parts that show it when they are on top of it."""
        side, _, joint = name.rpartition("_")
        # Someone who faces the camera has the right arm on the left of the picture.
        index = 0 if not side else int((side == "left") == self.toward)
        if joint in ("nose", "eye"):
            return self._joints[joint][index], (_PART_HEAD,) if self.toward else ()
        parts = _BODY_KEYPOINTS[joint]
        parts = tuple(part + index if part >= _PART_ARM_UPPER else part for part in parts)
        return self._joints[joint][index], parts

    def _place_joints(self) -> dict[str, tuple[Point, Point]]:
        """Return every joint's place on the left and on the right of the picture, in sub-pixels."""
        pose = self._pose
        head, turned = pose.place(_HEAD), pose.lean + pose.tilt
        nose = pose.place((_NOSE[0] + pose.turn, _NOSE[1]), head, turned)
        pairs: dict[str, list[Point]] = {name: [] for name in ("eye", *_BODY_KEYPOINTS, "hand", "foot")}
        for index, sign in enumerate((-1, 1)):
            pairs["eye"].append(pose.place((sign * _EYE[0] + pose.turn, _EYE[1]), head, turned))
            pairs["ear"].append(pose.place((sign * _EAR[0], _EAR[1]), head, turned))
            shoulder = pose.place((sign * _SHOULDER[0], _SHOULDER[1]))
            upper = sign * pose.shoulder_angles[index] - pose.lean
            elbow = pose.limb(shoulder, _UPPER_ARM * pose.arm_lengths[index] // 100, upper)
            lower = upper + sign * pose.elbow_angles[index]
            wrist = pose.limb(elbow, _FOREARM * pose.arm_lengths[index] // 100, lower)
            hip = pose.place((sign * _HIP[0], _HIP[1]))
            thigh = sign * pose.hip_angles[index] - pose.lean // 2
            knee = pose.limb(hip, _THIGH * pose.leg_lengths[index] // 100, thigh)
            shin = thigh + sign * pose.knee_angles[index]
            ankle = pose.limb(knee, _SHIN * pose.leg_lengths[index] // 100, shin)
            for name, point in (("shoulder", shoulder), ("elbow", elbow), ("wrist", wrist)):
                pairs[name].append(point)
            for name, point in (("hip", hip), ("knee", knee), ("ankle", ankle)):
                pairs[name].append(point)
            pairs["hand"].append(pose.limb(wrist, _HAND, lower))
            pairs["foot"].append(pose.limb(ankle, _FOOT, shin + sign * 60))
        joints = {name: (points[0], points[1]) for name, points in pairs.items()}
        neck = pose.place(_NECK)
        return joints | {"nose": (nose, nose), "head": (head, head), "neck": (neck, neck)}

    def _box(self) -> tuple[int, int, int, int]:
        """Return a box in pixels that holds the whole figure."""
        margin = self._pose.scale(max(_HEAD_RADII)) + self._outline + 2 * _MIN_LIMB_RADIUS
        xs = [point[0] for pair in self._joints.values() for point in pair]
        ys = [point[1] for pair in self._joints.values() for point in pair]
        low_x, low_y = (min(xs) - margin) // SUBPIXELS, (min(ys) - margin) // SUBPIXELS
        return low_x, low_y, (max(xs) + margin) // SUBPIXELS + 1, (max(ys) + margin) // SUBPIXELS + 1

    def _draw(self) -> None:
        for side in self._pose.order:
            if self._pose.arms_behind[side]:
                self._draw_arm(side)
        for side in self._pose.order:
            self._draw_leg(side)
        self._draw_torso()
        for side in self._pose.order:
            if not self._pose.arms_behind[side]:
                self._draw_arm(side)
        self._draw_head()

    def _draw_limb(self, segments: Sequence[tuple[Point, Point, int, Colour, int]]) -> None:
        """Draw segments (start, end, radius, colour, part) in order, with one dark outline round them all."""
        for start, end, radius, colour, part in segments:
            self.layer.capsule(start, end, radius + self._outline, shade(colour, 55), part)
        for start, end, radius, colour, part in segments:
            self.layer.capsule(start, end, radius, colour, part)

    def _draw_arm(self, side: int) -> None:
        joints, radius, looks = self._joints, self._pose.radius, self._looks
        shoulder, elbow, wrist, hand = (joints[name][side] for name in ("shoulder", "elbow", "wrist", "hand"))
        sleeve = looks.shirt if looks.long_sleeves else looks.skin
        self._draw_limb(
            [
                (wrist, hand, radius(30), looks.skin, _PART_HAND + side),
                (elbow, wrist, radius(26), sleeve, _PART_ARM_FORE + side),
                (shoulder, elbow, radius(32), looks.shirt, _PART_ARM_UPPER + side),
            ]
        )

    def _draw_leg(self, side: int) -> None:
        joints, radius, looks = self._joints, self._pose.radius, self._looks
        hip, knee, ankle, foot = (joints[name][side] for name in ("hip", "knee", "ankle", "foot"))
        lower = looks.trousers if looks.long_trousers else looks.skin
        self._draw_limb(
            [
                (ankle, foot, radius(27), looks.shoes, _PART_FOOT + side),
                (knee, ankle, radius(33), lower, _PART_SHIN + side),
                (hip, knee, radius(42), looks.trousers, _PART_THIGH + side),
            ]
        )

    def _draw_torso(self) -> None:
        joints, pose, looks = self._joints, self._pose, self._looks
        self._draw_limb([(joints["neck"][0], joints["head"][0], pose.radius(30), looks.skin, _PART_NECK)])
        corners = [joints["shoulder"][0], joints["shoulder"][1], joints["hip"][1], joints["hip"][0]]
        radius = pose.radius(32)
        edges = list(zip(corners, corners[1:] + corners[:1], strict=True))
        self._draw_limb([(start, end, radius, looks.shirt, _PART_TORSO) for start, end in edges])
        self.layer.polygon(corners, looks.shirt, _PART_TORSO)
        if looks.band is not None:
            band = [(-112, -190), (112, -190), (103, -135), (-103, -135)]
            self.layer.polygon([pose.place(corner) for corner in band], looks.band, _PART_TORSO)
        self._draw_limb([(*joints["hip"], pose.radius(34), looks.trousers, _PART_TORSO)])

    def _draw_head(self) -> None:
        """Draw the head; its outer shape is the same from the front and from the back."""
        pose, looks, joints, layer = self._pose, self._looks, self._joints, self.layer
        centre, turned = joints["head"][0], pose.lean + pose.tilt
        radii = (pose.scale(_HEAD_RADII[0]), pose.scale(_HEAD_RADII[1]))
        for ear in joints["ear"]:
            layer.disc(ear, max(pose.scale(22), 5) + self._outline, shade(looks.skin, 55), _PART_HEAD)
            layer.disc(ear, max(pose.scale(22), 5), looks.skin, _PART_HEAD)
        outer = (radii[0] + self._outline, radii[1] + self._outline)
        layer.polygon(ellipse_points(centre, outer, turned), shade(looks.hair, 55), _PART_HEAD)
        layer.polygon(ellipse_points(centre, radii, turned), looks.hair, _PART_HEAD)
        if not self.toward:
            return
        face = (pose.scale(_HEAD_RADII[0] - 8), pose.scale(_HEAD_RADII[1] - 8))
        layer.polygon(ellipse_points(centre, face, turned, -24, 204), looks.skin, _PART_HEAD)
        for eye in joints["eye"]:
            layer.disc(eye, max(pose.scale(17), 4), (245, 245, 245), _PART_HEAD)
            layer.disc(eye, max(pose.scale(11), 3), (20, 20, 30), _PART_HEAD)
        nose = joints["nose"][0]
        bridge, width = pose.place((0, -12), nose, turned), max(pose.scale(7), 2)
        layer.capsule(bridge, nose, width, shade(looks.skin, 75), _PART_HEAD)
        mouth = [pose.place(point, nose, turned) for point in ((-25, 28), (0, 40), (25, 28))]
        for start, end in pairwise(mouth):
            layer.capsule(start, end, width, (150, 40, 45), _PART_HEAD)


def _random_looks(rng: np.random.Generator) -> _Looks:
    skin = choice(rng, _SKINS)
    # A face must not look like hair from afar: nothing else tells the front from the back.
    hair = choice(rng, [hair for hair in _HAIRS if colour_distance(hair, skin) >= 150])
    shirt = random_colour(rng)
    trousers = random_colour(rng)
    while colour_distance(shirt, trousers) < 100:
        trousers = random_colour(rng)
    return _Looks(
        skin=skin,
        hair=hair,
        shirt=shirt,
        band=random_colour(rng) if chance(rng, 40) else None,
        trousers=trousers,
        shoes=random_colour(rng, 20, 120),
        long_sleeves=chance(rng, 50),
        long_trousers=chance(rng, 65),
    )


def _random_pose(rng: np.random.Generator, height: int, size: int, neighbour: _Pose | None) -> _Pose:
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
    return _Pose(
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
    radius = max(_MIN_LIMB_RADIUS, reach // 5)
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


def _owners(figures: Sequence[_Figure], covers: Sequence[Layer], size: int) -> np.ndarray:
    """Return which figure (its index, or :data:`_NOBODY`) is on top at each pixel, uint8 [size, size]."""
    owner = np.full((size, size), _NOBODY, np.uint8)
    for index, figure in enumerate(figures):
        owner[figure.mask] = index
    for layer in covers:
        owner[layer.window][layer.mask()] = _NOBODY
    return owner


def _all_recognisable(figures: Sequence[_Figure], owner: np.ndarray) -> bool:
    """Whether enough of every figure is in view, and nearly all of its head.

    It looks at shapes alone, which do not depend on the way that a figure faces.
    """
    for index, figure in enumerate(figures):
        in_view = owner == index
        whole = int(figure.mask.sum())
        head = int((figure.head_mask & in_view).sum())
        if 10 * head < 9 * figure.head_area or 100 * int(in_view.sum()) < 45 * whole:
            return False
    return True


def draw_people(
    size: int, rng: np.random.Generator, facing_rng: np.random.Generator
) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """Draw one scene.

    Args:
        size: Side of the picture in pixels, :data:`MIN_SIZE` to :data:`MAX_SIZE`.
        rng: Source of everything but the way that the figures face.
        facing_rng: Source of the way that they face.

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
    heights = sorted(
        randint(rng, low, high) for _ in range(count)
    )  # what is near is taller and covers the rest
    looks = [_random_looks(rng) for _ in heights]
    colours = [colour for look in looks for colour in (look.skin, look.hair, look.shirt, look.trousers)]
    behind = [_random_object(rng, size, colours) for _ in range(randint(rng, 3, 8))]
    in_front = [_random_object(rng, size, colours) for _ in range(randint(rng, 0, 2))]

    figures: list[_Figure] = []
    poses: list[_Pose] = []
    while not figures:
        # A place where somebody's head would be hidden is tried again elsewhere; where there is none, the
        # scene has fewer figures.
        for height, look in zip(heights, looks, strict=True):
            for _ in range(8):
                neighbour = choice(rng, poses) if poses and chance(rng, 60) else None
                pose = _random_pose(rng, height, size, neighbour)
                tried = [*figures, _Figure(pose, look, toward[len(figures)], size)]
                if _all_recognisable(tried, _owners(tried, in_front, size)):
                    figures = tried
                    poses.append(pose)
                    break

    for layer in [*behind, *(figure.layer for figure in figures), *in_front]:
        layer.blend_onto(image)
    add_light_and_grain(image, rng)

    owner = _owners(figures, in_front, size)
    return image, [_annotation(figure, owner == index) for index, figure in enumerate(figures)]


def _annotation(figure: _Figure, in_view: np.ndarray) -> dict[str, Any]:
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


def write_people(directory: Path, *, count: int, size: int, seed: int, label: str = "people") -> None:
    """Write scenes as a COCO-format data set: ``annotations.json`` and ``images/*.png``.

    Picture i depends on ``seed``, ``size`` and i alone, so a smaller set is the beginning of a larger one. A
    progress bar goes to stderr.

    Args:
        directory: Where to write.
        count: Number of pictures, at least 1.
        size: Side of the pictures in pixels, :data:`MIN_SIZE` to :data:`MAX_SIZE`.
        seed: Not negative.
        label: What the progress bar calls the set.

    Raises:
        ValueError: A number is out of range.
        OSError: Something could not be written.
    """
    check_numbers(count=count, size=size, seed=seed, sizes=(MIN_SIZE, MAX_SIZE))

    def draw(index: int) -> tuple[np.ndarray, list[dict[str, Any]]]:
        return draw_people(size, make_rng(seed, index, 0), make_rng(seed, index, 1))

    names = list(COCO_PERSON_KEYPOINT_NAMES)
    person = {
        "id": 1,
        "name": "person",
        "supercategory": "person",
        "keypoints": names,
        "skeleton": [[names.index(a) + 1, names.index(b) + 1] for a, b, _ in KEYPOINT_CONNECTION_RULES],
    }
    info = {
        "description": "Drawn figures whose head alone tells left from right (nonlocal_det)",
        "version": str(DRAWING_VERSION),
        "seed": seed,
    }
    write_coco(directory, draw_scenes(draw, count, label), [person], info)


def main(argv: Sequence[str] | None = None) -> int:
    """Write a set of scenes to a folder.

    Args:
        argv: Command line without the program's name; ``sys.argv`` by default.

    Returns:
        0, or 2 after wrong input.
    """
    return scene_command(
        write_people,
        prog="python -m nonlocal_det.detection.synthetic.people",
        description="Draw scenes of figures and write them as a COCO-format data set: DIR/annotations.json "
        "(boxes, polygons, 17 keypoints) and DIR/images/*.png. The same numbers give the same pictures.",
        size=256,
        sizes=(MIN_SIZE, MAX_SIZE),
        argv=argv,
    )


if __name__ == "__main__":
    sys.exit(main())
