"""The meeting of a world's ranks in a store, which may hold keys of other worlds, dead or alive.

The meetings in a store are numbered by the store, never by a process: ranks that have been in
different worlds before find the same meeting. A meeting is open until it has an outcome, which only
the first writer sets; a rank that comes and finds an outcome opens the next meeting.

| a rank | writes | and then |
|---|---|---|
| comes | its mark into its place; an earlier process's mark is overwritten | waits |
| sees all places taken | its consent to exactly these marks | waits |
| gives the last consent | the outcome "met", with a digest of the marks | has met |
| sees "met" with its mark | nothing | has met |
| sees "met" without its mark | nothing | comes to the next meeting |
| sees another mark in its place | the outcome "left" | raises: its rank has come twice |
| comes with another world size | a call; a member's answer makes the outcome "disputed" | raises |
| has no answer to its call | the outcome "left" | comes to the next meeting |
| gives up | after its consent the outcome "left"; "gone" into its place | raises |

Invariants: only live processes consent, so the marks of dead processes delay nobody: the place
waits for the process that replaces them. A rank that has met is in the digest that all have.
Every change that others must see is followed by a wake, a numbered key that all wait for.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable, Sequence

from nc10d.base.deadline import Deadline
from nc10d.base.stored import read_text
from nc10d.base.wait_report import WaitReport
from nc10d.errors import RendezvousError
from nc10d.store.arrival import refused_text, wait_for_keys
from nc10d.store.base import Store
from nc10d.store.prefix import PrefixStore

_MET, _LEFT = "met ", "left"
_GONE = b"gone"
_FIRST_SLICE, _LONGEST_SLICE = 0.02, 1.0
_ANSWER_SECONDS = 1.0
"""The time in which a live member answers; without an answer, only marks of the dead are left."""
_MOST_NAMED = 16
_MOST_DIGITS, _MOST_CALLS = 20, 1000


def meet(
    store: Store,
    rank: int,
    size: int,
    deadline: Deadline,
    limit: float,
    host_left: Callable[[], bool] = lambda: False,
) -> int:
    """Block until all ranks of a world have come; return the number of their meeting in `store`.

    RendezvousError names the ranks that have not come by the deadline (`limit` seconds after the
    call), ranks that disagree on the size, or two processes of one rank. HostLeft once
    `host_left`, which is asked now and then, returns True.
    """
    report = WaitReport(f"rank {rank} of {size}", deadline, f"a world of {size}")
    while True:
        number = _open_meeting(store)
        visit = Visit(PrefixStore(str(number), store), rank, size, report)
        if visit.come(deadline) and visit.wait(deadline, host_left):
            return number


class HostLeft(RendezvousError):
    """The process that hosts the store has left, so no other rank can come there."""


def _open_meeting(store: Store) -> int:
    """Return the number of the open meeting; open the next one if all have ended."""
    before = None
    while (ended := store.add("ended", 0)) != before:
        if not store.check([f"{ended + 1}/outcome"]):
            return ended + 1
        # If another rank is faster, the number has grown as well.
        store.compare_set("ended", str(ended), str(ended + 1))
        before = ended
    raise RendezvousError(f"the store's 'ended' stays {ended}, whatever is written there")


class Visit:
    """A rank's visit to a meeting, whose keys are in `store`."""

    def __init__(self, store: Store, rank: int, size: int, report: WaitReport) -> None:
        self._store, self._rank, self._size, self._report = store, rank, size, report
        self._places = [f"place/{other}" for other in range(size)]
        self._mark = b""
        self._consents: list[str] = []
        self._wakes = self._calls = 0

    def come(self, deadline: Deadline) -> bool:
        """Take this rank's place; return False if the meeting has been left.

        RendezvousError if a live member has another world size.
        """
        store, place = self._store, self._places[self._rank]
        self._wakes, self._calls = store.add("wakes", 0), store.add("calls", 0)
        size = read_text("size", store.compare_set("size", "", str(self._size)), _MOST_DIGITS)
        if size != str(self._size):
            self._dispute(size, deadline)
            return False
        process = f"pid {os.getpid()} on {socket.gethostname()}"
        self._mark = f"{store.add('marks', 1)} {process}".encode()
        before = store.compare_set(place, "", self._mark)
        replaces = before not in (self._mark, _GONE)
        if before != self._mark:
            store.set(place, self._mark)
        # Counted afterwards, so that the last to count finds all places taken.
        if store.add("come", 1) >= self._size or replaces:
            self._wake()
        return True

    def wait(self, deadline: Deadline, host_left: Callable[[], bool]) -> bool:
        """Block until the meeting has an outcome; return whether this rank has met the others.

        False: the rank comes to the next meeting. Raises as `meet`.
        """
        pause, left = _FIRST_SLICE, False
        while not deadline.expired():
            wake = [f"wake/{self._wakes + 1}"]
            if wait_for_keys(self._store, wake, deadline.slice(pause)):
                self._wakes += 1
                outcome = self._look()
                if outcome:
                    return self._has_met(outcome)
            elif host_left():
                left = True
                break
            self._report.look(lambda: self._absence()[0])
            pause = min(2 * pause, _LONGEST_SLICE)
        # The others may have met with this rank: the first outcome decides.
        if self._consents and self._has_met(self._end(_LEFT)):
            return True
        self._store.compare_set(self._places[self._rank], self._mark, _GONE)
        absence, rank = self._absence()
        if left:
            raise HostLeft(absence, rank=rank)
        raise RendezvousError(self._report.timed_out(absence), rank=rank)

    def _look(self) -> str:
        """Answer calls and consent, if that is due; return the meeting's outcome, "" for none."""
        store = self._store
        if store.check(["outcome"]):
            return read_text("outcome", store.get("outcome"))
        calls = store.add("calls", 0)
        for call in range(max(self._calls, calls - _MOST_CALLS) + 1, calls + 1):
            store.set(f"answer/{call}", str(self._rank))
        self._calls = calls
        full = store.check(self._places)
        marks = store.multi_get(self._places if full else [self._places[self._rank]])
        if self._mark not in marks:
            if self._consents:  # the others may have met with this rank: the first outcome decides
                return self._end(_LEFT)
            self._check_place()
        if not full or _GONE in marks:
            return ""
        digest = hashlib.sha256(b"\n".join(marks)).hexdigest()[:32]
        if digest in self._consents:
            return ""
        self._consents.append(digest)
        store.set(f"consent/{digest}/{self._rank}", "")
        last = store.add(f"consents/{digest}", 1) == self._size
        return self._end(f"{_MET}{digest}") if last else ""

    def _check_place(self) -> None:
        """Raise RendezvousError if another process has taken this rank's place."""
        mark = self._store.get(self._places[self._rank])
        if mark != self._mark:
            first, second = (_process(text) for text in (self._mark, mark))
            raise RendezvousError(
                f"rank {self._rank} of {self._size} has come twice, first as {first}, then as "
                f"{second}: the latter takes its place",
                rank=self._rank,
            )

    def _dispute(self, size: str, deadline: Deadline) -> None:
        """Raise RendezvousError if a live member has another world size; else end the meeting."""
        call = self._store.add("calls", 1)
        self._wake()
        answer, outcome = f"answer/{call}", _LEFT
        if wait_for_keys(self._store, [answer], deadline.slice(_ANSWER_SECONDS)):
            member = read_text(answer, self._store.get(answer), _MOST_DIGITS)
            outcome = (
                f"the ranks don't agree on their number: rank {self._rank} was started with a "
                f"world size of {self._size}, rank {member} with {size} (WORLD_SIZE, or the "
                "argument world_size)"
            )
        _check_agreed(self._end(outcome))

    def _end(self, outcome: str) -> str:
        """End the meeting with `outcome`, unless it has ended; return the outcome."""
        first = read_text("outcome", self._store.compare_set("outcome", "", outcome))
        self._wake()
        return first

    def _has_met(self, outcome: str) -> bool:
        """Return whether this rank has met the others.

        RendezvousError after a dispute, or if another process has taken this rank's place.
        """
        _check_agreed(outcome)
        met = outcome.removeprefix(_MET) in self._consents
        if not met:
            self._check_place()
        return met

    def _wake(self) -> None:
        """Make all waiting ranks look; repair an earlier wake whose process died in the act."""
        wake = self._store.add("wakes", 1)
        self._store.multi_set([f"wake/{wake - 1}", f"wake/{wake}"], ["", ""])

    def _absence(self) -> tuple[str, int | None]:
        """Return as text how many ranks have come and which are missing; and the first of these."""
        store, others = self._store, [rank for rank in range(self._size) if rank != self._rank]
        absent = [rank for rank in others if not store.check([self._places[rank]])]
        there = [rank for rank in others if rank not in absent]
        gone = [rank for rank in there if store.get(self._places[rank]) == _GONE]
        consents = {rank: f"consent/{''.join(self._consents[-1:])}/{rank}" for rank in there}
        silent = [rank for rank in there if not (absent or gone or store.check([consents[rank]]))]
        whys = (
            (absent, "missing: ", " (their output says why they did not start, or they use another "
             "address)"),
            (gone, "gave up before: ", ""),
            (silent, "they came, and then did not answer: ", ""),
        )  # fmt: skip
        came = self._size - len(absent) - len(gone)
        inner = PrefixStore("", store)._underlying_non_prefix_store
        parts = [f"{came} of {self._size} ranks came to {inner!r}"]
        parts += [f"{why}{_named(ranks)}{advice}" for ranks, why, advice in whys if ranks]
        missing = next(iter([*absent, *gone, *silent]), None)
        return "; ".join(parts) + refused_text(inner), missing


def _check_agreed(outcome: str) -> None:
    if outcome != _LEFT and not outcome.startswith(_MET):
        raise RendezvousError(outcome)


def _process(mark: bytes) -> str:
    return mark[:400].decode(errors="replace").partition(" ")[2] or "a process that gave up"


def _named(ranks: Sequence[int]) -> str:
    more = "" if len(ranks) <= _MOST_NAMED else f" and {len(ranks) - _MOST_NAMED} more"
    return ", ".join(map(str, ranks[:_MOST_NAMED])) + more
