"""A command's signals: as readable events in the launcher's loop, and Ctrl-C as an exit code."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NoReturn

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INTERRUPTED = 130
"""The exit code that a shell reports for a command ended by Ctrl-C: 128 + SIGINT."""


class SignalPipe:
    """Collects signals while it is open; `fd` is readable when new signals have come.

    `ending` becomes true with the first signal of ENDING or of `more`. A context manager, for the
    main thread only. A SIGHUP that the user chose to ignore (nohup) stays ignored.
    """

    def __init__(self, more: Sequence[int] = ()) -> None:
        self.ending = False
        self._numbers = (*ENDING, *more)
        self._previous: dict[int, Any] = {}
        self._collected: list[int] = []

    def __enter__(self) -> SignalPipe:
        self.fd, self._write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._previous_wakeup = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
        for number in dict.fromkeys((*self._numbers, signal.SIGWINCH)):
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
        self.ending = self.ending or any(number in self._numbers for number in self._collected)

    def take(self) -> list[int]:
        """Return the numbers of the signals that have come, in order, each once; never blocks."""
        self.collect()
        taken, self._collected = self._collected, []
        return taken


def _handle(number: int, frame: FrameType | None) -> None:
    """Do nothing: the interpreter has already written the number to the pipe."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C under our own name.

    CPython remembers whether a plain KeyboardInterrupt ever passed an exec() of a string, and then
    ends by SIGINT even if the exception was caught. Each dataclass runs such an exec(), so any
    import may be the place.
    """


def run_interruptible(main: Callable[[], int]) -> int:
    """Return main()'s exit code, or INTERRUPTED if Ctrl-C ended it. Main thread only.

    Imports before this call are not covered: a command's module should import little at its top.
    """
    # A SIGINT that the parent process ignores stays ignored.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    try:
        return main()
    except KeyboardInterrupt:
        return INTERRUPTED


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise Interrupted
