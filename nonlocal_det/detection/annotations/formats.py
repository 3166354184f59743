"""Telling other label formats from COCO's, and naming a converter."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

# supervision (MIT) reads boxes and polygons of all of these; `coco` comes with hotcoco, a dependency.
_SUPERVISION = (
    "convert it by `pip install supervision` and "
    "`python -c \"import supervision as sv; sv.DetectionDataset.{}.as_coco(annotations_path='coco.json')\"`"
)
_VOC = "Pascal VOC (XML), not COCO; " + _SUPERVISION.format("from_pascal_voc('IMAGES', 'XMLS')")
_YOLO = "YOLO (text), not COCO; " + _SUPERVISION.format("from_yolo('IMAGES', 'LABELS', 'data.yaml')")
_LABELME = "LabelMe (JSON per image), not COCO; " + _SUPERVISION.format("from_labelme('IMAGES', 'JSONS')")
_CREATEML = "CreateML, not COCO; " + _SUPERVISION.format("from_createml('IMAGES', 'FILE.json')")
_CVAT = "CVAT (XML), not COCO; export the task from CVAT as COCO 1.0, or `coco convert --from cvat --to coco`"
_VIA = "VGG Image Annotator's own format, not COCO; export it there as COCO"
_LABEL_STUDIO = "Label Studio's own format, not COCO; export the project there as COCO"
_RESULTS = "detections (COCO's result format), not annotations; give the file with the ground truth"
_PANOPTIC = 'COCO\'s panoptic format ("segments_info"); use the instances file that belongs to it'
_SNIFFED = 64 * 1024


def recognise_document(document: Any) -> str | None:
    """Return the format of a JSON document that is not COCO's, and how to convert it; None if not known."""
    if isinstance(document, list):
        first = document[0] if document else None
        if isinstance(first, tuple) or (isinstance(first, dict) and "image_id" in first):
            return _RESULTS  # a tuple: an annotation, already read
        if not isinstance(first, dict):
            return None
        if "annotations" in first and "image" in first:
            return _CREATEML
        if "data" in first and ("annotations" in first or "completions" in first):
            return _LABEL_STUDIO
        return None
    if not isinstance(document, dict):
        return None
    annotations = document.get("annotations")
    if isinstance(annotations, list) and annotations:
        return _PANOPTIC if isinstance(annotations[0], dict) and "segments_info" in annotations[0] else None
    if "shapes" in document and "imagePath" in document:
        return _LABELME
    if "_via_img_metadata" in document or "_via_settings" in document:
        return _VIA
    values = list(islice(document.values(), 1))
    if values and isinstance(values[0], dict) and "regions" in values[0] and "filename" in values[0]:
        return _VIA
    return None


def recognise_path(path: str | os.PathLike[str]) -> str | None:
    """Return what :func:`recognise_document` does for a folder, or a file that is not JSON."""
    path = Path(path)
    if path.is_dir():
        for pattern, recognise in _FOLDERS:
            for file in islice(_files(path, pattern), 3):
                if found := recognise(file):
                    return found
        return None
    if path.suffix.lower() in (".yaml", ".yml") and re.search(
        r"^(names|nc|train)\s*:", _head(path), re.MULTILINE
    ):
        return _YOLO
    return _xml_format(path) or _text_format(path)


def _files(folder: Path, pattern: str) -> Iterator[Path]:
    """Yield the files of a folder, then those of its subfolders, that have a suffix."""
    yield from (file for file in sorted(folder.glob(pattern)) if file.is_file())
    yield from (file for file in folder.glob(f"*/**/{pattern}") if file.is_file())


def _head(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_SNIFFED).decode("utf-8", errors="replace")
    except OSError:
        return ""


def _xml_format(path: Path) -> str | None:
    head = _head(path)
    if re.search(r"<annotations\b", head):
        return _CVAT
    return _VOC if re.search(r"<annotation\b", head) else None


def _text_format(path: Path) -> str | None:
    # A class number, then x y w h or a polygon, each in [0, 1].
    lines = [line.split() for line in _head(path).splitlines()[:5] if line.strip()]
    row = re.compile(r"\d+( [01](\.\d+)?([eE]-?\d+)?| \.\d+){4,}")
    return _YOLO if lines and all(row.fullmatch(" ".join(words)) for words in lines) else None


def _json_format(path: Path) -> str | None:
    head = _head(path)
    return _LABELME if '"shapes"' in head and ('"imagePath"' in head or '"imageData"' in head) else None


_FOLDERS: tuple[tuple[str, Callable[[Path], str | None]], ...] = (
    ("*.xml", _xml_format),
    ("*.txt", _text_format),
    ("*.json", _json_format),
)
