"""An articulated figure: where its joints are, how it is drawn, and which of its keypoints are in view."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from detectron2.data.datasets.builtin_meta import COCO_PERSON_KEYPOINT_NAMES

from nonlocal_det.media.canvas import SUBPIXELS, Colour, Layer, Point, ellipse_points, rotate, shade

MIN_LIMB_RADIUS = 10
"""In sub-pixels: limbs are at least 5 pixels wide."""

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


@dataclass(frozen=True)
class Looks:
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
class Pose:
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
        """Return a length in sub-pixels."""
        return (thousandths * self.height + 500) // 1000

    def radius(self, thousandths: int) -> int:
        """Return a limb's radius in sub-pixels."""
        return max(self.scale(thousandths), MIN_LIMB_RADIUS)

    def place(self, point: Point, centre: Point | None = None, degrees: int | None = None) -> Point:
        """Return where a ``point`` of the upright body is, turned with the body about the hips by default."""
        centre = self.hips if centre is None else centre
        x, y = rotate((self.scale(point[0]), self.scale(point[1])), self.lean if degrees is None else degrees)
        return centre[0] + x, centre[1] + y

    def limb(self, start: Point, length: int, degrees: int) -> Point:
        """Return the end of a limb that points straight down at 0 ``degrees`` and to the right at 90."""
        return self.place((0, length), start, -degrees)


class Figure:
    """A figure drawn on a layer of its own, ``toward`` the camera or away, in a picture of side ``size``.

    Attributes:
        mask: its pixels, bool [size, size].
        head_mask: those of its head, bool [size, size].
    """

    def __init__(self, pose: Pose, looks: Looks, toward: bool, size: int) -> None:
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

        Visibility is 2 in view, 1 in the picture but hidden (by something else, by another part of the same
        figure, or on the far side of the head), 0 outside the picture, where x and y are 0.

        Args:
            in_view: bool [size, size], the pixels where this figure is on top.
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
            limbs = {"shoulder": shoulder, "elbow": elbow, "wrist": wrist}
            for name, point in (limbs | {"hip": hip, "knee": knee, "ankle": ankle}).items():
                pairs[name].append(point)
            pairs["hand"].append(pose.limb(wrist, _HAND, lower))
            pairs["foot"].append(pose.limb(ankle, _FOOT, shin + sign * 60))
        joints = {name: (points[0], points[1]) for name, points in pairs.items()}
        neck = pose.place(_NECK)
        return joints | {"nose": (nose, nose), "head": (head, head), "neck": (neck, neck)}

    def _box(self) -> tuple[int, int, int, int]:
        """Return a box in pixels that holds the whole figure."""
        margin = self._pose.scale(max(_HEAD_RADII)) + self._outline + 2 * MIN_LIMB_RADIUS
        xs = [point[0] for pair in self._joints.values() for point in pair]
        ys = [point[1] for pair in self._joints.values() for point in pair]
        low_x, low_y = (min(xs) - margin) // SUBPIXELS, (min(ys) - margin) // SUBPIXELS
        return low_x, low_y, (max(xs) + margin) // SUBPIXELS + 1, (max(ys) + margin) // SUBPIXELS + 1

    def _draw(self) -> None:
        behind = self._pose.arms_behind
        for side in self._pose.order:
            if behind[side]:
                self._draw_arm(side)
        for side in self._pose.order:
            self._draw_leg(side)
        self._draw_torso()
        for side in self._pose.order:
            if not behind[side]:
                self._draw_arm(side)
        self._draw_head()

    def _draw_limb(self, segments: Sequence[tuple[Point, Point, int, Colour, int]]) -> None:
        """Draw segments (start, end, radius, colour, part) in order, with one dark outline round them all."""
        for start, end, radius, colour, part in segments:
            self.layer.capsule(start, end, radius + self._outline, shade(colour, 55), part)
        for start, end, radius, colour, part in segments:
            self.layer.capsule(start, end, radius, colour, part)

    def _draw_chain(self, joints: Sequence[str], side: int, *parts: tuple[int, Colour, int]) -> None:
        """Draw parts (radius, colour, number) from the last joint up."""
        points = [self._joints[name][side] for name in joints]
        self._draw_limb(
            [
                (start, end, self._pose.radius(radius), colour, part + side)
                for (end, start), (radius, colour, part) in zip(pairwise(points), parts, strict=True)
            ]
        )

    def _draw_arm(self, side: int) -> None:
        looks, joints = self._looks, ("hand", "wrist", "elbow", "shoulder")
        fore = (26, looks.shirt if looks.long_sleeves else looks.skin, _PART_ARM_FORE)
        upper = (32, looks.shirt, _PART_ARM_UPPER)
        self._draw_chain(joints, side, (30, looks.skin, _PART_HAND), fore, upper)

    def _draw_leg(self, side: int) -> None:
        looks, joints = self._looks, ("foot", "ankle", "knee", "hip")
        shin = (33, looks.trousers if looks.long_trousers else looks.skin, _PART_SHIN)
        thigh = (42, looks.trousers, _PART_THIGH)
        self._draw_chain(joints, side, (27, looks.shoes, _PART_FOOT), shin, thigh)

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
