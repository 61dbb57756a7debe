"""Results of fault scenarios: a cell of the table, the outcome of a call, messages of ranks."""

from __future__ import annotations

import ctypes
import itertools
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from benchmarks.faults.forked_ranks import Report
from benchmarks.libraries.c10d import C10dLibrary

HOST = "127.0.0.1"
TIMEOUT = 1.0
LIMIT = 20.0
numbers = itertools.count(1_000_000)
"""Unique numbers for the groups of scenarios."""


@dataclass(frozen=True, slots=True)
class Result:
    """A library's result in a scenario: lateness in seconds, and a few words."""

    late: tuple[float, ...]
    words: str

    def __str__(self) -> str:
        if not self.late:
            return self.words
        middle, most = statistics.median(self.late), max(self.late)
        return f"{1e3 * middle:.0f} / {1e3 * most:.0f} ms, {self.words}"


Scenario = Callable[[C10dLibrary, int], Result]


def counted(words: Iterable[str]) -> str:
    """Return the words with their counts, the most frequent first, then by the alphabet."""
    found = sorted(Counter(words).items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{word} {number}x" for word, number in found)


def outcome_of(library: C10dLibrary, call: Callable[[], object], due: float) -> Report:
    """Return a call's outcome, and how long after `due` it came. Blocks for the call."""
    try:
        call()
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001  (every outcome counts)
        return {"late": time.monotonic() - due, **library.describe(error)}
    return {"late": time.monotonic() - due, "kind": "nothing", "message": "", "failed": None}


def hold(seconds: float) -> None:
    """Hold the GIL for a while, so that no other thread of this process runs Python."""
    ctypes.PyDLL(None).usleep(round(1e6 * seconds))  # PyDLL, unlike CDLL, does not release it


class Mailbox:
    """A connection made before ranks are forked: it carries numbers, and answers back."""

    def __init__(self) -> None:
        self._near, self._far = socket.socketpair()

    def __enter__(self) -> Mailbox:
        return self

    def __exit__(self, *error: object) -> None:
        self._near.close()
        self._far.close()

    def put(self, number: int) -> None:
        """Send a number."""
        self._near.sendall(b"%8d" % number)

    def take(self) -> int:
        """Return the next number; blocks until it is sent."""
        return int(self._far.recv(8))

    def answer(self) -> None:
        """Confirm to the sender that the number has been used."""
        self._far.sendall(b"!")

    def wait_answer(self) -> None:
        """Block until the receiver confirms."""
        self._near.recv(1)
