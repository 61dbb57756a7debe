"""End a command on Ctrl-C as a shell expects: exit code 130, no traceback."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130
"""The exit code that a shell reports for a command ended by Ctrl-C: 128 + SIGINT."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C under a name of our own.

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
