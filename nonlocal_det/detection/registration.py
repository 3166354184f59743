"""Registration of the user's own COCO-format data sets, and the settings that their files decide."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from reprlib import repr as short
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import load_coco_json
from detectron2.data.datasets.builtin_meta import KEYPOINT_CONNECTION_RULES

from nonlocal_det.detection.annotations.coco_file import CocoFile, is_id, read_coco
from nonlocal_det.detection.annotations.keypoints import flip_pairs, oks_sigmas
from nonlocal_det.errors import DatasetError

__all__ = ["DatasetError", "Summary", "apply_datasets", "register_from_config", "summarize"]

logger = logging.getLogger(__name__)

_KEY = "DATASETS.REGISTER"
_EXAMPLE = '[["nuts_train", "nuts/train.json", "nuts/images"]]'


@dataclass(frozen=True)
class Summary:
    """What an annotation file says of the model that is trained on it.

    Attributes:
        classes: category names, in the order of their ids.
        category_ids: the ids, in the same order.
        keypoints: names of the keypoints; empty where no object has any.
        skeleton: pairs of keypoint names that are joined by a line.
        has_rle: whether the mask of an object that is not crowd is an RLE, which needs INPUT.MASK_FORMAT
            "bitmask".
    """

    classes: tuple[str, ...]
    category_ids: tuple[int, ...]
    keypoints: tuple[str, ...]
    skeleton: tuple[tuple[str, str], ...]
    has_rle: bool


@dataclass(frozen=True)
class _Entry:
    """One data set of DATASETS.REGISTER, and what the config wants of its objects."""

    name: str
    json_file: str
    image_root: str
    masks: bool = False
    keypoints: bool = False


#: What this module has registered, so that a second call changes nothing.
_registered: dict[str, _Entry] = {}


def apply_datasets(cfg: CfgNode, folders: Iterable[Path], user_keys: set[str]) -> None:
    """Register DATASETS.REGISTER, and set what its files decide and the user did not.

    Paths are made absolute in ``cfg``, so that it means the same in every process. Where a data set of
    DATASETS.TRAIN or DATASETS.TEST is one of DATASETS.REGISTER, the files decide the number of classes, of
    keypoints and their OKS sigmas, and INPUT.MASK_FORMAT.

    Args:
        cfg: the config, changed in place.
        folders: where relative paths are looked up before the working directory.
        user_keys: keys that the user set, as opposed to the project's own config files.

    Raises:
        DatasetError: a file cannot be used, the data sets in use contradict each other, or a setting of the
            user's contradicts them.
    """
    if not cfg.DATASETS.REGISTER:
        return
    cfg.DATASETS.REGISTER = [
        [name, _resolve(json_file, folders), _resolve(images, folders)]
        for name, json_file, images in _check_entries(cfg.DATASETS.REGISTER)
    ]
    files = {name: json_file for name, json_file, _ in cfg.DATASETS.REGISTER}
    used = [name for name in (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST) if name in files]
    if used:
        summary = summarize(files[used[0]])
        _check_agreement(cfg, files, used[0], summary)
        _fill(cfg, user_keys, f"data set {used[0]!r} ({files[used[0]]})", summary)
        trained = [summarize(files[name]) for name in cfg.DATASETS.TRAIN if name in files]
        _fill_mask_format(cfg, user_keys, any(summary.has_rle for summary in trained))
    register_from_config(cfg)


def register_from_config(cfg: CfgNode) -> None:
    """Register every data set of DATASETS.REGISTER with Detectron2's catalogs.

    A second call changes nothing, and a call in a new process does all that is needed there.

    Args:
        cfg: a config from :func:`nonlocal_det.get_config`.

    Raises:
        DatasetError: a file cannot be used, or a name is taken by another data set.
    """
    for name, json_file, images in _check_entries(cfg.DATASETS.REGISTER):
        _register(_Entry(name, json_file, images, cfg.MODEL.MASK_ON, cfg.MODEL.KEYPOINT_ON))


def summarize(json_file: str | os.PathLike[str]) -> Summary:
    """Read what an annotation file says of the model; a file that has not changed is read once.

    Args:
        json_file: the file.

    Raises:
        DatasetError: it cannot be read, has no categories, or names its keypoints in more than one way.
    """
    try:
        state = os.stat(json_file)
    except OSError:
        state = None  # the reader says what is wrong
    return _summarize(os.fspath(json_file), state and (state.st_mtime_ns, state.st_size))


@lru_cache(maxsize=16)
def _summarize(json_file: str, _state: tuple[int, int] | None) -> Summary:
    return summarize_file(read_coco(json_file))


def summarize_file(file: CocoFile) -> Summary:
    """Do the work of :func:`summarize` for a file that has been read.

    Args:
        file: the file.

    Raises:
        DatasetError: as there.
    """
    for category in file.categories:
        if not is_id(category.get("id")) or not isinstance(category.get("name"), str):
            raise DatasetError(
                f'{file.path}: a category needs a whole number as "id" and text as "name", but one is '
                f"{short(category)}"
            )
    if not file.categories:
        raise DatasetError(f'{file.path}: "categories" is empty, so there is no class to learn')
    categories = sorted(file.categories, key=lambda category: category["id"])
    names, skeleton = _keypoints(file, categories)
    return Summary(
        classes=tuple(category["name"] for category in categories),
        category_ids=tuple(int(category["id"]) for category in categories),
        keypoints=names,
        skeleton=skeleton,
        has_rle=any(a.mask.kind in ("rle", "counts") and not a.iscrowd for a in file.annotations or ()),
    )


def _keypoints(
    file: CocoFile, categories: Sequence[dict[str, Any]]
) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Return names and skeleton of the keypoints, which are empty where no object has any."""
    lengths = {a.keypoints.length for a in file.annotations or () if a.keypoints is not None}
    if not lengths and file.annotations:
        return (), ()  # tools write lists of names for classes without keypoints too
    named = [c for c in categories if isinstance(c.get("keypoints"), list) and c["keypoints"]]
    if not named:
        count = max(lengths, default=0) // 3
        return tuple(f"keypoint_{i}" for i in range(1, count + 1)), ()
    names = tuple(map(str, named[0]["keypoints"]))
    other = next((c for c in named if tuple(map(str, c["keypoints"])) != names), None)
    if other is not None:
        raise DatasetError(
            f"{file.path}: category {named[0]['name']!r} has {len(names)} keypoints and category "
            f"{other['name']!r} has {len(other['keypoints'])} others: Detectron2 has one keypoint head for "
            "all classes; give all the same names"
        )
    if len(set(names)) < len(names):
        raise DatasetError(
            f"{file.path}: category {named[0]['name']!r} names two keypoints alike: {', '.join(names)}"
        )
    lines = named[0].get("skeleton")
    lines = lines if isinstance(lines, list) else []
    pairs = [line for line in lines if isinstance(line, list) and len(line) == 2]
    return names, tuple(
        (names[a - 1], names[b - 1])
        for a, b in pairs
        if type(a) is type(b) is int and min(a, b) >= 1 and max(a, b) <= len(names)
    )


