"""How ranks ended, which rank failed first, and the report's text. Pure.

The launcher reports the first rank that fails, with a refinement. A rank that ends with an error
*about another rank* (a lost peer, an abort) is a secondary failure, which is reported only if no
primary failure shows up within `shutdown.CAUSE_WAIT`.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from nc10d.base.call_site import is_users

_ERROR = re.compile(r"^[\w.]+(: |$)")
_FRAME = re.compile(r'^  File "(.+)", line (\d+)')
_TRACEBACK, _INSTALLED = "Traceback (most recent call last):", "-packages/"
_MOST_LINES = 4
"""Lines of an error's message that the report repeats."""
_SECONDARY = re.compile(r"^(nc10d\.errors\.)?(PeerLost|Aborted|GroupClosed)\b")


@dataclass(frozen=True, slots=True)
class Exit:
    """A rank's end. `status` is subprocess's: the exit code, or minus the signal's number.

    `shown`: whether the user has seen the rank's stderr, of which `last_lines` are the end.
    """

    rank: int
    local_rank: int
    host: str
    pid: int
    status: int
    last_lines: tuple[str, ...] = ()
    shown: bool = True

    @property
    def failed(self) -> bool:
        """Whether the rank ended otherwise than with exit code 0."""
        return self.status != 0

    @property
    def exit_code(self) -> int:
        """The code that a shell would show: 128 + the number for a signal."""
        return 128 - self.status if self.status < 0 else self.status


def signal_name(number: int) -> str:
    """Return "SIGTERM" for 15; real-time and unknown signals get their number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def is_secondary(end: Exit) -> bool:
    """Return whether the last error on the rank's stderr is about another rank's failure."""
    at = _error_line(end.last_lines)
    return at is not None and _SECONDARY.match(end.last_lines[at]) is not None


def _error_line(lines: Sequence[str]) -> int | None:
    """Return the index of the last error's first line: the message may span lines."""
    return max((at for at, line in enumerate(lines) if _ERROR.match(line)), default=None)


def cause(lines: Sequence[str]) -> str | None:
    """Return "file:line: error" of the last traceback in `lines`; None if there is none.

    The line is the innermost in the program itself, if there is any, not in a library.
    """
    at = _error_line(lines)
    if at is None:
        return None
    begin = max((n for n, line in enumerate(lines[:at]) if line.startswith(_TRACEBACK)), default=0)
    frames = [found.groups() for line in lines[begin:at] if (found := _FRAME.match(line))]
    if not frames:
        return None
    programs = [frame for frame in frames if is_users(frame[0]) and _INSTALLED not in frame[0]]
    place = ":".join((programs or frames)[-1])
    return "\n".join([f"{place}: {lines[at]}", *lines[at + 1 : at + _MOST_LINES]])


def first_failure(exits: Sequence[Exit]) -> Exit | None:
    """Return the exit to report, from `exits` in time order; None if no rank failed."""
    failures = [end for end in exits if end.failed]
    causes = [end for end in failures if not is_secondary(end)]
    return next(iter(causes or failures), None)


def describe(end: Exit) -> str:
    """Return a line that names the failed rank and how it ended."""
    how = f"exit code {end.status}" if end.status >= 0 else signal_name(-end.status)
    where = f"local rank {end.local_rank}, host {end.host}, pid {end.pid}"
    return f"rank {end.rank} failed with {how} ({where})"


def failure_text(end: Exit) -> str:
    """Return the report of a failure: the rank, how it ended, and why.

    A traceback that the user has seen is not repeated, only its end; else the last lines of the
    rank's stderr follow.
    """
    lines = [f"nc10d-run: {describe(end)}"]
    found = cause(end.last_lines) if end.shown else None
    if found:
        lines.append(f"nc10d-run: {found}")
    elif end.last_lines:
        lines.append("nc10d-run: last lines of its stderr:")
        lines += [f"    {line}" for line in end.last_lines]
    return "\n".join(lines) + "\n"
