"""Files that are whole or absent, and a list of those that a run has saved, with their hashes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

__all__ = ["CheckpointIndex", "SavedFile", "hash_file", "write_whole"]

INDEX = "checkpoints.json"


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


def hash_file(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal.

    Args:
        path: the file.

    Raises:
        OSError: it cannot be read.
    """
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@dataclass(frozen=True)
class SavedFile:
    """A checkpoint that a run has saved.

    Attributes:
        name: its file's name in the folder.
        sha256: the hash of its content.
        resumable: whether the run may go on from it; the best one is kept for its weights.
    """

    name: str
    sha256: str
    resumable: bool = True


class CheckpointIndex:
    """The checkpoints that a run has saved in a folder, oldest first, kept in ``checkpoints.json``.

    A file is taken off the list before it is replaced or deleted, and put on it afterwards: whenever the
    process is killed, what the list says of a file is true.

    Args:
        folder: the folder.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._path = Path(folder) / INDEX
        self._fresh = False

    def start(self) -> None:
        """Forget the checkpoints of an earlier run in the folder as soon as this one saves its first."""
        self._fresh = True

    def files(self) -> list[SavedFile]:
        """Return the checkpoints, oldest first; none if the list is absent or damaged."""
        if self._fresh:
            return []
        try:
            entries = json.loads(self._path.read_text(encoding="utf-8"))["checkpoints"]
            return [SavedFile(**entry) for entry in entries]
        except (OSError, ValueError, KeyError, TypeError):
            return []

    def add(self, file: SavedFile) -> None:
        """Put a checkpoint at the end of the list.

        Args:
            file: the checkpoint, which is there.

        Raises:
            OSError: the list cannot be written.
        """
        self._write([*(other for other in self.files() if other.name != file.name), file])

    def remove(self, name: str) -> None:
        """Take a checkpoint off the list, if it is on it.

        Args:
            name: its file's name.

        Raises:
            OSError: the list cannot be written.
        """
        files = self.files()
        rest = [file for file in files if file.name != name]
        if len(rest) < len(files):
            self._write(rest)

    def _write(self, files: list[SavedFile]) -> None:
        text = json.dumps({"checkpoints": [asdict(file) for file in files]}, indent=1)
        write_whole(self._path, lambda file: file.write(text.encode()))
        self._fresh = False


def _sync_folder(folder: Path) -> None:
    """Make a rename survive a loss of power."""
    if os.name != "posix":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