def _check_entries(entries: Any) -> list[tuple[str, str, str]]:
    for entry in entries:
        if not (
            isinstance(entry, (list, tuple))
            and len(entry) == 3
            and all(isinstance(part, str) and part for part in entry)
        ):
            raise DatasetError(
                f"{_KEY} is {entries!r}: each entry must be [name, annotation file, image folder], such as "
                f"{_EXAMPLE}"
            )
    names = [entry[0] for entry in entries]
    unfit = next((name for name in names if name in (".", "..") or set(name) & set("/\\\0")), None)
    if unfit is not None:
        raise DatasetError(
            f"{_KEY} is {entries!r}: {unfit!r} cannot be the name of the folder that results are written to; "
            "leave out / and \\"
        )
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise DatasetError(
            f"{_KEY} is {entries!r}: {twice!r} is there twice; give each data set a name of its own"
        )
    return [tuple(entry) for entry in entries]


def _resolve(path: str, folders: Iterable[Path]) -> str:
    expanded = Path(path).expanduser()
    candidates = [folder / expanded for folder in (*folders, Path.cwd())]
    # Not there: named as the user would have meant it, seen from the working directory.
    found = next((candidate for candidate in candidates if candidate.exists()), candidates[-1])
    return str(Path(os.path.abspath(found)))


