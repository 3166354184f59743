"""Reading annotation files in COCO's format, of any size and state."""

from __future__ import annotations

import gc
import json
import math
import os
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from nonlocal_det.detection.annotations.formats import recognise_document, recognise_path
from nonlocal_det.errors import DatasetError


class Mask(NamedTuple):
    """What the checks need to know of one "segmentation", without its coordinates."""

    kind: str  # "absent", "empty", "polygon", "rle" (compressed), "counts" (uncompressed RLE) or "broken"
    short: int = 0  # number of polygons of fewer than 3 points or with an odd number of coordinates
    parts: int = 0  # number of polygons
    low: float = 0.0  # smallest coordinate of the polygons; 0 for other kinds
    size: tuple[int, int] | None = None  # height and width of an RLE
    why: str = ""  # what is wrong with a broken one

    @property
    def usable(self) -> bool:
        """Whether Detectron2 can make a mask of it."""
        return self.kind in ("rle", "counts") or (self.kind == "polygon" and self.short < self.parts)


class Keypoints(NamedTuple):
    """What the checks need to know of one annotation's "keypoints", without its coordinates."""

    length: int  # of the list x, y, v, x, y, v, ...; -1 where it is not a list of finite numbers
    labelled: int = 0  # number of keypoints with v > 0
    low: float = 0.0  # smallest coordinate of those, if it is negative


class Annotation(NamedTuple):
    """One entry of "annotations" as it stands in the file; None where a key is missing or null."""

    id: Any
    image_id: Any
    category_id: Any
    bbox: Any
    area: Any
    iscrowd: Any
    ignore: Any
    num_keypoints: Any
    mask: Mask
    keypoints: Keypoints | None


_AS_THEY_STAND = Annotation._fields[:-2]


@dataclass
class CocoFile:
    """An annotation file, without the coordinates of masks and keypoints."""

    path: Path
    images: list[dict[str, Any]]  # as they stand in the file
    annotations: list[Annotation]  # empty where the file has no such key
    categories: list[dict[str, Any]]  # as they stand in the file


def read_coco(path: str | os.PathLike[str]) -> CocoFile:
    """Read what the checks need of an annotation file.

    Masks are reduced to a few numbers while the file is read: large files take a third of the memory of
    ``json.load``. The sections are lists of objects; nothing is known yet of what those hold.

    Raises:
        DatasetError: the file cannot be read, is not JSON, or is not made like a COCO file.
    """
    document = _read_json(path, object_hook=_shrink)
    _check_sections(document, path)
    return reduce_document(document, path)


def reduce_document(document: dict[str, Any], path: str | os.PathLike[str]) -> CocoFile:
    """Return what the checks need of an annotation file's content, which was read from ``path``."""
    annotations = [_annotation(entry) for entry in document.get("annotations", ())]
    return CocoFile(Path(path), document["images"], annotations, document["categories"])


