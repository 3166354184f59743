"""Files that are whole or absent: written beside their name and renamed when all of it is on the disk."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

_HIDDEN = ".partial-"


class _HashingFile:
    """A file to write to, which hashes what is written, and remembers why writing failed."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error
            raise
        self._digest.update(data)
        return len(data)

    def flush(self) -> None:
        self._file.flush()

    def hexdigest(self) -> str:
        return self._digest.hexdigest()


def write_whole(
    path: str | os.PathLike[str],
    write: Callable[[Any], object],
    before: Callable[[], object] = lambda: None,
) -> str:
    """Write a file that appears under its name only when all of it is on the disk.

    Whenever the process is killed, ``path`` holds the old content or the new.

    Args:
        path: the file.
        write: writes the content to the file object that it gets, front to back.
        before: called when the content is on the disk and the name still has the old one.

    Returns:
        The content's SHA-256, in hexadecimal.

    Raises:
        OSError: it cannot be written; ``path`` is as it was.
    """
    path = Path(path)
    # One name for all of a kind, so that what a kill leaves is written over by the next.
    partial = path.with_name(f"{path.suffix or path.name}.partial")
    hashing = None
    try:
        with open(partial, "wb") as file:
            hashing = _HashingFile(file)
            write(hashing)
            file.flush()
            os.fsync(file.fileno())
        before()
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        if hashing is not None and hashing.error is not None:
            # What PyTorch makes of an error of the file does not tell what it was.
            raise hashing.error from None
        raise
    _sync_folder(path.parent)
    return hashing.hexdigest()


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a path to write to, whose file gets its place when all of it is written.

    For libraries that open files themselves; :func:`write_whole` gives a file object. Several together appear
    only if all were written: enter them in one :class:`contextlib.ExitStack`, the last to appear first.

    Yields:
        A path of the same name in a hidden folder beside it: some libraries write the name into the file.
        What is there at the end is moved to ``path``, or removed if an error was raised.

    Raises:
        OSError: it cannot be written; ``path`` is as it was.
    """
    path = Path(path)
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=_HIDDEN) as folder:
            partial = Path(folder, path.name)
            yield partial
            os.replace(partial, path)
    except OSError as error:
        if _HIDDEN in str(error.filename):
            error.filename = str(path)  # the one that the user knows
            del error.filename2
        raise


def hash_file(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a loss of power."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
