"""Registration of the built-in data sets with Detectron2's catalogs."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.catalog import Metadata
from detectron2.data.datasets import load_coco_json
from detectron2.data.datasets.builtin_meta import (
    COCO_PERSON_KEYPOINT_FLIP_MAP,
    COCO_PERSON_KEYPOINT_NAMES,
    KEYPOINT_CONNECTION_RULES,
)

from nonlocal_det.data.cache import cached_directory
from nonlocal_det.detection.annotations.coco_writer import ANNOTATIONS_FILE, IMAGES_FOLDER
from nonlocal_det.media.canvas import DRAWING_VERSION


@dataclass(frozen=True)
class _Split:
    """What a data set consists of: ``count`` pictures of ``size`` x ``size`` pixels drawn from ``seed``."""

    count: int
    size: int
    seed: int


# As in nonlocal_det.detection.synthetic.squares, which is imported when it is needed (see _build).
CONTEXT_CLASSES = ("red", "blue")

_PEOPLE = {
    "nonlocal_people_train": _Split(count=600, size=256, seed=0),
    "nonlocal_people_val": _Split(count=100, size=256, seed=1),
}
_CONTEXT = {
    "nonlocal_context_train": _Split(count=600, size=192, seed=0),
    "nonlocal_context_val": _Split(count=100, size=192, seed=1),
}


def register_builtin_datasets() -> None:
    """Register ``nonlocal_{people,context}_{train,val}``, if that has not been done.

    Nothing is drawn here. The pictures are made on first use: when the data set is loaded, or when
    ``json_file`` or ``image_root`` is read from its metadata (an evaluator may be built before anything is
    loaded).
    """
    for name in _PEOPLE:
        _register(
            name,
            thing_classes=["person"],
            keypoint_names=COCO_PERSON_KEYPOINT_NAMES,
            keypoint_flip_map=COCO_PERSON_KEYPOINT_FLIP_MAP,
            keypoint_connection_rules=KEYPOINT_CONNECTION_RULES,
        )
    for name in _CONTEXT:
        _register(name, thing_classes=list(CONTEXT_CLASSES))


def _register(name: str, *, thing_classes: list[str], **metadata: Any) -> None:
    if name not in DatasetCatalog:
        DatasetCatalog.register(name, partial(_load, name))
    if not isinstance(MetadataCatalog.get(name), _BuiltinMetadata):
        MetadataCatalog[name] = _BuiltinMetadata(
            name=name,
            evaluator_type="coco",
            thing_classes=thing_classes,
            thing_dataset_id_to_contiguous_id={number + 1: number for number in range(len(thing_classes))},
            **metadata,
        )


class _BuiltinMetadata(Metadata):
    """Metadata whose paths make the data set when they are first read."""

    @property
    def json_file(self) -> str:
        return str(_directory(self.name) / ANNOTATIONS_FILE)

    @property
    def image_root(self) -> str:
        return str(_directory(self.name) / IMAGES_FOLDER)


def _load(name: str) -> list[dict[str, Any]]:
    metadata = MetadataCatalog.get(name)
    return load_coco_json(metadata.json_file, metadata.image_root, name)


def _directory(name: str) -> Path:
    """Return the folder of a data set, made where it is missing."""
    split = {**_PEOPLE, **_CONTEXT}[name]
    parameters = json.dumps({**asdict(split), "version": DRAWING_VERSION}, sort_keys=True)
    digest = hashlib.sha256(parameters.encode()).hexdigest()[:12]
    return cached_directory(f"{name}-{digest}", partial(_build, name, split))


def _build(name: str, split: _Split, directory: Path) -> None:
    # Imported here so that `python -m` of one of them does not find the module imported already.
    from nonlocal_det.detection.synthetic.people import write_people
    from nonlocal_det.detection.synthetic.squares import write_context

    write = write_people if name in _PEOPLE else write_context
    write(directory, **asdict(split), label=name)
