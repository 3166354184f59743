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

from nonlocal_det.data.cache import cache_root, cached_directory, ensure_made, make_on_first_use
from nonlocal_det.detection.annotations.coco_writer import ANNOTATIONS_FILE, IMAGES_FOLDER
from nonlocal_det.detection.synthetic import CONTEXT_CLASSES
from nonlocal_det.media.canvas import DRAWING_VERSION


@dataclass(frozen=True)
class _Split:
    """What a data set consists of: ``count`` pictures of ``size`` x ``size`` pixels drawn from ``seed``."""

    count: int
    size: int
    seed: int


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

    Nothing is drawn here, nor when metadata are read, but when a data set is loaded or by
    :func:`nonlocal_det.data.cache.ensure_made`.
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
        make_on_first_use(name, lambda: cached_directory(_folder(name), partial(_build, name)))
    if not isinstance(MetadataCatalog.get(name), _BuiltinMetadata):
        MetadataCatalog[name] = _BuiltinMetadata(
            name=name,
            evaluator_type="coco",
            thing_classes=thing_classes,
            thing_dataset_id_to_contiguous_id={number + 1: number for number in range(len(thing_classes))},
            **metadata,
        )


class _BuiltinMetadata(Metadata):
    """Metadata whose paths follow the environment variable that names the cache."""

    @property
    def json_file(self) -> str:
        return str(cache_root() / _folder(self.name) / ANNOTATIONS_FILE)

    @property
    def image_root(self) -> str:
        return str(cache_root() / _folder(self.name) / IMAGES_FOLDER)


def _load(name: str) -> list[dict[str, Any]]:
    ensure_made(name)
    metadata = MetadataCatalog.get(name)
    return load_coco_json(metadata.json_file, metadata.image_root, name)


def _split(name: str) -> _Split:
    return {**_PEOPLE, **_CONTEXT}[name]


def _folder(name: str) -> str:
    parameters = json.dumps({**asdict(_split(name)), "version": DRAWING_VERSION}, sort_keys=True)
    return f"{name}-{hashlib.sha256(parameters.encode()).hexdigest()[:12]}"


def _build(name: str, directory: Path) -> None:
    # Imported here so that `python -m` of one of them does not find the module imported already.
    from nonlocal_det.detection.synthetic.people import write_people
    from nonlocal_det.detection.synthetic.squares import write_context

    write = write_people if name in _PEOPLE else write_context
    write(directory, **asdict(_split(name)), label=name)
