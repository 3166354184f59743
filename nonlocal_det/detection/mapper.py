"""The mapper of training and evaluation, in front of which stands the check of each picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from nonlocal_det.errors import ImageError
from nonlocal_det.media.image import image_errors, open_image, read_image
from nonlocal_det.upstream import read_image_takes


class PictureMapper:
    """A mapper for data loaders that holds the pictures of training and evaluation to one rule.

    Args:
        mapper: Detectron2's, or one like it: makes a sample of a dataset dict. One that reads its "file_name"
            by ``detection_utils.read_image`` gets the picture that was opened for the check.

    Raises:
        ImageError: on a call, where the picture is at fault, or of another size than the dataset dict says.
            Before it is decoded, if its header shows it.
    """

    def __init__(self, mapper: Callable[[Mapping[str, Any]], Any]) -> None:
        self._mapper = mapper

    def __call__(self, image: Mapping[str, Any]) -> Any:
        """Return what the mapper makes of a dataset dict."""
        path = image.get("file_name")
        if path is None:
            return self._mapper(image)
        with ExitStack() as stack:
            with image_errors(path):
                picture = stack.enter_context(open_image(path))
            size, said = picture.size, (image.get("width"), image.get("height"))
            if None not in said and sorted(size) != sorted(said):  # it may be stored turned
                raise ImageError(
                    f"{path}: is {size[0]} x {size[1]}, and its annotations say {said[0]} x {said[1]}"
                )
            stack.enter_context(read_image_takes(path, picture))
            try:
                return self._mapper(image)
            except MemoryError:
                raise
            except Exception:
                read_image(path)  # says it in one line if the picture is at fault, and not something else
                raise
