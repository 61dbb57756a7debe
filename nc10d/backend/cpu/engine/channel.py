"""A channel as Python sees it: one FIFO of programs, in a block that the engine works on.

A group's collectives are one channel; each direction between two ranks is another (a link), with
one end for the sender and one for the receiver. The block lives in private memory; what it points
to is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import get_ident
from typing import Any

import numpy as np
import numpy.typing as npt

from nc10d.backend.cpu.engine import call_sites
from nc10d.backend.cpu.engine.cpu_policy import WaitPolicy
from nc10d.backend.cpu.memory.peer_access import take_back
from nc10d.backend.cpu.native import entry_points, interpreter, prepared_messages, ring, slow_steps
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native import prepared_calls as plain
from nc10d.backend.cpu.program.linker import Linked

Words = npt.NDArray[np.int64]
A_FEW = 4
"""Receives in flight that may be looked at for each call, in the long run."""


@dataclass(frozen=True, slots=True)
class ChannelSpec:
    """The addresses that a channel's programs use: per rank its counter and its two boards.

    Where its programs cross to other hosts, `streams` is what they cross by.
    """

    rank: int
    size: int
    area: int
    counters: Sequence[int]
    boards: tuple[Sequence[int], Sequence[int]]
    kind: int = at.COLLECTIVE
    streams: int = 0
    reach: Words | None = None

    def mates(self) -> list[int]:
        """Return the processes whose memory a program may reach."""
        assert self.reach is not None, "only what can be reached is lent"
        first = (at.R_ARENAS + 8) // 8
        return [int(pid) for pid in self.reach[first :: at.R_ROW // 8] if pid]


class Channel:
    """One FIFO of programs; `address` is its block, for the engine."""

    def __init__(
        self,
        shared: ChannelSpec,
        process: int,
        bell_bit: int,
        waiting: WaitPolicy,
        label: int,
        take_back: Callable[[int, int], None],
    ) -> None:
        self.shared = shared
        self._take_back = take_back
        self.label = label
        """Whose entries in the process's log are this channel's."""
        self.size = shared.size
        self.words: Words = np.zeros(at.channel_bytes(shared.size) // 8, np.int64)
        self.address: int = plain.address(self.words)
        self.broken = False
        self._halted = False
        self.given_up = False
        # Submissions in flight: descriptors and what they point to stay alive by these.
        self.in_flight: dict[int, Submission] = {}
        self._credit = 0
        self._rings: dict[int, Words] = {}
        self._fill(shared, process, bell_bit, waiting)

    def _fill(self, shared: ChannelSpec, process: int, bell_bit: int, waiting: WaitPolicy) -> None:
        fields = {
            at.C_KIND: shared.kind,
            at.C_SIZE: shared.size,
            at.C_RANK: shared.rank,
            at.C_AREA: shared.area,
            at.C_FLAGS: self.address + at.C_TABLES + at.TABLE_COUNTERS * shared.size * 8,
            at.C_SELF: shared.counters[shared.rank],
            at.C_PARITY_STEP: at.TABLE_OTHER * shared.size * 8,
            at.C_BELL_BIT: bell_bit,
            at.C_PROCESS: process,
            at.C_ADVANCE: interpreter.advance_address(),
            at.C_SPIN: waiting.spin,
            at.C_SPIN_NOW: waiting.spin,
            at.C_YIELD: waiting.yields,
            at.C_TRACE_ID: self.address,
            at.C_STREAMS: shared.streams,
            at.C_ARRAY_TYPE: id(np.ndarray),
            at.C_SITES: call_sites.table(),
            at.C_LABEL: self.label,
            at.C_SLOW_STEPS: plain.address(slow_steps.ADDRESS),
            at.C_REACH: 0 if shared.reach is None else plain.address(shared.reach),
        }
        fields[at.C_RING] = self._new_ring(at.RING_SLOTS)
        for offset, value in fields.items():
            self.words[offset // 8] = value
        first = at.C_TABLES // 8
        tables = self.words[first : first + at.TABLE_ROWS * shared.size].reshape(-1, shared.size)
        for half in (0, 1):
            row = at.TABLE_OTHER * half
            tables[row] = shared.boards[half]
            payload = at.LINE_SLOTS + half * at.SLOT_BYTES + at.SLOT_PAYLOAD
            tables[row + at.TABLE_INLINE] = [counter + payload for counter in shared.counters]
        tables[at.TABLE_AGAIN] = shared.boards[0]
        tables[at.TABLE_COUNTERS] = shared.counters

    def get(self, field: int) -> int:
        """Return a word of the block."""
        return int(self.words[field // 8])

    def _new_ring(self, slots: int) -> int:
        """Make a ring; it is kept as long as the channel, since somebody may yet look at it."""
        words: Words = np.zeros(1 + slots, np.int64)
        words[0] = slots - 1
        address = int(plain.address(words))
        self._rings[address] = words
        return address

    def _lengthen(self) -> None:
        """Make room in a full ring, unless another thread has just done so."""
        longer = self._new_ring(2 * (len(self._rings[self.get(at.C_RING)]) - 1))
        if ring.lengthen(self.address, longer) == at.BUSY:
            del self._rings[longer]

    def submit(self, submission: Submission) -> None:
        """Append to the ring."""
        self.reap()
        self.in_flight[submission.address] = submission
        while (answer := entry_points.submit(self.address, submission.address)) != at.DONE:
            self._before(submission, call_sites.learn if answer == at.NEW_SITE else self._lengthen)

    def _before(self, submission: Submission, act: Callable[[], object]) -> None:
        """Do what has to be done before a submission goes into the ring."""
        try:
            act()
        except BaseException:  # Ctrl-C, say: it will not be in the ring
            self._drop(submission)
            raise

    def submit_prepared(
        self, known: int, x: Any, y: Any, keep: Any, deadline_ns: int
    ) -> tuple[int, Submission]:
        """Submit a known operation on plain arrays; a short one is advanced here and now.

        The engine's answer, and the submission: DONE, BUSY if it was not taken, or a failure.
        """
        submission = self._blank(2, keep)
        words = submission.words
        answer = plain.submit_prepared(words, known, deadline_ns, x, y)
        while answer == at.NEW_SITE:
            self._before(submission, call_sites.learn)
            answer = plain.submit_prepared(words, known, deadline_ns, x, y)
        if answer == at.BUSY:
            self._drop(submission)
        return answer, submission

    def submit_message(
        self, model: Submission, x: Any, tag: int, keep: Any, deadline_ns: int, spins: int
    ) -> tuple[int, Submission]:
        """Submit a plain message like `model`; see messages.submit_message for `spins`."""
        submission = self._blank(1, (model, keep))
        end, words, like = self.address, submission.words, model.address
        answer = prepared_messages.submit_message(end, words, like, deadline_ns, x, tag, spins)
        while answer == at.NEW_SITE:
            self._before(submission, call_sites.learn)
            answer = prepared_messages.submit_message(end, words, like, deadline_ns, x, tag, spins)
        if answer == at.BUSY:
            self._drop(submission)
        return answer, submission

    def _blank(self, arrays: int, keep: Any) -> Submission:
        """Return a submission in flight with room for so many arrays, to be filled in."""
        self.reap()
        submission = Submission.__new__(Submission)
        submission.words = words = np.zeros(at.DESCRIPTOR_WORDS + arrays, np.int64)
        submission.address = address = plain.address(words)
        submission.keep = keep
        self.in_flight[address] = submission
        return submission

    def reap(self) -> None:
        """Let the arrays of what has ended go: a Work that was dropped forgets nothing.

        Whoever has seen an operation of the channel end calls this; nobody else would.
        """
        while (one := self._oldest_in_flight()) is not None and one.finished():
            self._drop(one)
        # Receives end in another order than they were posted in: now and then all are looked at.
        self._credit += A_FEW
        if self.shared.kind == at.RECEIVER and self._credit >= len(self.in_flight):
            self._credit = 0
            for one in list(self.in_flight.values()):
                if one.finished():
                    self._drop(one)

    def _oldest_in_flight(self) -> Submission | None:
        """Return what was submitted first of what is known to be in flight."""
        while True:
            try:
                return next(iter(self.in_flight.values()), None)
            except RuntimeError:  # another thread has just changed it
                continue

    def first_descriptor(self) -> int:
        """Return the address of the descriptor at the ring's head."""
        words = self._rings[self.get(at.C_RING)]
        return int(words[1 + (self.get(at.C_HEAD) & int(words[0]))])

    def oldest(self) -> Submission | None:
        """Return the first submission that has not ended."""
        return next((one for one in list(self.in_flight.values()) if not one.finished()), None)

    def forget(self, submission: Submission) -> None:
        """Drop a submission that has ended, and others that have."""
        self._drop(submission)
        if self.in_flight:
            self.reap()

    def _drop(self, submission: Submission) -> None:
        self.in_flight.pop(submission.address, None)

    def stop(self) -> None:
        """Stop for good: nothing touches users' arrays once this has returned, no peer either."""
        while not self._halted and entry_points.break_channel(self.address) == at.BUSY:
            if self.broken:
                return
        self._halted = True  # whatever interrupts this thread from here on: it is done once more
        lent = self.get(at.C_LENT_BYTES)
        if lent:
            if self.get(at.C_LENT) >= 0:
                self._take_back(self.get(at.C_LENT), lent)
            else:
                take_back(self.shared.area, self.shared.mates())
            self.words[at.C_LENT_BYTES // 8] = 0
        self.broken = True
        self.in_flight.clear()

    def held(self) -> bool:
        """Say whether this thread is in the middle of a program that it runs itself."""
        return self.get(at.C_LOCK) == get_ident() and not self.broken

    def give_up(self) -> None:
        """Leave the program that this thread has begun with `run`, if any, unfinished."""
        if self.held():
            self.given_up = True
            self.words[at.C_BROKEN // 8] = at.BROKEN
            entry_points.unlock(self.address)

    def disown(self) -> None:
        """Become unusable in a forked child, whose copy of the block nobody else sees."""
        self.broken = True
        self.words[at.C_BROKEN // 8] = at.BROKEN
        self.words[at.C_LOCK // 8] = 1

    def idle(self) -> bool:
        """Say whether no submission waits or runs."""
        return self.get(at.C_HEAD) == self.get(at.C_TAIL)

    def is_over(self) -> bool:
        """Say whether this is a link from which nobody receives any more."""
        receives = not self.idle() or self.get(at.C_RECEIVING) != 0
        return self.shared.kind == at.RECEIVER and not receives

    def busy(self) -> bool:
        """Say whether anything is under way, in a caller's thread too, or was given up."""
        taken = self.get(at.C_LOCK) != 0 or not self.idle()
        # Whoever stops a channel says that it is broken before taking its lock.
        return self.given_up or (taken and self.get(at.C_BROKEN) != at.BROKEN)


class Submission:
    """A descriptor: one program with the arrays of one launch, and what keeps them alive."""

    __slots__ = ("address", "keep", "words")

    def __init__(
        self,
        linked: Linked,
        addresses: Sequence[int] | Words,
        keep: Any,
        deadline_ns: int = 0,
        message: tuple[int, int, int] = (0, 0, 0),
        gate: int = 0,
    ) -> None:
        room = max(len(addresses), 1)
        self.words: Words = np.zeros(at.DESCRIPTOR_WORDS + room, np.int64)
        self.address: int = plain.address(self.words)
        self.keep = (linked, keep)
        self.words[at.D_PROGRAM // 8] = linked.address
        self.words[at.D_USERS // 8] = self.address + 8 * at.DESCRIPTOR_WORDS
        self.words[at.D_DEADLINE // 8] = deadline_ns
        self.words[at.D_GATE // 8] = gate
        if message != (0, 0, 0):
            self.words[at.D_TAG // 8 : at.D_TAG // 8 + 3] = message
        if len(addresses):
            self.words[at.DESCRIPTOR_WORDS :] = addresses

    def finished(self) -> bool:
        """Say whether it has run to its end."""
        return bool(entry_points.load_word(self.address) & at.FINISHED)

    def watch(self) -> bool:
        """Have the notifier told when it ends; False if it has ended already."""
        return not entry_points.compare_and_swap(self.address, 0, at.WATCHED) & at.FINISHED
