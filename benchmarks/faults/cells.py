"""What the scenarios of faults share: a cell of the table, how a call ends, who tells whom."""

from __future__ import annotations

import ctypes
import itertools
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.faults.libraries import Library
from benchmarks.faults.stage import Report

HOST = "127.0.0.1"
TIMEOUT = 1.0
LIMIT = 20.0
numbers = itertools.count(1_000_000)
"""Of the groups that scenarios make: each is another one."""


@dataclass(frozen=True, slots=True)
class Cell:
    """What one library did in one scenario: how late, in seconds, and a few words."""

    late: tuple[float, ...]
    words: str

    def __str__(self) -> str:
        if not self.late:
            return self.words
        middle, most = statistics.median(self.late), max(self.late)
        return f"{1e3 * middle:.0f} / {1e3 * most:.0f} ms, {self.words}"


Scenario = Callable[[Library, int], Cell]


def counted(words: Iterable[str]) -> str:
    """Say how often there was each of some words."""
    return ", ".join(f"{word} {number}x" for word, number in Counter(words).most_common())


def told(library: Library, call: Callable[[], object], due: float) -> Report:
    """Return what a call ended with, and how long after it was due."""
    try:
        call()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  (it is what is looked at)
        return {"late": time.monotonic() - due, **library.told(error)}
    return {"late": time.monotonic() - due, "kind": "nothing", "message": "", "failed": None}


def hold(seconds: float) -> None:
    """Hold the GIL for a while: no other thread of this process runs Python."""
    ctypes.PyDLL(None).usleep(round(1e6 * seconds))  # PyDLL, unlike CDLL, does not release it


class Mailbox:
    """A line made before ranks are forked: one tells a number, another takes it and may answer."""

    def __init__(self) -> None:
        self._one, self._other = socket.socketpair()

    def __enter__(self) -> Mailbox:
        return self

    def __exit__(self, *error: object) -> None:
        self._one.close()
        self._other.close()

    def put(self, number: int) -> None:
        """Tell a number, to one who takes it."""
        self._one.sendall(b"%8d" % number)

    def take(self) -> int:
        """Return the number; blocks until it is told."""
        return int(self._other.recv(8))

    def answer(self) -> None:
        """Tell who has put something that it is taken, and used."""
        self._other.sendall(b"!")

    def wait_answer(self) -> None:
        """Block until that is told."""
        self._one.recv(1)
