"""What each rank of a test did: it returned, raised, or still runs; with lines of the user's code.

A rank makes its Outcome, because only the rank has the frames. `Ranks.run` collects them, and the
error that it raises carries them as a RunReport, from which the pytest plugin writes its text.
"""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

from nc10d.base.call_site import called, text_at
from nc10d.errors import Aborted

_NC10D = f"{Path(__file__).parents[1]}{os.sep}"
_LIBRARY = f"{sysconfig.get_path('stdlib')}{os.sep}"
_SITE = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("purelib", "platlib"))
_TOOLS = tuple(
    f"{site}{name}{os.sep}"
    for site in _SITE
    for name in ("_pytest", "pluggy", "hypothesis", "numba", "numpy", "xdist")
)
FRAMES = "_nc10d_frames"
"""The attribute of an error that names other lines than its traceback does."""
REMARKS = "_nc10d_remarks"
"""The attribute of an error with remarks for its Outcome."""
MOST_CALLS = 8
"""Python calls after which the search for the user's function is given up."""
KILLED = object()
"""The value of a rank's outcome that a fault has killed."""
REPORT = "_nc10d_report"
"""The attribute of an error that has a RunReport."""


class UserFrame(NamedTuple):
    """A line of the user's code: "test_x.py:12", the function, and the line's text."""

    site: str
    function: str
    text: str


class Outcome(NamedTuple):
    """The end of a task on a rank: done or not, its result or error, and where."""

    done: bool
    value: Any
    frames: tuple[UserFrame, ...] = ()
    """The user's frames of the error, outermost first; of a rank that returned, its last line."""
    remarks: tuple[str, ...] = ()
    """Sentences about calls that were not finished, for the report of a failed test."""


class RankEnd(NamedTuple):
    """A rank in a RunReport: `state` is "returned", "raised", "running" or "killed"."""

    state: str
    frames: tuple[UserFrame, ...]
    remarks: tuple[str, ...] = ()
    error: str = ""
    """The error's type."""
    message: str = ""
    causes: tuple[str, ...] = ()
    secondary: bool = False
    """Whether the error is only the echo of another rank's."""


@dataclass(frozen=True)
class RunReport:
    """The ends of all ranks, by rank."""

    kind: str
    ends: Sequence[RankEnd]
    notes: frozenset[str] = frozenset()
    """The notes that `Ranks.run` has added to the error, which the report replaces."""


def rank_end(outcome: Outcome) -> RankEnd:
    """Return the end of a rank that has answered; it keeps neither arrays nor tracebacks alive."""
    if outcome.done:
        state = "killed" if outcome.value is KILLED else "returned"
        return RankEnd(state, outcome.frames, outcome.remarks)
    error = outcome.value
    return RankEnd(
        "raised",
        outcome.frames,
        outcome.remarks,
        type(error).__name__,
        str(error),
        tuple(_causes(error)),
        isinstance(error, Aborted),
    )


def _causes(error: BaseException) -> Iterator[str]:
    known = {str(error)}
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    while cause is not None and str(cause) not in known:
        known.add(str(cause))
        frames = error_frames(cause)
        yield called(f"{type(cause).__name__}: {cause}", frames[-1].site if frames else "")
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def is_shown(name: str) -> bool:
    """Return whether a file's frames are the user's: not nc10d's, Python's or a test tool's."""
    if name.startswith((_NC10D, *_TOOLS, "<frozen")):
        return False
    return not name.startswith(_LIBRARY) or name.startswith(_SITE)


def error_frames(error: BaseException) -> tuple[UserFrame, ...]:
    """Return the user's frames of an error's traceback; the innermost of all if there is none."""
    given: tuple[UserFrame, ...] | None = getattr(error, FRAMES, None)
    if given is not None:
        return given
    steps = [*traceback.walk_tb(error.__traceback__)]
    shown = [step for step in steps if _is_shown_frame(step[0])]
    return tuple(_user_frame(frame, line) for frame, line in shown or steps[-1:])


def running_frames(frame: FrameType | None) -> tuple[UserFrame, ...]:
    """Return the user's frames of a running thread, outermost first."""
    steps = [(f, line) for f, line in traceback.walk_stack(frame) if _is_shown_frame(f)]
    return tuple(_user_frame(frame, line) for frame, line in reversed(steps))


def _is_shown_frame(frame: FrameType) -> bool:
    return is_shown(frame.f_code.co_filename) and not frame.f_locals.get("__tracebackhide__")


def _user_frame(frame: FrameType, line: int) -> UserFrame:
    name = frame.f_code.co_filename
    return UserFrame(
        text_at(name, line),
        frame.f_code.co_name,
        linecache.getline(name, line, frame.f_globals).strip(),
    )


class LastLine:
    """Calls a function and keeps the line that it returned from.

    A finished frame still knows its line. The frame is caught as the function begins, by a profile
    function that is gone before the function's first line. With a profiler at work it is left out.
    """

    def __init__(self) -> None:
        self.frames: tuple[UserFrame, ...] = ()
        self._frame: FrameType | None = None

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return function(*arguments); afterwards `frames` has the line."""
        if sys.getprofile() is not None:
            return function(*arguments)
        sys.setprofile(self._catcher())
        try:
            result = function(*arguments)
        finally:
            sys.setprofile(None)
            frame, self._frame = self._frame, None
        if frame is not None:
            self.frames = (_user_frame(frame, frame.f_lineno),)
            frame.clear()  # the function's arrays and Works end with the function
        return result

    def _catcher(self) -> Callable[[FrameType, str, Any], None]:
        calls = 0

        def catch(frame: FrameType, event: str, _: Any) -> None:
            nonlocal calls
            if event != "call":
                return
            calls += 1
            found = is_shown(frame.f_code.co_filename) and not _is_generator(frame.f_code)
            if found:
                self._frame = frame
            if found or calls == MOST_CALLS:
                sys.setprofile(None)

        return catch


def _is_generator(code: CodeType) -> bool:
    return bool(code.co_flags & (0x20 | 0x80 | 0x200))
