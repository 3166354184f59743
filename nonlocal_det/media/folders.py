"""Files that lead out of the folders that they should stay in."""

from __future__ import annotations

import os
from collections.abc import Sequence


def outside(paths: Sequence[str], roots: Sequence[str | os.PathLike[str]]) -> list[int]:
    """Find the paths that lead out of the folders that they should stay in.

    They do by "..", by being absolute, by a symbolic link, or by being an address. The folders themselves may
    be links. Each folder is listed once.

    Args:
        paths: files, which need not be there.
        roots: folders, or addresses of folders.

    Returns:
        The indices of such paths.
    """
    addresses = tuple(f"{os.fspath(root).rstrip('/')}/" for root in roots if "://" in os.fspath(root))
    inside = tuple(os.path.join(os.path.realpath(root), "") for root in roots if "://" not in os.fspath(root))
    parents: dict[str, tuple[str, bool]] = {}

    def leads_out(path: str) -> bool:
        if "://" in path:
            return ".." in path.split("/") or not path.startswith(addresses)
        parent, name = os.path.split(path)
        try:
            if parent not in parents:
                real = os.path.join(os.path.realpath(parent), "")
                parents[parent] = real, real.startswith(inside) and _has_links(real)
            real, links = parents[parent]
            if links or name in ("", ".", ".."):
                real = os.path.realpath(path)
        except ValueError:  # a null character
            return True
        return not real.startswith(inside)

    return [number for number, path in enumerate(paths) if leads_out(path)]


def _has_links(folder: str) -> bool:
    try:
        with os.scandir(folder) as entries:
            return any(entry.is_symlink() for entry in entries)
    except OSError:
        return False
