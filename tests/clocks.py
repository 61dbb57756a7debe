"""Bounds of time that hold on a busy machine too.

A busy machine slows some attempts; broken code slows all of them. So an upper bound must hold in
one of a few attempts, and a lower bound in every attempt. A test that only requires an end has no
bound, only a deadline of tens of seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable

TRIES = 5


def soon(bound: float, attempt: Callable[[], float], tries: int = TRIES) -> bool:
    """Return whether any of `tries` attempts reports less than `bound` seconds."""
    return any(attempt() < bound for _ in range(tries))


def takes(call: Callable[[], object], least: float, most: float, tries: int = TRIES) -> bool:
    """Return whether call() takes `least` seconds or more each time, and once at most `most`."""
    for _ in range(tries):
        began = time.monotonic()
        call()
        took = time.monotonic() - began
        if took < least:
            return False
        if took <= most:
            return True
    return False
