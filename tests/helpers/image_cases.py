"""Pictures that are larger than they look, and what reading them costs."""

from __future__ import annotations

import multiprocessing
import resource
import struct
import zlib
from pathlib import Path

from nonlocal_det.errors import ImageError


def write_png(path: Path, size: int, rows: int) -> None:
    """Write a black gray PNG that says it is of size x size pixels."""
    packer = zlib.compressobj(1)
    data = b"".join(packer.compress(bytes(1 + size)) for _ in range(rows)) + packer.flush()
    header = struct.pack(">IIBBBBB", size, size, 8, 0, 0, 0, 0)
    content = b"\x89PNG\r\n\x1a\n"
    for name, part in ((b"IHDR", header), (b"IDAT", data), (b"IEND", b"")):
        content += struct.pack(">I", len(part)) + name + part + struct.pack(">I", zlib.crc32(name + part))
    path.write_bytes(content)


def growth(call, *args) -> tuple[str, int]:
    """What a call raises, and the bytes by which it makes a copy of this process grow at most."""

    def measure() -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        try:
            call(*args)
            error = ""
        except ImageError as raised:
            error = str(raised)
        ours.send((error, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)))

    theirs, ours = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=measure)
    process.start()
    process.join(60)
    return theirs.recv()
