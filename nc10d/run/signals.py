"""Signals as readable events, so that the launcher's loop waits for them as for anything else."""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalPipe:
    """Collects signals while it is open; `fd` is readable when new signals have come.

    `ending` becomes true with the first signal of ENDING. A context manager, for the main thread
    only. A SIGHUP that the user chose to ignore (nohup) stays ignored.
    """

    def __init__(self) -> None:
        self.ending = False
        self._previous: dict[int, Any] = {}
        self._collected: list[int] = []

    def __enter__(self) -> SignalPipe:
        self.fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._previous_wakeup = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for number in (*ENDING, signal.SIGWINCH):
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._previous[number] = signal.signal(number, _handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_wakeup)
        os.close(self.fd)
        os.close(self._write_fd)

    def collect(self) -> None:
        """Move the signals in the pipe to memory; never blocks."""
        with contextlib.suppress(BlockingIOError):
            self._collected += os.read(self.fd, 1024)
        self.ending = self.ending or any(number in ENDING for number in self._collected)

    def take(self) -> list[int]:
        """Return the numbers of the signals that have come, in order, each once; never blocks."""
        self.collect()
        taken, self._collected = self._collected, []
        return taken


def _handle(number: int, frame: FrameType | None) -> None:
    """Do nothing: the interpreter has already written the number to the pipe."""
