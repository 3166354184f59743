"""Checking an annotation file in COCO's format: every check of the tables, and what they find."""

from __future__ import annotations

from dataclasses import dataclass

from nonlocal_det.detection.annotations.checked_file import CheckedFile
from nonlocal_det.detection.annotations.checks import categories, fields, objects, pictures
from nonlocal_det.detection.annotations.checks.table import ERROR, Check, Found
from nonlocal_det.detection.annotations.fixes import MENDABLE

#: How many entries at fault are named.
EXAMPLES = 3

_CHECKS = {
    kind: check
    for module in (fields, categories, objects, pictures)
    for kind, check in vars(module).items()
    if isinstance(check, Check)
}


@dataclass(frozen=True)
class Finding:
    """One kind of fault in a file; as text it is one line."""

    kind: str
    severity: str  # "error" stops training, "warning" does not
    count: int  # of the entries at fault
    examples: tuple[str, ...]  # up to three of them, such as "annotation 5"
    what: str  # the fault
    detectron2: str  # what Detectron2 would do
    fix: str
    mended: bool  # in memory, and in the file that ``check_dataset --write-fixed`` writes

    def __str__(self) -> str:
        more = ", ..." if self.count > len(self.examples) else ""
        mended = " (mended in memory; check_dataset --write-fixed writes it)" if self.mended else ""
        return (
            f"{self.severity}: {self.what}: {self.count} ({', '.join(self.examples)}{more}). "
            f"Detectron2 {self.detectron2}. Fix: {self.fix}{mended}."
        )


def check_file(checked: CheckedFile) -> list[Finding]:
    """Return what is wrong with a file, errors first; nothing for a clean file."""
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
