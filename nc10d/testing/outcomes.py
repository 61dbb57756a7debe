"""What each rank did in a test: it returned, raised, or still runs; with the user's code lines.

A rank makes its Outcome, because only the rank has the frames. `Ranks.run` collects them, and the
error that it raises carries them as a RunReport, from which the pytest plugin writes its text.
"""

from __future__ import annotations

import dis
import functools
import inspect
import linecache
import os
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
"""An error's attribute that names other lines than the traceback does."""
REMARKS = "_nc10d_remarks"
"""An error's attribute with remarks for the Outcome."""
KILLED = object()
"""The outcome's value for a rank that a fault has killed."""
REPORT = "_nc10d_report"
"""An error's attribute that has a RunReport."""


class UserFrame(NamedTuple):
    """A line of the user's code: "test_x.py:12", the function, and the line's text."""

    site: str
    function: str
    text: str


Frames = tuple[UserFrame, ...]


class Outcome(NamedTuple):
    """A task's end on a rank: done or not, the result or error, and where."""

    done: bool
    value: Any
    frames: tuple[UserFrame, ...] = ()
    """The user's frames in the error, outermost first; for a rank that returned, its last line."""
    remarks: tuple[str, ...] = ()
    """Sentences about calls that were not finished, for a failed test's report."""


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
    """Whether the error only echoes another rank's."""


@dataclass(frozen=True)
class RunReport:
    """All ranks' ends, by rank."""

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
    """Return the user's frames in an error's traceback; the innermost frame if there is none."""
    given: tuple[UserFrame, ...] | None = getattr(error, FRAMES, None)
    if given is not None:
        return given
    steps = [*traceback.walk_tb(error.__traceback__)]
    shown = [step for step in steps if _is_shown_frame(step[0])]
    return tuple(_user_frame(frame, line) for frame, line in shown or steps[-1:])


def running_frames(frame: FrameType | None) -> tuple[UserFrame, ...]:
    """Return the user's frames in a running thread, outermost first."""
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


def returning_frames(function: Callable[..., Any], arguments: Sequence[Any]) -> Frames:
    """Return the line in the user's function that a task has returned from.

    The function is the task's own or, where that is nc10d's, the first in the arguments. A function
    with several returns has them all in the site: "test_x.py:12 or 15".
    """
    for called_function in (function, *arguments):
        plain = inspect.unwrap(getattr(called_function, "func", called_function))
        code = getattr(plain, "__code__", None)
        if isinstance(code, CodeType) and is_shown(code.co_filename):
            lines = _return_lines(code)
            site = " or ".join([text_at(code.co_filename, lines[0]), *map(str, lines[1:])])
            only = linecache.getline(code.co_filename, lines[0]) if len(lines) == 1 else ""
            return (UserFrame(site, code.co_name, only.strip()),)
    return ()


@functools.cache
def _return_lines(code: CodeType) -> list[int]:
    returns = [step for step in dis.get_instructions(code) if step.opname.startswith("RETURN_")]
    lines = {step.positions.lineno for step in returns if step.positions is not None}
    return sorted(line for line in lines if line and line != code.co_firstlineno) or [
        code.co_firstlineno
    ]
