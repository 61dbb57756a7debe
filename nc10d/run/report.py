"""How ranks ended, which rank failed first, and the text of the report. Pure.

The launcher reports the first rank that fails, with a refinement. A rank that ends with an error
*about another rank* (a lost peer, an abort) is a secondary failure. It is reported only if no
primary failure shows up within `shutdown.CAUSE_WAIT`.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

_SECONDARY = re.compile(r"^(nc10d\.errors\.)?(PeerLost|Aborted|GroupClosed)\b")


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of a rank. `status` is subprocess's: the exit code, or minus the signal's number."""

    rank: int
    local_rank: int
    host: str
    pid: int
    status: int
    last_lines: tuple[str, ...] = ()

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
    # A message may span lines; the last line that starts like an error names the error.
    errors = [line for line in end.last_lines if re.match(r"^[\w.]+(: |$)", line)]
    return bool(errors) and _SECONDARY.match(errors[-1]) is not None


def first_failure(exits: Sequence[Exit]) -> Exit | None:
    """Return the exit to report, from `exits` in order of time; None if no rank failed."""
    failures = [end for end in exits if end.failed]
    causes = [end for end in failures if not is_secondary(end)]
    return next(iter(causes or failures), None)


def describe(end: Exit) -> str:
    """Return a line that names the failed rank and how it ended."""
    how = f"exit code {end.status}" if end.status >= 0 else signal_name(-end.status)
    where = f"local rank {end.local_rank}, host {end.host}, pid {end.pid}"
    return f"rank {end.rank} failed with {how} ({where})"


def failure_text(end: Exit) -> str:
    """Return the report of a failure: the rank, how it ended, the last lines of its stderr."""
    lines = [f"nc10d-run: {describe(end)}"]
    if end.last_lines:
        lines.append("nc10d-run: last lines of its stderr:")
        lines += [f"    {line}" for line in end.last_lines]
    return "\n".join(lines) + "\n"
