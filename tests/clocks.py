"""Bounds of time that do not fail because of other work on the machine.

A busy machine slows some attempts; if the law is broken, all attempts are slow. So at least one of
a few attempts must keep an upper bound. A lower bound must hold every time. Where the law is only
that a call ends, a deadline of tens of seconds is its only bound.
"""

import time
from collections.abc import Callable

TRIES = 5


def soon(bound: float, attempt: Callable[[], float], tries: int = TRIES) -> bool:
    """Return whether an attempt of a few took less than `bound` seconds, by its own measure."""
    return any(attempt() < bound for _ in range(tries))


def takes(call: Callable[[], object], least: float, most: float, tries: int = TRIES) -> bool:
    """Return whether call() takes at least `least` seconds each time, and at most `most` once."""
    for _ in range(tries):
        began = time.monotonic()
        call()
        took = time.monotonic() - began
        if took < least:
            return False
        if took <= most:
            return True
    return False


def until(met: Callable[[], object]) -> None:
    """Poll until met() is true; AssertionError after a minute."""
    end = time.monotonic() + 60
    while not met():
        assert time.monotonic() < end, "not met within a minute"
