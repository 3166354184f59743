"""Registration of the user's own COCO-format data sets, and the settings that their files decide."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from reprlib import repr as short
from typing import Any, NamedTuple

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.catalog import Metadata
from detectron2.data.datasets import load_coco_json
from detectron2.data.datasets.builtin_meta import KEYPOINT_CONNECTION_RULES

from nonlocal_det.config.messages import config_error, get_value
from nonlocal_det.detection.annotations.coco_file import CocoFile, is_id, read_coco
from nonlocal_det.detection.annotations.documents import file_state, keep_file
from nonlocal_det.detection.annotations.keypoints import flip_pairs, oks_sigmas
from nonlocal_det.detection.config import detector_key
from nonlocal_det.errors import ConfigError, DatasetError, counted

logger = logging.getLogger(__name__)

_KEY = "DATASETS.REGISTER"
_EXAMPLE = '[["nuts_train", "nuts/train.json", "nuts/images"]]'


@dataclass(frozen=True)
class Summary:
    """What an annotation file says of the model that is trained on it."""

    classes: tuple[str, ...]  # category names, in the order of their ids
    category_ids: tuple[int, ...]
    keypoints: tuple[str, ...]  # their names; empty where no object has any
    skeleton: tuple[tuple[str, str], ...]  # pairs of keypoint names that are joined by a line
    has_rle: bool  # of an object that is not crowd: this needs INPUT.MASK_FORMAT "bitmask"


class _Entry(NamedTuple):
    """One data set of DATASETS.REGISTER, and what the config wants of its objects."""

    name: str
    json_file: str
    image_root: str
    masks: bool
    keypoints: bool


#: What this module has registered, so that a second call changes nothing.
_registered: dict[str, _Entry] = {}

_summaries: dict[str, tuple[tuple[int, int] | None, Summary]] = {}


def apply_datasets(cfg: CfgNode, folders: Iterable[Path], user_keys: set[str]) -> None:
    """Register DATASETS.REGISTER, once in a process, and set what its files decide and the user did not.

    Paths are made absolute in ``cfg``, so that it means the same in every process. Where a data set of
    DATASETS.TRAIN or DATASETS.TEST is one of DATASETS.REGISTER, the files decide the number of classes, of
    keypoints and their OKS sigmas, and INPUT.MASK_FORMAT. What these files hold is kept for their loaders.

    Args:
        cfg: the config, changed in place.
        folders: where relative paths are looked up before the working directory.
        user_keys: keys that the user set, as opposed to the project's own config files.

    Raises:
        ConfigError: a file cannot be used, a name is taken, the data sets in use contradict each other, or a
            setting of the user's contradicts them.
    """
    if not cfg.DATASETS.REGISTER:
        return
    _check_entries(cfg.DATASETS.REGISTER)
    cfg.DATASETS.REGISTER = [
        [name, _resolve(json_file, folders), _resolve(images, folders)]
        for name, json_file, images in cfg.DATASETS.REGISTER
    ]
    files = {name: json_file for name, json_file, _ in cfg.DATASETS.REGISTER}
    used = {name: files[name] for name in (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST) if name in files}
    summaries = {name: summarize(json_file, keep=True) for name, json_file in used.items()}
    if used:
        first = next(iter(used))
        _check_agreement(cfg, summaries, first)
        _fill(cfg, user_keys, f"data set {first!r} ({files[first]})", summaries[first])
        if cfg.MODEL.MASK_ON and any(summaries[x].has_rle for x in cfg.DATASETS.TRAIN if x in files):
            why = f"masks of {', '.join(cfg.DATASETS.TRAIN)} are RLE, and bitmasks take polygons too"
            _decide(cfg, user_keys, "INPUT.MASK_FORMAT", "bitmask", why)
    for name, json_file, images in cfg.DATASETS.REGISTER:
        _register(_Entry(name, json_file, images, cfg.MODEL.MASK_ON, cfg.MODEL.KEYPOINT_ON))


def summarize(json_file: str | os.PathLike[str], *, keep: bool = False) -> Summary:
    """Read what an annotation file says of the model; a file that has not changed is read once.

    With ``keep`` its content, if it has to be read, is kept for those who load it.

    Raises:
        ConfigError: it cannot be read, has no categories, or names its keypoints in more than one way.
    """
    name, state = os.fspath(json_file), file_state(json_file)
    if name not in _summaries or _summaries[name][0] != state:
        try:
            _summaries[name] = state, _summarize(keep_file(name) if keep else read_coco(name))
        except DatasetError as error:
            raise ConfigError(f"{_KEY}: {error}") from None
    return _summaries[name][1]


def _summarize(file: CocoFile) -> Summary:
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
        has_rle=any(a.mask.kind in ("rle", "counts") and not a.iscrowd for a in file.annotations),
    )


def _keypoints(
    file: CocoFile, categories: Sequence[dict[str, Any]]
) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Return names and skeleton of the keypoints, which are empty where no object has any."""
    lengths = {a.keypoints.length for a in file.annotations if a.keypoints is not None}
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
    pairs = [line for line in lines if isinstance(line, list) and list(map(type, line)) == [int, int]]
    inside = [(a, b) for a, b in pairs if min(a, b) >= 1 and max(a, b) <= len(names)]
    return names, tuple((names[a - 1], names[b - 1]) for a, b in inside)


