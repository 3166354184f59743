"""What checks are made of: for each kind of fault its words, and how its entries are found.

A check's kind is its name in its module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from reprlib import repr as short
from typing import Any, NamedTuple

from nonlocal_det.detection.annotations.checked_file import CheckedFile
from nonlocal_det.detection.annotations.coco_file import Annotation

ERROR, WARNING = "error", "warning"


class Found(NamedTuple):
    """The entries at fault, where the words of the check are not enough."""

    entries: Sequence[str]
    what: str | None = None
    severity: str | None = None
    fix: str | None = None


Finder = Callable[[CheckedFile], "Sequence[str] | Found"]


class Check(NamedTuple):
    """One kind of fault: its severity, what it is, what Detectron2 does with it, the fix, how it is found."""

    severity: str
    what: str
    detectron2: str
    fix: str
    find: Finder


def _check(severity: str, what: str, detectron2: str, fix: str) -> Callable[[Finder], Check]:
    return lambda find: Check(severity, what, detectron2, fix, find)


#: Given words, they make a check of a finder.
error, warning = partial(_check, ERROR), partial(_check, WARNING)


def annotations(wrong: Callable[[Annotation], Any]) -> Finder:
    """Return a finder of the annotations that are wrong."""
    return lambda checked: wrong_annotations(checked, wrong)


def wrong_annotations(checked: CheckedFile, wrong: Callable[[Annotation], Any]) -> list[str]:
    """Name the annotations that are wrong."""
    return where("annotation", checked.file.annotations, wrong)


def not_all(checked: CheckedFile, wrong: Callable[[Annotation], Any]) -> list[str]:
    """Name the annotations that are wrong, unless all are."""
    found = wrong_annotations(checked, wrong)
    return found if len(found) < len(checked.file.annotations) else []


def none_right(checked: CheckedFile, right: Callable[[Annotation], Any]) -> Found:
    """Name all annotations where none is right: an error in training, a missing score in a test."""
    every = [] if any(map(right, checked.file.annotations)) else wrong_annotations(checked, lambda _: True)
    return Found(every, severity=ERROR if checked.training else WARNING)


def where(unit: str, entries: Iterable[Any], wrong: Callable[[Any], Any]) -> list[str]:
    """Name the entries that are wrong, by their place in the file where they have no id."""
    found = []
    for place, entry in enumerate(entries):
        if wrong(entry):
            number = entry.id if isinstance(entry, Annotation) else entry.get("id")
            found.append(f"{unit} no. {place}" if number is None else label(unit, number))
    return found


def label(unit: str, number: Any) -> str:
    """Name an entry by its id."""
    return f"{unit} {short(number)}"


def not_crowd(annotation: Annotation) -> bool:
    """Return whether an annotation is one object."""
    return not annotation.iscrowd
