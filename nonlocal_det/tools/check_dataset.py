"""Check an annotation file in COCO's format before training on it.

Examples:
    python -m nonlocal_det.tools.check_dataset train.json images --masks
    python -m nonlocal_det.tools.check_dataset val.json --against train.json --write-fixed fixed.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nonlocal_det.errors import ExitCode, UsageError
from nonlocal_det.files import whole_file
from nonlocal_det.tools.command import command, make_parser, parse

if TYPE_CHECKING:
    from nonlocal_det.detection.annotations.checks.findings import Finding
    from nonlocal_det.detection.annotations.coco_file import CocoFile


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments without the program's name; those of this process by default.

    Returns:
        The exit code: 0 for a file to train on, with or without warnings; 2 for errors or wrong input.
    """
    args = _parse(argv)

    from nonlocal_det.detection.annotations.checked_file import CheckedFile
    from nonlocal_det.detection.annotations.checks.findings import check_file
    from nonlocal_det.detection.annotations.coco_file import read_coco, read_document, reduce_document

    if args.images is not None and not args.images.is_dir():
        raise UsageError(f"{args.images}: no such image folder")
    if args.write_fixed is not None and _same_file(args.write_fixed, args.json_file):
        raise UsageError(f"--write-fixed {args.write_fixed}: is the input; name another file")
    document = None if args.write_fixed is None else read_document(args.json_file)
    # Where the whole document is not needed, a third of the memory is enough.
    file = read_coco(args.json_file) if document is None else reduce_document(document, args.json_file)
    findings = check_file(
        CheckedFile(
            file,
            masks=args.masks,
            keypoints=args.keypoints,
            folder=args.images,
            other=None if args.against is None else read_coco(args.against),
            allow_outside=args.allow_outside,
        )
    )
    mended = {} if document is None else _write_fixed(document, args.write_fixed)
    if args.json:
        print(json.dumps(_as_json(file, findings, mended), indent=2, ensure_ascii=False))
    else:
        _show(file, findings, mended, args)
    return ExitCode.WRONG_INPUT if any(finding.severity == "error" for finding in findings) else ExitCode.OK


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser(
        "check_dataset",
        "Check an annotation file in COCO's format: what is wrong, what Detectron2 would do with it, and the "
        "fix. Exit code 0: no errors; 2: errors, or wrong input.",
    )
    add = parser.add_argument
    add("json_file", metavar="JSON", type=Path, help="the annotation file")
    images = "the image folder; without it no picture is looked at"
    add("images", metavar="IMAGES", type=Path, nargs="?", help=images)
    against = "a file that must have the same classes, as train and val"
    add("--against", metavar="OTHER.json", type=Path, help=against)
    add("--masks", action="store_true", help="masks are to be trained (MODEL.MASK_ON)")
    add("--keypoints", action="store_true", help="keypoints are to be trained (MODEL.KEYPOINT_ON)")
    outside = "pictures may lie outside IMAGES (DATASETS.ALLOW_OUTSIDE_IMAGE_ROOT)"
    add("--allow-outside", action="store_true", help=outside)
    add("--json", action="store_true", help="print the findings as JSON")
    fixed = "write the file with what can be mended safely mended"
    add("--write-fixed", metavar="OUT.json", type=Path, help=fixed)
    return parse(parser, argv)


def _same_file(a: Path, b: Path) -> bool:
    return a.resolve() == b.resolve() or (a.exists() and b.exists() and a.samefile(b))


def _write_fixed(document: dict[str, Any], target: Path) -> dict[str, int]:
    from nonlocal_det.detection.annotations.fixes import mend

    mended = mend(document)
    if not target.parent.is_dir():
        raise UsageError(f"--write-fixed {target}: no such folder as {target.parent}")
    with whole_file(target) as part, part.open("w", encoding="utf-8") as file:
        json.dump(document, file, ensure_ascii=False)
    return mended


def _as_json(file: CocoFile, findings: Sequence[Finding], mended: dict[str, int]) -> dict[str, Any]:
    return {
        "file": str(file.path),
        **_counts(file),
        "errors": sum(finding.severity == "error" for finding in findings),
        "warnings": sum(finding.severity == "warning" for finding in findings),
        "findings": [asdict(finding) for finding in findings],
        "mended": mended,
    }


def _counts(file: CocoFile) -> dict[str, int]:
    return {
        "images": len(file.images),
        "annotations": len(file.annotations),
        "categories": len(file.categories),
    }


def _show(
    file: CocoFile, findings: Sequence[Finding], mended: dict[str, int], args: argparse.Namespace
) -> None:
    images, annotations, categories = _counts(file).values()
    print(
        f"{file.path}: {_number(images, 'image')}, {_number(annotations, 'annotation')}, "
        f"{_number(categories, 'category', 'categories')}"
    )
    for finding in findings:
        print(finding)
    if args.write_fixed is not None:
        listed = ", ".join(f"{kind} {number}" for kind, number in mended.items())
        print(f"{args.write_fixed}: written; mended {listed or 'nothing'}")
    errors = sum(finding.severity == "error" for finding in findings)
    summary = f"{_number(errors, 'kind')} of error, {_number(len(findings) - errors, 'kind')} of warning"
    if args.against is not None:
        differ = {finding.kind for finding in findings} & {"classes_differ", "keypoints_differ"}
        names = " and ".join(sorted(kind.removesuffix("_differ") for kind in differ))
        summary += f"; compared with {args.against}: {f'{names} differ' if names else 'the classes agree'}"
    print(summary)


def _number(count: int, singular: str, plural: str = "") -> str:
    return f"{count} {singular if count == 1 else plural or f'{singular}s'}"


if __name__ == "__main__":
    sys.exit(main())
