"""Checking an annotation file in COCO's format before it costs a training run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog

from nonlocal_det.detection.annotations.check_table import CHECKS, ERROR, WARNING, Found
from nonlocal_det.detection.annotations.checked_file import Subject
from nonlocal_det.detection.annotations.coco_file import CocoFile, read_coco
from nonlocal_det.detection.annotations.fixes import MENDABLE
from nonlocal_det.detection.registration import summarize_file
from nonlocal_det.errors import ConfigError, DatasetError
from nonlocal_det.upstream import COCO_SPLITS

__all__ = [
    "ERROR",
    "WARNING",
    "Finding",
    "Subject",
    "check_before_training",
    "check_file",
]

logger = logging.getLogger(__name__)

#: How many entries at fault are named.
EXAMPLES = 3
#: How many pictures of a data set are opened before training.
SAMPLED_PICTURES = 50

# Detectron2's own data sets are known to it; to read COCO's training set again would take half a minute.
_KNOWN = {name for splits in COCO_SPLITS.values() for name in splits}


@dataclass(frozen=True)
class Finding:
    """One kind of fault in a file; as text it is one line.

    Attributes:
        kind: its short name.
        severity: :data:`ERROR` stops training, :data:`WARNING` does not.
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


def check_file(subject: Subject) -> list[Finding]:
    """Check a file.

    Args:
        subject: the file, and what is wanted of it.

    Returns:
        What was found, errors first; empty for a clean file.
    """
    findings = []
    for check in CHECKS:
        found = check.find(subject)
        if not isinstance(found, Found):
            found = Found(found)
        if found.entries:
            findings.append(
                Finding(
                    kind=check.kind,
                    severity=found.severity or check.severity,
                    count=len(found.entries),
                    examples=tuple(found.entries[:EXAMPLES]),
                    what=found.what or check.what,
                    detectron2=check.detectron2,
                    fix=found.fix or check.fix,
                    mended=check.kind in MENDABLE,
                )
            )
    return sorted(findings, key=lambda finding: finding.severity != ERROR)


def check_before_training(cfg: CfgNode, *, eval_only: bool = False) -> None:
    """Check the annotation files of a config's data sets, but for Detectron2's own.

    What is found goes to the log, and what DATASETS.REGISTER has taken from the files. Of the pictures a
    sample is opened; everything else is checked whole.

    Args:
        cfg: a config from :func:`nonlocal_det.get_config`.
        eval_only: whether the run only evaluates, so that DATASETS.TRAIN is not used.

    Raises:
        ConfigError: a data set has errors; the message has the first one.
    """
    train = () if eval_only else cfg.DATASETS.TRAIN
    first: CocoFile | None = None
    for name in dict.fromkeys((*train, *cfg.DATASETS.TEST)):
        # vars(): the built-in data sets are made when their path is asked for.
        metadata = vars(MetadataCatalog.get(name)) if name in DatasetCatalog else {}
        path = metadata.get("json_file")
        if name in _KNOWN or metadata.get("evaluator_type") != "coco" or not isinstance(path, str):
            continue
        try:
            file = read_coco(path)
        except DatasetError as error:
            raise ConfigError(f"data set {name!r}: {error}") from None
        findings = check_file(
            Subject(
                file,
                masks=cfg.MODEL.MASK_ON,
                keypoints=cfg.MODEL.KEYPOINT_ON,
                training=name in train,
                folder=metadata.get("image_root"),
                sample=SAMPLED_PICTURES,
                other=first,
                allow_outside=cfg.DATASETS.ALLOW_OUTSIDE_IMAGE_ROOT,
                # The evaluation needs them all.
                max_bad_fraction=None if name in cfg.DATASETS.TEST else cfg.DATALOADER.MAX_BAD_FRACTION,
            )
        )
        first = first or file
        _report(name, path, findings)
        if name in (entry[0] for entry in cfg.DATASETS.REGISTER):
            logger.info("%s", _describe(cfg, name, file))


def _describe(cfg: CfgNode, name: str, file: CocoFile) -> str:
    """Say in one line what a data set's file has decided."""
    summary = summarize_file(file)
    head = "RETINANET" if cfg.MODEL.META_ARCHITECTURE == "RetinaNet" else "ROI_HEADS"
    classes, points = summary.classes, summary.keypoints
    parts = [f"{_listed(classes, 'class', 'classes')}: MODEL.{head}.NUM_CLASSES {len(classes)}"]
    if cfg.MODEL.KEYPOINT_ON and points:
        pairs = len(MetadataCatalog.get(name).get("keypoint_flip_map", ()))
        parts.append(
            f"{_listed(points, 'keypoint', 'keypoints')}, {pairs} left and right: "
            f"MODEL.ROI_KEYPOINT_HEAD.NUM_KEYPOINTS {len(points)}"
        )
    if cfg.MODEL.MASK_ON:
        masks = "some as RLE" if summary.has_rle else "as polygons"
        parts.append(f"masks {masks}: INPUT.MASK_FORMAT {cfg.INPUT.MASK_FORMAT}")
    return f"{name}: {file.path} has {'; '.join(parts)}"


def _listed(names: Sequence[str], singular: str, plural: str) -> str:
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return f"{len(names)} {singular if len(names) == 1 else plural} ({shown})"


def _report(name: str, path: str, findings: Sequence[Finding]) -> None:
    for finding in findings:
        logger.log(logging.ERROR if finding.severity == ERROR else logging.WARNING, "%s: %s", name, finding)
    errors = [str(finding) for finding in findings if finding.severity == ERROR]
    if errors:
        more = f" (and {len(errors) - 1} more, see the log)" if len(errors) > 1 else ""
        raise ConfigError(f"data set {name!r} ({path}): {errors[0].removeprefix('error: ')}{more}")
