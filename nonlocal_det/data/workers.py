"""The processes that load data, and signals that are meant for the process that they load it for."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_CAN_WAIT = hasattr(signal, "sigtimedwait")  # not on macOS
#: Seconds after which a worker looks for its parent again.
_SECONDS = 5.0


def iterate(loader: DataLoader) -> Iterator[Any]:
    """Return the iterator of a loader, whose workers end by a SIGTERM of this process alone.

    SIGTERM and SIGUSR1 are often sent to all processes of a job. This process needs its workers until it has
    saved or evaluated, and then ends them.

    Args:
        loader: without a ``worker_init_fn``.
    """
    if not (_CAN_WAIT and loader.num_workers):
        return iter(loader)
    loader.worker_init_fn = partial(_heed_parent_alone, os.getpid())
    with _signals_blocked():
        return iter(loader)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block the signals in this thread, and in the processes and threads that it starts meanwhile.

    A worker that blocked them itself would be late: what libraries do after a fork may have started threads,
    and a signal is given to any thread that does not block it.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _heed_parent_alone(parent: int, worker: int) -> None:
    """End a worker, in which the signals are blocked, on SIGTERM from its parent, or without a parent.

    PyTorch's own watch begins late: a worker whose parent was killed before that would stay for ever.
    """

    def wait() -> None:
        while os.getppid() == parent:
            found = signal.sigtimedwait(_STOP_SIGNALS, _SECONDS)
            if found and (found.si_signo, found.si_pid) == (signal.SIGTERM, parent):
                break
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()
