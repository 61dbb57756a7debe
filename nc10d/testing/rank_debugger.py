"""`breakpoint()` in a rank that is a process: pdb on the terminal, one rank at a time.

A rank's process has no standard input and is not in the terminal's foreground, so that Ctrl-C
reaches the test's process alone. While a rank's pdb asks, the rank is in the foreground, and other
ranks that come to a breakpoint wait for the terminal.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pdb
import signal
import sys
from collections.abc import Iterator
from types import FrameType, TracebackType

from nc10d.group.world import current_world


class RankDebugger(pdb.Pdb):
    """pdb with a prompt that names the rank."""

    def __init__(self, rank: int) -> None:
        # Open as long as the process: the debugger may ask again at any line.
        keyboard, screen = open("/dev/tty"), open("/dev/tty", "w")  # noqa: SIM115
        super().__init__(stdin=keyboard, stdout=screen, nosigint=True)
        self.prompt = f"(rank {rank}) "
        self._terminal = keyboard.fileno()

    def interaction(
        self, frame: FrameType | None, traceback: TracebackType | None, *rest: object
    ) -> None:
        """Ask, with the terminal to itself."""
        with _foreground(self._terminal):
            super().interaction(frame, traceback, *rest)


@contextlib.contextmanager
def _foreground(terminal: int) -> Iterator[None]:
    fcntl.flock(terminal, fcntl.LOCK_EX)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    before = os.tcgetpgrp(terminal)
    os.tcsetpgrp(terminal, os.getpgrp())
    try:
        yield
    finally:
        os.tcsetpgrp(terminal, before)
        fcntl.flock(terminal, fcntl.LOCK_UN)


def serve_breakpoints() -> None:
    """Let `breakpoint()` of this rank's process ask on the terminal."""

    def ask(*_: object, **__: object) -> None:
        group = current_world().default
        RankDebugger(-1 if group is None else group.rank()).set_trace(sys._getframe(1))

    sys.breakpointhook = ask
