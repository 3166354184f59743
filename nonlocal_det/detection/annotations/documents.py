"""Annotation files that will be needed again: each is read once a process, and again where it has changed."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any, NamedTuple

from nonlocal_det.detection.annotations.coco_file import CocoFile, read_document, reduce_document


class _Kept(NamedTuple):
    state: tuple[int, int] | None
    document: dict[str, Any]
    file: CocoFile


_kept: dict[str, _Kept] = {}


def file_state(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    """Return what changes with a file's content: time and size; None where there is no file."""
    try:
        found = os.stat(path)
    except OSError:
        return None  # the reader says what is wrong
    return found.st_mtime_ns, found.st_size


def keep_file(path: str | os.PathLike[str]) -> CocoFile:
    """Return what the checks need of an annotation file, and keep all of it for those who need it next.

    Raises:
        DatasetError: it cannot be read, is not JSON, or is not made like a COCO file.
    """
    name, state = os.fspath(path), file_state(path)
    if name not in _kept or _kept[name].state != state:
        _kept.pop(name, None)  # before the new one needs its room
        document = read_document(name)
        _kept[name] = _Kept(state, document, reduce_document(document, name))
    return _kept[name].file


def lend_document(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return an annotation file's content, which is kept; errors are those of :func:`keep_file`.

    It is a copy as far as Detectron2, pycocotools and :func:`fixes.mend` change it: keys of entries, and the
    numbers of keypoints.
    """
    keep_file(path)
    copied = dict(_kept[os.fspath(path)].document)
    for section in {"images", "annotations", "categories"} & copied.keys():
        copied[section] = [dict(entry) for entry in copied[section]]
    for annotation in copied.get("annotations", ()):
        if isinstance(annotation.get("keypoints"), list):
            annotation["keypoints"] = list(annotation["keypoints"])
    return copied


def take_document(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return an annotation file's content, which may be changed; errors are those of :func:`keep_file`."""
    kept = _kept.pop(os.fspath(path), None)
    return kept.document if kept is not None and kept.state == file_state(path) else read_document(path)


def release_documents(but: Collection[str | None] = ()) -> None:
    """Forget what is kept, but for some paths."""
    for name in _kept.keys() - set(but):
        del _kept[name]