def _check_agreement(cfg: CfgNode, files: dict[str, str], first: str, summary: Summary) -> None:
    """Refuse data sets in use whose classes or keypoints differ: the model has one list of each."""
    for key in ("TRAIN", "TEST"):
        for name in cfg.DATASETS[key]:
            if name in files:
                other = summarize(files[name])
                classes, keypoints = other.classes, other.keypoints
            else:
                metadata = MetadataCatalog.get(name) if name in DatasetCatalog else None
                classes = tuple(metadata.get("thing_classes", ())) if metadata is not None else ()
                keypoints = ()
            if classes and classes != summary.classes:
                raise DatasetError(
                    f"DATASETS.{key} names {name!r} with {_list(classes)}, but {first!r} has "
                    f"{_list(summary.classes)}: a model has one list of classes; give both files the same "
                    f"categories in the same order, or take {name!r} out of DATASETS.{key}"
                )
            if cfg.MODEL.KEYPOINT_ON and keypoints and summary.keypoints and keypoints != summary.keypoints:
                raise DatasetError(
                    f"DATASETS.{key} names {name!r} with the keypoints {', '.join(keypoints)}, but {first!r} "
                    f"has {', '.join(summary.keypoints)}; give both files the same keypoints in one order"
                )


def _list(classes: Sequence[str]) -> str:
    shown = ", ".join(classes[:5]) + (", ..." if len(classes) > 5 else "")
    return f"{len(classes)} class{'es' if len(classes) > 1 else ''} ({shown})"


def _count(keypoints: Sequence[str]) -> str:
    return f"{len(keypoints)} keypoint{'' if len(keypoints) == 1 else 's'}"


def _fill(cfg: CfgNode, user_keys: set[str], source: str, summary: Summary) -> None:
    count = len(summary.classes)
    retinanet = cfg.MODEL.META_ARCHITECTURE == "RetinaNet"
    for node, used in ((cfg.MODEL.ROI_HEADS, not retinanet), (cfg.MODEL.RETINANET, retinanet)):
        key = "MODEL.RETINANET.NUM_CLASSES" if node is cfg.MODEL.RETINANET else "MODEL.ROI_HEADS.NUM_CLASSES"
        if key not in user_keys:
            node.NUM_CLASSES = count
        elif used and count != node.NUM_CLASSES:
            raise DatasetError(
                f"{key} is {node.NUM_CLASSES}: {source} has {_list(summary.classes)}; write {count} or leave "
                "the key out"
            )
    if summary.keypoints and cfg.MODEL.KEYPOINT_ON:
        _fill_keypoints(cfg, user_keys, source, summary.keypoints)


