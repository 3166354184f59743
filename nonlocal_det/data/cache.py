"""Data that are made on first use: folders, whole or not at all, by one process at a time."""

from __future__ import annotations

import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

from iopath.common.file_io import file_lock

from nonlocal_det.files import hash_file

CACHE_VARIABLE = "NONLOCAL_DET_CACHE"  # the environment variable that names the cache folder
_MANIFEST = "manifest.json"

logger = logging.getLogger(__name__)

#: Data sets that are made on first use, by name.
_makers: dict[str, Callable[[], object]] = {}


def make_on_first_use(name: str, make: Callable[[], object]) -> None:
    """Let ``make`` make the files of a data set, where they are missing, when they are needed."""
    _makers[name] = make


def is_made_on_first_use(name: str) -> bool:
    """Return whether a data set's files may be missing until :func:`ensure_made` is called."""
    return name in _makers


def ensure_made(name: str) -> None:
    """Make the files of a data set that is made on first use, where they are missing.

    Raises:
        OSError: the files cannot be written.
    """
    if name in _makers:
        _makers[name]()


def cache_root() -> Path:
    """Return the absolute path in ``NONLOCAL_DET_CACHE``, by default ``~/.cache/nonlocal_det``."""
    return Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/nonlocal_det").expanduser().absolute()


def cached_directory(name: str, build: Callable[[Path], None]) -> Path:
    """Return the folder ``name`` of the cache, made by ``build`` where it is missing or damaged.

    ``build`` writes into a temporary folder, which is renamed when it is complete, so that a process that is
    killed leaves nothing that could be taken for the data. Other processes wait and use what the first makes.

    Args:
        name: name of the folder. What it holds must depend on the name alone.
        build: writes the data into the empty folder that it is given.

    Raises:
        OSError: the cache cannot be written; the message names the folder and the environment variable.
    """
    target = cache_root() / name
    if _is_complete(target):
        return target
    try:
        with file_lock(str(target)):  # the system releases it when its holder dies
            if not _is_complete(target):
                _make(target, build)
    except OSError as error:
        raise OSError(
            f"cannot write the built-in data to {target} ({error.strerror or error}): "
            f"set {CACHE_VARIABLE} to a folder that can be written and has room"
        ) from error
    return target


def _make(target: Path, build: Callable[[Path], None]) -> None:
    # Under the lock nobody else is at work: temporary folders are what killed processes left behind.
    for stale in target.parent.glob(f".{target.name}.*.tmp"):
        shutil.rmtree(stale, ignore_errors=True)
    work = target.parent / f".{target.name}.{uuid.uuid4().hex}.tmp"
    try:
        work.mkdir()
        build(work)
        (work / _MANIFEST).write_text(json.dumps(_describe(work)), encoding="utf-8")
        if target.exists():
            logger.warning("%s is incomplete or damaged: replaced by a new one", target)
            shutil.rmtree(target)
        try:
            work.rename(target)
        except OSError:
            # Without working locks, as on some network drives, somebody else may have been faster.
            if not _is_complete(target):
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _describe(directory: Path) -> dict[str, dict[str, int | str]]:
    """Return the size of every file but the manifest, and the SHA-256 of those directly in ``directory``."""
    sizes = {
        path.relative_to(directory).as_posix(): path.stat().st_size
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path != directory / _MANIFEST
    }
    top = [name for name in sizes if "/" not in name]
    return {"sizes": sizes, "sha256": {name: hash_file(directory / name) for name in top}}


def _is_complete(directory: Path) -> bool:
    """Whether the folder holds what its manifest says: milliseconds, since the pictures are not read."""
    try:
        return json.loads((directory / _MANIFEST).read_bytes()) == _describe(directory)
    except (OSError, ValueError):
        return False
