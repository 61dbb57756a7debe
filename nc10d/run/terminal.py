"""A terminal of its own for the rank whose output the user watches.

Progress bars ask whether they write to a terminal, and how wide it is. Rank 0 gets a
pseudo-terminal of the same size as the launcher's, in which nothing is translated: what it writes
is what the launcher reads.
"""

from __future__ import annotations

import os
import termios


def open_terminal(like: int) -> tuple[int, int]:
    """Return (the launcher's end, the rank's end) of a terminal as large as `like`."""
    ours, theirs = os.openpty()
    mode = termios.tcgetattr(theirs)
    mode[1] &= ~termios.OPOST  # no "\n" -> "\r\n": the user's terminal does that once
    mode[3] &= ~termios.ECHO
    termios.tcsetattr(theirs, termios.TCSANOW, mode)
    copy_size(like, theirs)
    return ours, theirs


def copy_size(like: int, terminal: int) -> None:
    """Give `terminal` the rows and columns of `like`."""
    termios.tcsetwinsize(terminal, termios.tcgetwinsize(like))
