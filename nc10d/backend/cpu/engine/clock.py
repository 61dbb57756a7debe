"""Deadlines as the engine counts them: nanoseconds of the monotonic clock."""

from __future__ import annotations

from nc10d.base.deadline import Deadline

CENTURIES = 9e9
"""Seconds whose nanoseconds are an int64."""


def deadline_ns(deadline: Deadline) -> int:
    """Return a deadline as the engine has it; 0 for never (or centuries)."""
    return 0 if deadline.at > CENTURIES else int(deadline.at * 1e9)
