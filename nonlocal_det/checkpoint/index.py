"""The checkpoints that a run has saved, with their hashes."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from nonlocal_det.files import write_whole

INDEX = "checkpoints.json"


@dataclass(frozen=True)
class SavedFile:
    """A checkpoint that a run has saved."""

    name: str  # its file's name in the folder
    sha256: str
    resumable: bool = True  # whether the run may go on from it; the best one is kept for its weights


class CheckpointIndex:
    """The checkpoints that a run has saved in a folder, oldest first, kept in ``checkpoints.json``.

    A file is taken off the list before it is replaced or deleted, and put on it afterwards: whenever the
    process is killed, what the list says of a file is true.
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
        """Put a checkpoint, which is there, at the end of the list."""
        self._write([*(other for other in self.files() if other.name != file.name), file])

    def remove(self, name: str) -> None:
        """Take a checkpoint off the list, by its file's name, if it is on it."""
        files = self.files()
        rest = [file for file in files if file.name != name]
        if len(rest) < len(files):
            self._write(rest)

    def _write(self, files: list[SavedFile]) -> None:
        text = json.dumps({"checkpoints": [asdict(file) for file in files]}, indent=1)
        write_whole(self._path, lambda file: file.write(text.encode()))
        self._fresh = False
