"""What COCO's JSON does not say of keypoints: which mirror each other, and how precise each is."""

from __future__ import annotations

import re
from collections.abc import Sequence

from detectron2.data.datasets.builtin_meta import COCO_PERSON_KEYPOINT_NAMES
from pycocotools.cocoeval import Params

#: Used where nothing is known: about the mean of COCO's 17, which are 0.025 (eyes) to 0.107 (hips).
UNIFORM_SIGMA = 0.05

_OTHER_SIDE = {"left": "right", "right": "left", "l": "r", "r": "l"}
# Words of a name: runs of small letters with a capital before them ("leftEye", "LEye"), runs of capitals and
# of digits, and what separates them.
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+|[^A-Za-z\d]+")


def flip_pairs(names: Sequence[str]) -> list[tuple[str, str]]:
    """Find the keypoints that change places when a picture is mirrored.

    A name with the word left, right, l or r, such as ``left_eye``, ``Left Eye``, ``eye_l`` or ``leftEye``, is
    paired with the name that differs in this word alone: what Detectron2's ``keypoint_flip_map`` wants.
    """
    pairs = []
    known = {name.lower(): name for name in names}
    for name in names:
        words = _WORDS.findall(name)
        for place, word in enumerate(words):
            other = _OTHER_SIDE.get(word.lower())
            if other is None or word.lower()[0] == "r":
                continue
            mirrored = "".join([*words[:place], other, *words[place + 1 :]]).lower()
            if mirrored in known:
                pairs.append((name, known[mirrored]))
                break
    return pairs


def oks_sigmas(names: Sequence[str]) -> tuple[list[float], bool]:
    """Return the constants of the object keypoint similarity (OKS), and whether they are COCO's own.

    Otherwise all are :data:`UNIFORM_SIGMA`.
    """
    if list(names) == list(COCO_PERSON_KEYPOINT_NAMES):
        return Params("keypoints").kpt_oks_sigmas.tolist(), True
    return [UNIFORM_SIGMA] * len(names), False
