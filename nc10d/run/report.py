"""How ranks ended, which one is to blame, and how that is told: pure, from exits to text.

The first rank that fails is the one reported. One refinement: a rank that ends with an error
*about another rank* (a lost peer, an abort) is a witness, not the cause, if the cause shows up
while the launcher is still settling.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

_WITNESS = re.compile(r"^(nc10d\.errors\.)?(PeerLost|Aborted|GroupClosed)\b")


@dataclass(frozen=True, slots=True)
class Exit:
    """One rank's end. `status` is subprocess's: the exit code, or minus the signal's number."""

    rank: int
    local_rank: int
    host: str
    pid: int
    status: int
    last_lines: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """Say whether the rank ended otherwise than with exit code 0."""
        return self.status != 0

    @property
    def exit_code(self) -> int:
        """The code a shell would show: 128 + the number for a signal."""
        return 128 - self.status if self.status < 0 else self.status


def signal_name(number: int) -> str:
    """Return "SIGTERM" for 15; real-time and unknown signals get their number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def is_witness(end: Exit) -> bool:
    """Say whether the rank's last words are about another rank's failure."""
    words = [line for line in end.last_lines if line.strip()]
    # A message may span lines; what names the error is the last line that starts like one.
    named = [line for line in words if re.match(r"^[\w.]+(: |$)", line)]
    return bool(named) and _WITNESS.match(named[-1]) is not None


def first_failure(exits: Sequence[Exit]) -> Exit | None:
    """Return the exit to report, from `exits` in order of time; None when all went well."""
    failures = [end for end in exits if end.failed]
    causes = [end for end in failures if not is_witness(end)]
    return next(iter(causes or failures), None)


def describe(end: Exit) -> str:
    """Say in one line who ended how."""
    how = f"exit code {end.status}" if end.status >= 0 else signal_name(-end.status)
    where = f"local rank {end.local_rank}, host {end.host}, pid {end.pid}"
    return f"rank {end.rank} failed with {how} ({where})"


def failure_text(end: Exit) -> str:
    """Return the report of one failure: who, how, and the last lines of its stderr."""
    lines = [f"nc10d-run: {describe(end)}"]
    if end.last_lines:
        lines.append("nc10d-run: last lines of its stderr:")
        lines += [f"    {line}" for line in end.last_lines]
    return "\n".join(lines) + "\n"
