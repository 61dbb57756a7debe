"""Signals as readable events, so that the launcher's loop waits for them like for anything else."""

from __future__ import annotations

import os
import signal
from types import FrameType
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class SignalPipe:
    """Collects signals while it is open; `fd` is readable when some have come.

    A context manager, for the main thread only. A SIGHUP that the user chose to ignore (nohup)
    stays ignored.
    """

    def __init__(self) -> None:
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> SignalPipe:
        self.fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._previous_wakeup = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for number in (*ENDING, signal.SIGWINCH):
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._previous[number] = signal.signal(number, _note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_wakeup)
        os.close(self.fd)
        os.close(self._write_fd)

    def take(self) -> list[int]:
        """Return the numbers of the signals that have come, in order; never blocks."""
        try:
            return list(os.read(self.fd, 1024))
        except BlockingIOError:
            return []


def _note(number: int, frame: FrameType | None) -> None:
    """Do nothing: the interpreter has already written the number to the pipe."""
