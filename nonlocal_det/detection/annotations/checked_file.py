"""An annotation file under check, with what several checks need of it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from nonlocal_det.detection.annotations.coco_file import Annotation, CocoFile, has_size, is_box, is_id
from nonlocal_det.detection.annotations.image_files import Picture, look_at
from nonlocal_det.media.folders import outside

#: How many pictures are read to their end; of the others only the header is.
DECODED_PICTURES = 200


@dataclass
class CheckedFile:
    """A file to check, and what is wanted of it."""

    file: CocoFile
    masks: bool = False  # whether the model has masks
    keypoints: bool = False  # whether it has keypoints
    training: bool = True  # a file to test on may have no annotation
    folder: str | os.PathLike[str] | None = None  # of the images; None leaves out what needs the pictures
    sample: int | None = None  # open this many pictures, evenly spaced; None opens all
    other: CocoFile | None = None  # a file that must have the same classes
    allow_outside: bool = False  # whether pictures may lie outside the image folder
    # How many of the pictures may be of no use, 0 to 1, as training takes others in their places; None where
    # each is needed.
    max_bad_fraction: float | None = None

    @cached_property
    def sizes(self) -> dict[Any, tuple[float, float]]:
        """Width and height of the images that have them, by id."""
        return {
            image["id"]: (image["width"], image["height"])
            for image in self.file.images
            if is_id(image.get("id")) and has_size(image)
        }

    @cached_property
    def boxes(self) -> tuple[list[Annotation], np.ndarray, np.ndarray]:
        """Annotations with a box; x, y, width, height of each [N, 4]; width, height of its image [N, 2]."""
        boxed = [a for a in self.file.annotations if is_box(a.bbox)]
        boxes = np.array([a.bbox for a in boxed], dtype=np.float64).reshape(-1, 4)
        unknown = (np.inf, np.inf)
        limits = [self.sizes.get(a.image_id, unknown) if is_id(a.image_id) else unknown for a in boxed]
        return boxed, boxes, np.array(limits, dtype=np.float64).reshape(-1, 2)

    @cached_property
    def outside_images(self) -> list[dict[str, Any]]:
        """Images whose file name leads out of the image folder, unless it may."""
        if self.allow_outside:
            return []
        named = [image for image in self.file.images if isinstance(image.get("file_name"), str)]
        # Without a folder the name itself must tell: nothing can be below a file.
        folder = self.file.path / "images" if self.folder is None else self.folder
        return [named[i] for i in outside([os.path.join(folder, x["file_name"]) for x in named], [folder])]

    @cached_property
    def named_images(self) -> list[dict[str, Any]]:
        """Images with a file name that may be looked up."""
        refused = {id(image) for image in self.outside_images}
        return [x for x in self.file.images if isinstance(x.get("file_name"), str) and id(x) not in refused]

    @cached_property
    def pictures(self) -> list[Picture]:
        """The pictures that were opened."""
        if self.folder is None:
            return []
        return look_at(self.named_images, self.folder, sample=self.sample, decode=DECODED_PICTURES)
