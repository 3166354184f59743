"""Checking an annotation file in COCO's format: every check of the tables, and what they find."""

from __future__ import annotations

from dataclasses import dataclass

from nonlocal_det.detection.annotations.checked_file import CheckedFile
from nonlocal_det.detection.annotations.checks import (
    boxes,
    categories,
    fields,
    keypoints,
    masks,
    pictures,
    references,
)
from nonlocal_det.detection.annotations.checks.table import ERROR, Found
from nonlocal_det.detection.annotations.fixes import MENDABLE

__all__ = ["Finding", "check_file"]

#: How many entries at fault are named.
EXAMPLES = 3

_TABLES = (fields, references, categories, boxes, masks, keypoints, pictures)
_CHECKS = {kind: check for table in _TABLES for kind, check in table.CHECKS.items()}


@dataclass(frozen=True)
class Finding:
    """One kind of fault in a file; as text it is one line.

    Attributes:
        kind: its short name.
        severity: "error" stops training, "warning" does not.
        count: number of entries at fault.
        examples: up to three of them, such as "annotation 5".
        what: the fault.
        detectron2: what Detectron2 would do.
        fix: how to mend it.
        mended: whether it is mended in memory, and in the file that ``check_dataset --write-fixed`` writes.
    """

    kind: str
    severity: str
    count: int
    examples: tuple[str, ...]
    what: str
    detectron2: str
    fix: str
    mended: bool

    def __str__(self) -> str:
        more = ", ..." if self.count > len(self.examples) else ""
        mended = " (mended in memory; check_dataset --write-fixed writes it)" if self.mended else ""
        return (
            f"{self.severity}: {self.what}: {self.count} ({', '.join(self.examples)}{more}). "
            f"Detectron2 {self.detectron2}. Fix: {self.fix}{mended}."
        )


def check_file(checked: CheckedFile) -> list[Finding]:
    """Check a file.

    Args:
        checked: the file, and what is wanted of it.

    Returns:
        What was found, errors first; empty for a clean file.
    """
    findings = []
    for kind, check in _CHECKS.items():
        found = check.find(checked)
        if not isinstance(found, Found):
            found = Found(found)
        if found.entries:
            findings.append(
                Finding(
                    kind,
                    severity=found.severity or check.severity,
                    count=len(found.entries),
                    examples=tuple(found.entries[:EXAMPLES]),
                    what=found.what or check.what,
                    detectron2=check.detectron2,
                    fix=found.fix or check.fix,
                    mended=kind in MENDABLE,
                )
            )
    return sorted(findings, key=lambda finding: finding.severity != ERROR)