def read_document(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read an annotation file whole: an object with lists of objects, as :func:`read_coco` has them.

    Raises:
        DatasetError: as :func:`read_coco`.
    """
    document = _read_json(path)
    _check_sections(document, path)
    return document


def describe_mask(segmentation: Any) -> Mask:
    """Reduce a "segmentation", as JSON gives it, to what the checks need."""
    if segmentation is None:
        return _ABSENT
    if isinstance(segmentation, list):
        return _describe_polygons(segmentation)
    if isinstance(segmentation, dict):
        return _describe_rle(segmentation)
    return Mask("broken", why=f"it is {_a(segmentation)}")


_ABSENT = Mask("absent")
_EMPTY = Mask("empty")
# Most masks are of these two kinds: shared, they take no memory.
_ONE_POLYGON = Mask("polygon", parts=1)


def _describe_polygons(polygons: list[Any]) -> Mask:
    if not polygons:
        return _EMPTY
    short, low = 0, 0.0
    for polygon in polygons:
        if not isinstance(polygon, list):
            return Mask("broken", why=f"a polygon is {_a(polygon)}, not a list x, y, x, y, ...")
        if not finite_numbers(polygon):
            return Mask("broken", why="a polygon holds something else than finite numbers")
        if len(polygon) < 6 or len(polygon) % 2:
            short += 1
        elif (least := min(polygon)) < low:
            low = least
    if not short and not low and len(polygons) == 1:
        return _ONE_POLYGON
    return Mask("polygon", short=short, parts=len(polygons), low=low)


def _describe_rle(rle: dict[str, Any]) -> Mask:
    if not rle:
        return _EMPTY
    size, counts = rle.get("size"), rle.get("counts")
    if not (isinstance(size, list) and len(size) == 2 and all(type(side) is int for side in size)):
        return Mask("broken", why="its RLE has no size [height, width]")
    if isinstance(counts, str):
        return Mask("rle", size=tuple(size))
    if not isinstance(counts, list) or not all(type(count) is int and count >= 0 for count in counts):
        return Mask("broken", why="the counts of its RLE are neither text nor a list of whole numbers")
    if sum(counts) != size[0] * size[1]:
        return Mask("broken", why=f"its RLE has {sum(counts)} pixels, but the size {size}")
    return Mask("counts", size=tuple(size))


def _describe_keypoints(values: Any) -> Keypoints | None:
    if values is None or values == []:
        return None
    if not isinstance(values, list) or not finite_numbers(values):
        return Keypoints(-1)
    labelled = sum(v > 0 for v in values[2::3])
    low = min(values)
    if low < 0:
        seen = [(x, y) for x, y, v in zip(values[0::3], values[1::3], values[2::3], strict=False) if v > 0]
        low = min(chain.from_iterable(seen), default=0.0)
    return Keypoints(len(values), labelled, min(low, 0.0))


def is_id(value: Any) -> bool:
    """Return whether a value works as an id: a whole number, 0 to 2**63; 3.0 is 3."""
    return (type(value) is int or (type(value) is float and value.is_integer())) and 0 <= value < 2**63


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number."""
    return type(value) in (int, float) and finite_numbers([value])


def is_box(box: Any) -> bool:
    """Return whether a value is a list of 4 finite numbers."""
    return type(box) is list and len(box) == 4 and finite_numbers(box)


def has_size(image: dict[str, Any]) -> bool:
    """Return whether an image has a width and height that pictures can have."""
    return all(is_number(image.get(side)) and 0 < image[side] < 2**31 for side in ("width", "height"))


def finite_numbers(values: list[Any]) -> bool:
    """Return whether a list holds finite numbers only."""
    try:
        return math.isfinite(sum(array("d", values)))
    except (TypeError, OverflowError):
        return False


def _shrink(entry: dict[str, Any]) -> dict[str, Any] | Annotation:
    """Make an :class:`Annotation` of an object that looks like one."""
    return _annotation(entry) if "image_id" in entry and "category_id" in entry else entry


def _annotation(entry: dict[str, Any] | Annotation) -> Annotation:
    if isinstance(entry, Annotation):
        return entry
    get = entry.get
    mask, keypoints = describe_mask(get("segmentation")), _describe_keypoints(get("keypoints"))
    return Annotation(*map(get, _AS_THEY_STAND), mask, keypoints)


def _read_json(path: str | os.PathLike[str], object_hook: Callable[..., Any] | None = None) -> Any:
    name = os.fspath(path)
    try:
        text = Path(name).read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise DatasetError(f"{name}: no such file") from None
    except (UnicodeDecodeError, IsADirectoryError):
        hint = recognise_path(name)
        what = "a folder, not a JSON file" if Path(name).is_dir() else "not a text file in UTF-8"
        raise DatasetError(f"{name}: {hint or what}") from None
    except (OSError, ValueError) as error:
        raise DatasetError(f"{name}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not text or text.isspace():
        raise DatasetError(f"{name}: the file is empty")
    # Collections of garbage would look at millions of new objects again and again, and find none.
    collects = gc.isenabled()
    gc.disable()
    try:
        return json.loads(text, object_hook=object_hook)
    except json.JSONDecodeError as error:
        what = f"not valid JSON: line {error.lineno}, column {error.colno}: {error.msg}"
        raise DatasetError(f"{name}: {recognise_path(name) or what}") from None
    except RecursionError:
        raise DatasetError(f"{name}: lists or objects are nested too deeply for a COCO file") from None
    except ValueError as error:  # a number of thousands of digits
        raise DatasetError(f"{name}: not usable JSON: {error}") from None
    finally:
        if collects:
            gc.enable()


def _check_sections(document: Any, path: str | os.PathLike[str]) -> None:
    """Refuse what is not an object with the lists "images" and "categories"."""
    name = os.fspath(path)
    hint = recognise_document(document)
    if hint or not isinstance(document, dict) or not {"images", "categories"} <= document.keys():
        if hint is None and isinstance(document, dict):
            missing = [key for key in ("images", "annotations", "categories") if key not in document]
            hint = f'not COCO: it has no "{missing[0]}" (COCO has "images", "annotations", "categories")'
        hint = hint or f'not a COCO file: it is {_a(document)}, not an object with "images" and "categories"'
        raise DatasetError(f"{name}: {hint}")
    for key in ("images", "annotations", "categories"):
        entries = document.get(key, [])
        if not isinstance(entries, list):
            raise DatasetError(f'{name}: "{key}" is {_a(entries)}, not a list of objects')
        kinds = (dict, Annotation) if key == "annotations" else (dict,)
        place = next((i for i, entry in enumerate(entries) if not isinstance(entry, kinds)), None)
        if place is not None:
            raise DatasetError(f'{name}: entry {place} of "{key}" is {_a(entries[place])}, not an object')


def _a(value: Any) -> str:
    """Name the type of a JSON value."""
    if isinstance(value, Annotation):
        return "an annotation"
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
