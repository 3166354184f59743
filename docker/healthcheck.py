"""Say whether a container is healthy: a run that hangs writes no log any more.

Healthy (exit code 0) is one whose first process has started, or has written to a log under the output folder,
less than HEALTH_MAX_AGE seconds ago (default 1800). Training logs every 20 iterations, evaluation every few
seconds.

Only the standard library is used, so that a check costs nothing.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

OUTPUT = Path(os.environ.get("HEALTH_OUTPUT", "/workspace/output"))
MAX_AGE = float(os.environ.get("HEALTH_MAX_AGE", "1800"))


def seconds_since_start() -> float:
    """Return the age of the container's first process."""
    fields = (
        Path("/proc/1/stat").read_text().rpartition(")")[2].split()
    )  # after the name, which may be anything
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # after the machine
    return float(Path("/proc/uptime").read_text().split()[0]) - started


def main() -> int:
    """Return the exit code, and print the reason."""
    logs = [*OUTPUT.rglob("log.txt*"), *OUTPUT.rglob("metrics.json")]
    age = min([seconds_since_start(), *(time.time() - path.stat().st_mtime for path in logs)])
    print(f"last sign of life {age:.0f} s ago, {MAX_AGE:.0f} s allowed")
    return int(age > MAX_AGE)


if __name__ == "__main__":
    sys.exit(main())
