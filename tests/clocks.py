"""Bounds of time that other work on the machine can't fail.

A busy machine slows some attempts; where the law is broken, all of them are slow. So an upper
bound is asked of one of a few attempts. (A lower bound must hold every time.) Where the law is
only that something ends, there is no bound but a deadline of tens of seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable

TRIES = 5


def soon(bound: float, attempt: Callable[[], float], tries: int = TRIES) -> bool:
    """Say whether one of a few attempts took less than `bound` seconds, by its own account."""
    return any(attempt() < bound for _ in range(tries))


def takes(call: Callable[[], object], least: float, most: float, tries: int = TRIES) -> bool:
    """Say whether call() takes `least` seconds each time, and at most `most` in one of a few."""
    for _ in range(tries):
        began = time.monotonic()
        call()
        took = time.monotonic() - began
        if took < least:
            return False
        if took <= most:
            return True
    return False
