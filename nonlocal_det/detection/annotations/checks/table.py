"""What the tables of checks are made of: for each kind of fault its words, and how its entries are found."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from reprlib import repr as short
from typing import Any, NamedTuple

from nonlocal_det.detection.annotations.checked_file import CheckedFile
from nonlocal_det.detection.annotations.coco_file import Annotation

ERROR, WARNING = "error", "warning"


class Found(NamedTuple):
    """The entries at fault, where the words of the table are not enough."""

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


error = partial(Check, ERROR)
warning = partial(Check, WARNING)


def annotations(wrong: Callable[[Annotation], Any]) -> Finder:
    """Return a finder of the annotations that are wrong."""
    return lambda checked: wrong_annotations(checked, wrong)


def wrong_annotations(checked: CheckedFile, wrong: Callable[[Annotation], Any]) -> list[str]:
    """Name the annotations that are wrong."""
    return where("annotation", checked.file.annotations, wrong)


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


def needed_for_training(checked: CheckedFile) -> Found:
    """Name all annotations: an error in a file to train on, a missing score in one to test on."""
    return Found(wrong_annotations(checked, lambda _: True), severity=ERROR if checked.training else WARNING)


def not_crowd(annotation: Annotation) -> bool:
    """Return whether an annotation is one object."""
    return not annotation.iscrowd
