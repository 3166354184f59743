"""Stopping a run by SIGTERM or SIGUSR1, as job schedulers do before they take a machine away."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from types import FrameType
from typing import Any

from detectron2.utils import comm
from torch.utils.data import DataLoader

from nonlocal_det.data.workers import iterate
from nonlocal_det.errors import Preempted

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Whether this process, or the one that started it, was asked to stop.

    The first signal is a request; a second one ends the process at once, as the signal does by default.
    """

    def __init__(self) -> None:
        self.echo = 0.0  # seconds after a signal in which another one is taken for the same, sent once more
        self._since = 0.0
        # Plain shared memory: a lock could be held by the very code that a signal interrupts.
        self._shared: Any = get_context("spawn").RawValue(ctypes.c_bool, False)
        self._received = False

    def __bool__(self) -> bool:
        return self._received or self._shared.value

    def __getstate__(self) -> Any:
        return self._shared

    def __setstate__(self, shared: Any) -> None:
        self.__init__()
        self._shared = shared

    @contextmanager
    def listening(self, *, pass_on: bool = False, leave: Callable[[], None] | None = None) -> Iterator[None]:
        """Take the signals as requests while the block runs, and forget those from before it.

        Outside of the main thread, which no signal reaches, nothing is done.

        Args:
            pass_on: whether a signal counts in the processes that this object was sent to as well. They must
                not be sent the signal instead: it may reach them by itself, and two mean "at once".
            leave: called by a second signal, before the process ends.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        self._received = False
        if pass_on:
            self._shared.value = False

        def handle(number: int, frame: FrameType | None) -> None:
            if self._received:
                if time.monotonic() - self._since < self.echo:
                    return
                if leave is not None:
                    leave()
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)
            self._received, self._since = True, time.monotonic()
            if pass_on:
                self._shared.value = True

        before = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


class StoppableLoader:
    """Batches of an evaluation, which a request to stop cuts short in all processes.

    A process that was asked to stop does so after its image; the others, which may have another number of
    images, when theirs are done. The iteration then ends by :class:`Preempted` in all of them.

    Args:
        loader: the loader. All processes must iterate over it to its end.
        stop: says whether this process was asked to stop; None never does.
    """

    def __init__(self, loader: DataLoader, stop: StopRequest | None = None) -> None:
        self._loader, self._stop = loader, stop

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in iterate(self._loader):
            yield batch
            if self._stop:
                break
        if any(comm.all_gather(bool(self._stop))):
            raise Preempted("stopped by a signal during an evaluation")
