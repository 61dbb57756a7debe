"""Errors of the library's own calls, told apart from those that a signal's handler raises.

A handler runs in the middle of any call and may raise any exception, a TimeoutError or an OSError
as well. Such an exception belongs to the user: it must leave a blocking call as it is. So an except
clause for such types names them by `raised_here`, and `suppress_here` replaces contextlib.suppress.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType, TracebackType
from typing import Any, TypeVar

E = TypeVar("E", bound=BaseException)


def raised_here(*kinds: type[E]) -> tuple[type[E], ...]:
    """Return `kinds` for an except clause; no types if a signal's handler raised the error."""
    return () if from_handler(sys.exc_info()[1]) else kinds


def from_handler(error: BaseException | None) -> bool:
    """Return whether a signal's handler raised `error`, which this frame is handling."""
    # Python calls a handler with the interrupted frame, which no other function gets from its
    # caller.
    trace = None if error is None else error.__traceback__
    while trace is not None and trace.tb_next is not None:
        interrupted, trace = trace.tb_frame, trace.tb_next
        if _has_argument(trace.tb_frame, interrupted):
            return True
    return False


def _has_argument(frame: FrameType, argument: object) -> bool:
    for value in frame.f_locals.values():
        if value is argument or (type(value) is tuple and any(one is argument for one in value)):
            return True
    return False


class Condition(threading.Condition):
    """A condition whose with-block passes on what a signal's handler raises in `wait`.

    Python's own `wait` has moments in which its thread does not hold the lock, and no clean-up of
    its own runs. The block's end can't release the lock then, and would raise that in its place.
    """

    def __exit__(self, *raised: Any) -> None:
        """End the block."""
        try:
            super().__exit__(*raised)
        except RuntimeError:
            if raised[1] is None:
                raise


class Event(threading.Event):
    """An event whose `wait` passes on what a signal's handler raises, as Condition does."""

    def __init__(self) -> None:
        super().__init__()
        self._cond = Condition()


class suppress_here:
    """Suppress errors of some kinds in a with-block, unless a signal's handler raised them."""

    __slots__ = ("_kinds",)

    def __init__(self, *kinds: type[BaseException]) -> None:
        self._kinds = kinds

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        return isinstance(error, self._kinds) and not from_handler(error)
