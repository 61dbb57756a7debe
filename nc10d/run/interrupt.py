"""Ending on Ctrl-C as a command should: exit code 130 and nothing to read."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130
"""What a shell reports for a command that Ctrl-C ended: 128 + SIGINT."""


class Interrupted(KeyboardInterrupt):
    """Ctrl-C, by a name of our own.

    CPython remembers if a plain KeyboardInterrupt ever passed an exec() of a string (each dataclass
    is one, so any import may be) and then ends by SIGINT, whatever was caught or returned.
    """


def quietly(main: Callable[[], int]) -> int:
    """Return main()'s exit code, or INTERRUPTED if Ctrl-C ended it.

    Only what `main` imports itself is covered, so a command's module should import little else.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it's ignored: let it
        signal.signal(signal.SIGINT, _interrupt)
    try:
        return main()
    except KeyboardInterrupt:
        return INTERRUPTED


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise Interrupted
