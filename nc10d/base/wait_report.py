"""Words about a long wait for other processes: lines meanwhile, and the text of its time-out.

The lines are warnings of the logger `nc10d`: Python shows them on stderr if a program has set up no
logging. The first comes after three seconds, and each later one when twice the time has passed.

Among a host's ranks that wait for the same subject, one speaks. The first rank whose line is due
takes the role of speaker, and keeps the role until its wait ends. The role is a bound name, which
the kernel frees when the process dies.
"""

from __future__ import annotations

import errno
import math
import os
import socket
from collections.abc import Callable

from nc10d.base.call_site import called, here
from nc10d.base.deadline import Deadline, monotonic
from nc10d.base.run_to_end import import_to_end, off_main
from nc10d.base.text import digest, in_seconds

FIRST_SECONDS = 3.0


class WaitReport:
    """The wait of `waiter` ("rank 1 of 4"), which begins now and ends at `deadline`.

    `subject` is equal on all ranks that wait for the same group or store. The default is the text
    about the missing ranks.
    """

    def __init__(self, waiter: str, deadline: Deadline, subject: str = "") -> None:
        self._waiter, self._begun, self._limit = waiter, monotonic(), deadline.limit
        self._next = self._begun + FIRST_SECONDS
        self._subject = subject
        self._role: socket.socket | None = None
        self._role_name = ""

    def __del__(self) -> None:
        self._leave_role()

    def look(self, missing: Callable[[], str]) -> None:
        """Log a line with `missing()` if a line is due. The caller calls `look` during the wait."""
        now = monotonic()
        if now < self._next:
            return
        waited = now - self._begun
        self._next = now + waited
        reason = missing()
        if not self._take_role(self._subject or reason):
            return
        end = "without a timeout" if math.isinf(self._limit) else f"of {in_seconds(self._limit)}"
        call = called(f"{self._waiter} has waited {in_seconds(waited)} {end}", here())
        # Imported here: most programs never log a line.
        logging = import_to_end("logging")
        logging.getLogger("nc10d").warning("nc10d: %s: %s", call, reason)

    @off_main
    def _take_role(self, subject: str) -> bool:
        """Take the role of speaker for the ranks of the host; return False if it is taken."""
        # A job's ranks on a host have the same parent, as a rule; strangers must not be silenced.
        name = digest(f"{os.getuid()} {os.getppid()} {subject}")
        if self._role is not None and self._role_name == name:
            return True
        self._leave_role()
        try:
            role = self._role = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            role.bind(f"\0nc10d-wait-{name}")
        except OSError as error:  # also where no descriptor is left
            self._leave_role()
            return error.errno != errno.EADDRINUSE
        self._role_name = name
        return True

    def _leave_role(self) -> None:
        if self._role is not None:
            self._role.close()
            self._role = None

    def next_seconds(self) -> float:
        """Return the seconds until the next line is due."""
        return max(0.0, self._next - monotonic())

    def timed_out(self, missing: str) -> str:
        """Return the text of the time-out: the waiter, the time, the line, and `missing`."""
        self._leave_role()
        call = called(f"{self._waiter} timed out after {in_seconds(self._limit)}", here())
        return f"{call}: {missing}"
