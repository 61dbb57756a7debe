"""A channel as Python sees it: a FIFO of programs, in a block that the engine works on.

A group's collectives share a channel. Each direction between two ranks is a link, which has a
channel at the sender's end and another at the receiver's. The block lies in private memory; the
counters and staging buffers that it points to are shared.

    state      holder of C_LOCK          C_BROKEN   the user's arrays, and how the state ends
    usable     none, or the thread that  0          kept until their program is FINISHED, then
               advances the channel                 dropped by the next `reap`
    failed     as if usable              FAILING    kept; a program has failed, `stop` follows
    given up   none, see `give_up`       BROKEN     kept; a call is half done, `stop` follows
    stopping   any; `stop` waits for it  BROKEN     kept
    stopped    the thread in `stop`      BROKEN     dropped; the state is final
    disowned   1, which is no thread     BROKEN     the parent's (a forked child); final

Invariant: `stop` sets C_BROKEN first, then takes the lock, and never unlocks. A thread that
takes the lock looks at C_BROKEN before advancing anything. So once `stop` has the lock, no thread
of this rank runs a step, and once exposed memory is withdrawn, no peer writes there. Only then are
the arrays dropped. progress.py has the states of a usable channel in detail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from nc10d.backend.cpu.engine import call_sites
from nc10d.backend.cpu.engine.cpu_policy import WaitPolicy
from nc10d.backend.cpu.memory.peer_access import withdraw
from nc10d.backend.cpu.native import entry_points, interpreter, ring, slow_steps
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native import prepared_calls as plain
from nc10d.backend.cpu.native.offsets import Words as Words
from nc10d.backend.cpu.native.submitting import CENTURIES
from nc10d.backend.cpu.program.linker import Linked
from nc10d.base.deadline import Deadline
from nc10d.base.signal_errors import thread_ident

_HEAD, _TAIL = at.C_HEAD // 8, at.C_TAIL // 8
BLANKS = 16
"""Descriptors in a block."""
SCANNED_PER_CALL = 4
"""Receives in flight that `reap` looks at for each call, on average."""


def deadline_ns(deadline: Deadline) -> int:
    """Return a deadline for the engine: ns on the monotonic clock, 0 for never."""
    return 0 if deadline.at > CENTURIES else int(deadline.at * 1e9)


@dataclass(frozen=True, slots=True)
class ChannelSpec:
    """The addresses that a channel's programs use; sequences have an entry per rank."""

    # `counters` are addresses of the ranks' counters, `slots` those of both slots in their staging
    # buffers, and `area` is this rank's part in the group's memory. `streams` is the block for the
    # sockets to other hosts, 0 for none. `peer_access` is the block from peer_access.py, if
    # programs access peers' memory directly.

    rank: int
    size: int
    area: int
    counters: Sequence[int]
    slots: tuple[Sequence[int], Sequence[int]]
    kind: int = at.COLLECTIVE
    streams: int = 0
    peer_access: Words | None = None
    cells: int = 0
    """A link's cells, from `counters[0] + LINK_CELLS` on: a power of two."""

    def peer_processes(self) -> list[int]:
        """Return the pids of peers that may write into this rank's private memory."""
        assert self.peer_access is not None, "memory is exposed only through peer access"
        first = (at.R_ARENAS + 8) // 8
        # The pid is 0 for a peer that is a thread in this process.
        return [int(pid) for pid in self.peer_access[first :: at.R_ROW // 8] if pid]


class Channel:
    """One FIFO of programs; `address` is the block, for the engine."""

    def __init__(
        self,
        spec: ChannelSpec,
        rank_block: int,
        bell_bit: int,
        waiting: WaitPolicy,
        label: int,
        make_private: Callable[[int, int], None],
    ) -> None:
        """Make a channel of the rank whose block is at `rank_block`; `bell_bit` is its host rank's.

        `make_private` (offset, bytes) withdraws a piece of this rank's arena from its peers.
        """
        self.spec = spec
        self._make_private = make_private
        self.label = label
        """Marks this channel's entries in the rank's call log."""
        self.size = spec.size
        self.words: Words = np.zeros(at.channel_bytes(spec.size) // 8, np.int64)
        self._view = self.words.data  # a memoryview reads a word three times as fast
        self.address: int = plain.address(self.words)
        self.broken = False
        """Whether the channel is stopped (or disowned): the arrays are dropped."""
        self._lock_taken = False
        self.given_up = False
        """Whether a thread has left a program unfinished."""
        # The engine has only addresses: these references keep descriptors, programs and arrays
        # alive for submissions in flight, also when the user has dropped the Work.
        self.in_flight: dict[int, Submission] = {}
        self._scan_credit = 0
        self._blanks: dict[int, list[tuple[int, Words]]] = {}
        self._rings: dict[int, Words] = {}
        self._fill(spec, rank_block, bell_bit, waiting)

    def _fill(self, spec: ChannelSpec, rank_block: int, bell_bit: int, waiting: WaitPolicy) -> None:
        peer_access = spec.peer_access
        fields = {
            at.C_KIND: spec.kind,
            at.C_SIZE: spec.size,
            at.C_RANK: spec.rank,
            at.C_AREA: spec.area,
            at.C_COUNTERS: self.address + at.C_TABLES + at.TABLE_COUNTERS * spec.size * 8,
            at.C_SELF: spec.counters[spec.rank],
            at.C_PARITY_STEP: at.TABLE_OTHER * spec.size * 8,
            at.C_BELL_BIT: bell_bit,
            at.C_RANK_BLOCK: rank_block,
            at.C_ADVANCE: interpreter.advance_address(),
            at.C_SPIN: waiting.spin,
            at.C_SPIN_NOW: waiting.spin,
            at.C_YIELD: waiting.yields,
            at.C_LAUNCH_YIELDS: waiting.launch_yields if spec.kind == at.COLLECTIVE else 0,
            at.C_STREAMS: spec.streams,
            at.C_ARRAY_TYPE: id(np.ndarray),
            at.C_SITES: call_sites.SITES.address,
            at.C_LABEL: self.label,
            at.C_SLOW_STEPS: plain.address(slow_steps.ADDRESS),
            at.C_REACH: 0 if peer_access is None else plain.address(peer_access),
        }
        fields[at.C_RING] = self._new_ring(at.RING_SLOTS)
        for offset, value in fields.items():
            self.words[offset // 8] = value
        first = at.C_TABLES // 8
        tables = self.words[first : first + at.TABLE_ROWS * spec.size].reshape(-1, spec.size)
        # Rounds alternate between the two slots, so that a rank may fill one while peers still read
        # the other. A small payload travels inline, in the cache line behind the counter.
        for slot in (0, 1):
            row = at.TABLE_OTHER * slot
            tables[row] = spec.slots[slot]
            payload = at.LINE_SLOTS + slot * at.SLOT_BYTES + at.SLOT_PAYLOAD
            tables[row + at.TABLE_INLINE] = [counter + payload for counter in spec.counters]
        tables[at.TABLE_AGAIN] = spec.slots[0]
        if spec.cells:
            cells = spec.counters[0] + at.LINK_CELLS
            self.words[at.C_CELL // 8] = self.words[at.C_CELLS // 8] = cells
            self.words[at.C_CELL_MASK // 8] = spec.cells - 1
            self.words[at.LINK_ROW // 8] = cells + at.CELL_DATA
        tables[at.TABLE_COUNTERS] = spec.counters

    def get(self, field: int) -> int:
        """Return a word from the block."""
        return int(self.words[field // 8])

    def _new_ring(self, slots: int) -> int:
        # Kept as long as the channel: a thread may still read from a ring that was replaced.
        words: Words = np.zeros(1 + slots, np.int64)
        words[0] = slots - 1
        address = int(plain.address(words))
        self._rings[address] = words
        return address

    def _lengthen(self) -> None:
        """Replace a full ring by a ring with twice the length."""
        longer = self._new_ring(2 * (len(self._rings[self.get(at.C_RING)]) - 1))
        if ring.lengthen(self.address, longer) == at.BUSY:  # another thread has just done so
            del self._rings[longer]

    def submit(self, submission: Submission) -> None:
        """Append a submission to the ring; any thread may call, and none blocks for long."""
        # Threads that hold the lock run submissions in ring order.
        self.reap()
        # Before the engine has the address: the worker may begin at once.
        self.in_flight[submission.address] = submission
        while (answer := entry_points.submit(self.address, submission.address)) != at.DONE:
            # The engine has refused the submission: the caller's line is new, or the ring is full.
            self._prepare(submission, call_sites.learn if answer == at.NEW_SITE else self._lengthen)

    def _prepare(self, submission: Submission, act: Callable[[], object]) -> None:
        """Do `act`, after which the engine may take a submission; on an error, drop that."""
        try:
            act()
        except BaseException:  # such as Ctrl-C: the submission never reaches the ring
            self.drop(submission)
            raise

    def blank(self, arrays: int) -> Submission:
        """Return a submission with room for `arrays` addresses, which the engine fills in."""
        # Not by __init__, whose work compiled code does faster for a prepared call. Descriptors are
        # rows of a block: an array for each would cost a small call a tenth of its time.
        rows = self._blanks.setdefault(arrays, [])
        submission = Submission.__new__(Submission)
        try:
            submission.address, submission.words = rows.pop()
        except IndexError:
            block: Words = np.zeros((BLANKS, at.DESCRIPTOR_WORDS + arrays), np.int64)
            start = plain.address(block)
            fresh = [(start + n * block.strides[0], row) for n, row in enumerate(block)]
            submission.address, submission.words = fresh.pop()
            rows += fresh
        submission.keep = None
        return submission

    def learn(self, submission: Submission) -> None:
        """Add the caller's line to the table of call sites; on an error, drop the submission."""
        self._prepare(submission, call_sites.learn)

    def reap(self) -> None:
        """Drop references to ended submissions' arrays."""
        # Launches call this while submissions are in flight: nothing else drops the arrays of a
        # Work that the user has dropped.
        if len(self.in_flight) <= self._view[_TAIL] - self._view[_HEAD]:  # none has ended
            return
        # Collectives and sends end in ring order, so the first are enough.
        load_word, values = entry_points.load_word, self.in_flight.values()
        while True:
            try:
                first = next(iter(values), None)
            except RuntimeError:  # another thread has just changed the dict
                continue
            if first is None or not load_word(first.address) & at.FINISHED:
                break
            self.in_flight.pop(first.address, None)
        # Receives end in any order. A scan of all receives waits until there have been enough calls
        # that each pays for a few looks.
        self._scan_credit += SCANNED_PER_CALL
        if self.spec.kind == at.RECEIVER and self._scan_credit >= len(self.in_flight):
            self._scan_credit = 0
            for submission in list(self.in_flight.values()):
                if submission.finished():
                    self.drop(submission)

    def first_descriptor(self) -> int:
        """Return the address of the descriptor at the ring's head."""
        words = self._rings[self.get(at.C_RING)]
        return int(words[1 + (self.get(at.C_HEAD) & int(words[0]))])

    def oldest(self) -> Submission | None:
        """Return the first submission that has not ended."""
        submissions = list(self.in_flight.values())
        return next((each for each in submissions if not each.finished()), None)

    def forget(self, submission: Submission) -> None:
        """Drop a submission that has ended, and others that have ended."""
        self.drop(submission)
        if self.in_flight:
            self.reap()

    def drop(self, submission: Submission) -> None:
        """Drop the references to a submission that has ended, or that the engine has not taken."""
        self.in_flight.pop(submission.address, None)

    def advance(self) -> None:
        """Run a failed group's submissions whose data have come; waits for peers for a slice."""
        if not self.idle():
            endless = self.blank(0)  # not in the ring: only the failure or the slice ends the wait
            entry_points.wait(self.address, endless.address, entry_points.SLICE_NS)

    def stop(self) -> None:
        """Stop for good; after that, neither this rank nor a peer touches users' arrays. Blocks."""
        # Several threads may call at once, and an interrupted call may be repeated.
        while not self._lock_taken and entry_points.break_channel(self.address) == at.BUSY:
            # Another thread still holds the lock: a thread that leaves, or has stopped the channel.
            if self.broken:
                return
        # Remembered for a call that another thread repeats after Ctrl-C here: the lock is never
        # free again, so that thread could not take it.
        self._lock_taken = True
        exposed = self.get(at.C_WRITABLE_BYTES)
        if exposed:
            # A program was cut short while peers could write into the array.
            if self.get(at.C_WRITABLE) >= 0:  # the array lies in the arena, which peers have mapped
                self._make_private(self.get(at.C_WRITABLE), exposed)
            else:  # in private memory, where peers write through the kernel
                withdraw(self.spec.area, self.spec.peer_processes())
            self.words[at.C_WRITABLE_BYTES // 8] = 0
        self.broken = True
        self.in_flight.clear()

    def held(self) -> bool:
        """Return whether this thread is in the middle of a program that it runs itself."""
        return self.get(at.C_LOCK) == thread_ident() and not self.broken

    def give_up(self) -> None:
        """Leave the program that this thread has begun with `run`, if any, unfinished."""
        if self.held():
            self.given_up = True
            # Before unlocking: no other thread may go on with half a program.
            self.words[at.C_BROKEN // 8] = at.BROKEN
            entry_points.unlock(self.address)

    def disown(self) -> None:
        """Become unusable in a forked child, whose copy of the block no other process sees."""
        self.broken = True
        self.words[at.C_BROKEN // 8] = at.BROKEN
        # The holder's thread does not exist in the child; 1 is no thread, so the lock stays taken.
        self.words[at.C_LOCK // 8] = 1

    def idle(self) -> bool:
        """Return whether no submission waits or runs."""
        return self.get(at.C_HEAD) == self.get(at.C_TAIL)

    def is_over(self) -> bool:
        """Return whether this is a receiving end without a receive under way."""
        receives = not self.idle() or self.get(at.C_RECEIVING) != 0
        return self.spec.kind == at.RECEIVER and not receives

    def busy(self) -> bool:
        """Return whether an operation is under way, or was left unfinished."""
        taken = self.get(at.C_LOCK) != 0 or not self.idle()
        # A stopped channel is locked too: the lock counts only while C_BROKEN is not set.
        return self.given_up or (taken and self.get(at.C_BROKEN) != at.BROKEN)


class Submission:
    """A launch's descriptor: program, addresses, deadline, and objects that keep them valid."""

    # `message` is tag, bytes and dtype code; `gate` is the address of a gate that the engine opens
    # at the end, 0 for none. `address` is the descriptor's.

    __slots__ = ("address", "keep", "words")

    def __init__(
        self,
        linked: Linked,
        addresses: Sequence[int] | Words,
        keep: object,
        deadline_ns: int = 0,
        message: tuple[int, int, int] = (0, 0, 0),
        gate: int = 0,
    ) -> None:
        room = max(len(addresses), 1)
        self.words: Words = np.zeros(at.DESCRIPTOR_WORDS + room, np.int64)
        self.address: int = plain.address(self.words)
        self.keep: object = (linked, keep)
        self.words[at.D_PROGRAM // 8] = linked.address
        self.words[at.D_USERS // 8] = self.address + 8 * at.DESCRIPTOR_WORDS
        self.words[at.D_DEADLINE // 8] = deadline_ns
        self.words[at.D_GATE // 8] = gate
        if message != (0, 0, 0):
            self.words[at.D_TAG // 8 : at.D_TAG // 8 + 3] = message
        if len(addresses):
            self.words[at.DESCRIPTOR_WORDS :] = addresses

    def finished(self) -> bool:
        """Return whether the program has run to its end."""
        return bool(entry_points.load_word(self.address) & at.FINISHED)

    def watch(self) -> bool:
        """Have the engine wake the notifier at the end; return False if the program has ended."""
        # One swap decides between the two: the engine exchanges the same word at the end.
        return not entry_points.compare_and_swap(self.address, 0, at.WATCHED) & at.FINISHED