def _check_entries(entries: Any) -> None:
    for entry in entries:
        if not (
            isinstance(entry, (list, tuple))
            and len(entry) == 3
            and all(isinstance(part, str) and part for part in entry)
        ):
            raise config_error(
                _KEY, entries, f"each entry must be [name, annotation file, image folder], such as {_EXAMPLE}"
            )
    names = [entry[0] for entry in entries]
    for name in names:
        if name in (".", "..") or set(name) & set("/\\\0"):
            what = "cannot be the name of the folder that results are written to; leave out / and \\"
            raise config_error(_KEY, entries, f"{name!r} {what}")
        if names.count(name) > 1:
            what = f"{name!r} is there twice; give each data set a name of its own"
            raise config_error(_KEY, entries, what)


def _resolve(path: str, folders: Iterable[Path]) -> str:
    expanded = Path(path).expanduser()
    candidates = [folder / expanded for folder in (*folders, Path.cwd())]
    # Not there: named as the user would have meant it, seen from the working directory.
    found = next((candidate for candidate in candidates if candidate.exists()), candidates[-1])
    return str(Path(os.path.abspath(found)))


def _check_agreement(cfg: CfgNode, summaries: dict[str, Summary], first: str) -> None:
    """Refuse data sets in use whose classes or keypoints differ: the model has one list of each."""
    ours = summaries[first]
    for key in ("TRAIN", "TEST"):
        for name in cfg.DATASETS[key]:
            if name in summaries:
                classes, keypoints = summaries[name].classes, summaries[name].keypoints
            else:
                known = MetadataCatalog.get(name) if name in DatasetCatalog else Metadata()
                classes, keypoints = tuple(known.get("thing_classes", ())), ()
            if classes and classes != ours.classes:
                raise ConfigError(
                    f"DATASETS.{key} names {name!r} with {named(classes, 'class', 'classes')}, but "
                    f"{first!r} has {named(ours.classes, 'class', 'classes')}: a model has one list of "
                    "classes; give both files the same categories in the same order, or take "
                    f"{name!r} out of DATASETS.{key}"
                )
            if cfg.MODEL.KEYPOINT_ON and keypoints and ours.keypoints and keypoints != ours.keypoints:
                raise ConfigError(
                    f"DATASETS.{key} names {name!r} with the keypoints {', '.join(keypoints)}, but {first!r} "
                    f"has {', '.join(ours.keypoints)}; give both files the same keypoints in one order"
                )


def named(names: Sequence[str], singular: str, plural: str = "") -> str:
    """Return how many names there are, and the first five: ``2 classes (hazel, walnut)``."""
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return f"{counted(len(names), singular, plural)} ({shown})"


def _fill(cfg: CfgNode, user_keys: set[str], source: str, summary: Summary) -> None:
    for head in ("MODEL.ROI_HEADS", "MODEL.RETINANET"):
        key, why = f"{head}.NUM_CLASSES", f"{source} has {named(summary.classes, 'class', 'classes')}"
        if head == detector_key(cfg) or key not in user_keys:
            _decide(cfg, user_keys, key, len(summary.classes), why)
    if summary.keypoints and cfg.MODEL.KEYPOINT_ON:
        _fill_keypoints(cfg, user_keys, source, summary.keypoints)


def _decide(cfg: CfgNode, user_keys: set[str], key: str, value: Any, why: str) -> None:
    """Set a key that the user did not set; refuse another value of theirs."""
    theirs = get_value(cfg, key)
    if key not in user_keys:
        cfg.merge_from_list([key, value])
    elif theirs != value:
        raise config_error(key, theirs, f"{why}; write {value!r} or leave the key out")


def _fill_keypoints(cfg: CfgNode, user_keys: set[str], source: str, names: Sequence[str]) -> None:
    why = f"{source} has {counted(len(names), 'keypoint')}"
    key = "MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS"
    _decide(cfg, user_keys, key, len(names), f"{why} ({', '.join(names)})")
    key, sigmas = "TEST.KEYPOINT_OKS_SIGMAS", cfg.TEST.KEYPOINT_OKS_SIGMAS
    if key in user_keys and sigmas:
        if len(names) != len(sigmas):
            raise config_error(key, sigmas, f"{why}; write {len(names)} values, or leave the key out")
        return
    cfg.TEST.KEYPOINT_OKS_SIGMAS, of_coco = oks_sigmas(names)
    if not of_coco:
        words = "%s: COCO's format has no OKS sigmas, so %s is used for each of %d keypoints; %s sets them"
        logger.info(words, source, cfg.TEST.KEYPOINT_OKS_SIGMAS[0], len(names), key)


def _register(entry: _Entry) -> None:
    name = entry.name
    if _registered.get(name) == entry and name in DatasetCatalog:
        return
    if name in DatasetCatalog:
        if name not in _registered:
            raise ConfigError(
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
    name, records = entry.name, load_coco_json(entry.json_file, entry.image_root, entry.name)
    objects = [obj for record in records for obj in record["annotations"]]
    if entry.masks and any("segmentation" in obj for obj in objects):
        for record in records:
            record["annotations"] = [obj for obj in record["annotations"] if "segmentation" in obj]
        dropped = len(objects) - sum(len(record["annotations"]) for record in records)
        if dropped:
            words = "%s: objects without a mask, which are left out: %d of %d"
            logger.warning(words, name, dropped, len(objects))
    names = MetadataCatalog.get(name).get("keypoint_names", ())
    if entry.keypoints and names:
        without = [obj for obj in objects if "keypoints" not in obj]
        for obj in without:
            obj["keypoints"] = [0.0] * (3 * len(names))
        if without:
            words = "%s: objects without keypoints, which count as not labelled: %d"
            logger.info(words, name, len(without))
    return records