def _fill_keypoints(cfg: CfgNode, user_keys: set[str], source: str, names: Sequence[str]) -> None:
    head, key = cfg.MODEL.ROI_KEYPOINT_HEAD, "MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS"
    if key not in user_keys:
        head.NUM_KEYPOINTS = len(names)
    elif len(names) != head.NUM_KEYPOINTS:
        raise DatasetError(
            f"{key} is {head.NUM_KEYPOINTS}: {source} has {_count(names)} ({', '.join(names)}); write "
            f"{len(names)} or leave the key out"
        )
    key = "TEST.KEYPOINT_OKS_SIGMAS"
    if key in user_keys and cfg.TEST.KEYPOINT_OKS_SIGMAS:
        if len(names) != len(cfg.TEST.KEYPOINT_OKS_SIGMAS):
            raise DatasetError(
                f"{key} is {cfg.TEST.KEYPOINT_OKS_SIGMAS}: {source} has {_count(names)}; write "
                f"{len(names)} values, or leave the key out"
            )
        return
    cfg.TEST.KEYPOINT_OKS_SIGMAS, of_coco = oks_sigmas(names)
    if not of_coco:
        logger.info(
            "%s: COCO's format has no OKS sigmas, so %s is used for each of %d keypoints; %s sets them",
            source,
            cfg.TEST.KEYPOINT_OKS_SIGMAS[0],
            len(names),
            key,
        )


def _fill_mask_format(cfg: CfgNode, user_keys: set[str], has_rle: bool) -> None:
    if not cfg.MODEL.MASK_ON or not has_rle:
        return
    if "INPUT.MASK_FORMAT" not in user_keys:
        cfg.INPUT.MASK_FORMAT = "bitmask"
    elif cfg.INPUT.MASK_FORMAT != "bitmask":
        raise DatasetError(
            f"INPUT.MASK_FORMAT is {cfg.INPUT.MASK_FORMAT!r}: masks of {', '.join(cfg.DATASETS.TRAIN)} are "
            'RLE, which needs "bitmask" (it takes polygons too); write that or leave the key out'
        )


def _register(entry: _Entry) -> None:
    name = entry.name
    if _registered.get(name) == entry and name in DatasetCatalog:
        return
    if name in DatasetCatalog:
        if name not in _registered:
            raise DatasetError(
                f"{_KEY} names {name!r}: a data set of this name is there already; choose another name"
            )
        DatasetCatalog.remove(name)
        MetadataCatalog.pop(name, None)
    summary = summarize(entry.json_file)
    DatasetCatalog.register(name, partial(_load, entry))
    metadata = MetadataCatalog.get(name)
    metadata.set(
        json_file=entry.json_file,
        image_root=entry.image_root,
        evaluator_type="coco",
        thing_classes=list(summary.classes),
        thing_dataset_id_to_contiguous_id={number: i for i, number in enumerate(summary.category_ids)},
    )
    if summary.keypoints:
        colours = [colour for _, _, colour in KEYPOINT_CONNECTION_RULES]
        metadata.set(
            keypoint_names=list(summary.keypoints),
            keypoint_flip_map=flip_pairs(summary.keypoints),
            keypoint_connection_rules=[
                (a, b, colours[i % len(colours)]) for i, (a, b) in enumerate(summary.skeleton)
            ],
        )
    _registered[name] = entry


def _load(entry: _Entry) -> list[dict[str, Any]]:
    """Load the records, without what Detectron2's data mapper would stop at."""
    records = load_coco_json(entry.json_file, entry.image_root, entry.name)
    objects = [obj for record in records for obj in record["annotations"]]
    if entry.masks and any("segmentation" in obj for obj in objects):
        for record in records:
            record["annotations"] = [obj for obj in record["annotations"] if "segmentation" in obj]
        dropped = len(objects) - sum(len(record["annotations"]) for record in records)
        if dropped:
            logger.warning(
                "%s: objects without a mask, which are left out: %d of %d",
                entry.name,
                dropped,
                len(objects),
            )
    names = MetadataCatalog.get(entry.name).get("keypoint_names", ())
    if entry.keypoints and names:
        without = [obj for obj in objects if "keypoints" not in obj]
        for obj in without:
            obj["keypoints"] = [0.0] * (3 * len(names))
        if without:
            logger.info(
                "%s: objects without keypoints, which count as not labelled: %d", entry.name, len(without)
            )
    return records
