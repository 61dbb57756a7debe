"""Point-to-point links: each direction between two ranks has its own link, made at first use.

On a host, the rank that needs a link first allocates the link in its own arena, and stores the
location in the sender's area. If both ends do so at once, the first wins and the other frees that
memory.

One sender's messages arrive in order. A receive takes the first message with the same tag. An
unexpected message (without a matching receive) would block later messages. A rank that waits for a
later message therefore moves the unexpected one into the inbox's queue, for a later receive.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nc10d.arrays.call_info import CallInfo
from nc10d.backend.cpu.algorithms import message
from nc10d.backend.cpu.engine.call_sites import text_in
from nc10d.backend.cpu.engine.channel import Channel, ChannelSpec, Submission
from nc10d.backend.cpu.engine.channels import Channels
from nc10d.backend.cpu.memory.group_memory import GroupMemory
from nc10d.backend.cpu.native import entry_points
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.program.linker import Linked
from nc10d.backend.cpu.program.linker import link as link_program
from nc10d.backend.cpu.program.program import Program, Step
from nc10d.backend.cpu.program.steps import gate, pack, unpack, wait
from nc10d.backend.cpu.transport.remote_group import RemoteGroup

SLOT = 128 * 1024
DIRECT = SLOT + 1
"""Bytes from which a registered message is read in place: more than a staging slot holds."""
LINK_BYTES = at.LINK_STAGING + 2 * SLOT
# Added to the link's offset, in the word in the sender's area: whose arena has the link.
BY_SENDER, BY_RECEIVER = 1, 2


Header = tuple[int, int, int]
"""A message's tag, bytes and dtype code."""


class LinksStopped(Exception):
    """No link can be made: the group has failed or been closed, and its health knows why."""


@dataclass(slots=True)
class UnexpectedMessage:
    """A message that came before a receive with the same tag; `submission` copies the bytes in."""

    tag: int
    dtype: int
    data: npt.NDArray[np.uint8]
    submission: Submission
    site: str


def sender_site(channel: Channel) -> str:
    """Return the source line that sent the message at a link's head; "" if unknown."""
    return text_in(channel.get(at.C_CELL) + at.CELL_SITE)


class Inbox:
    """The receiving end of the link from a sender, and the queue of unexpected messages."""

    # A thread holds the inbox with `with inbox.lock, inbox`; not reentrant.

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.unexpected: deque[UnexpectedMessage] = deque()
        """Changed only by threads that hold the inbox."""
        self.lock = threading.RLock()
        self.in_order = False
        """Whether prepared receives must be posted by the Mailbox (see p2p/receive_queues.py)."""

    def __enter__(self) -> None:
        """Keep other threads from receiving directly, and from posting receives."""
        self._guard(1)
        while self.channel.get(at.C_POSTING):  # a thread that has begun ends in a moment
            time.sleep(0)

    def __exit__(self, *_: object) -> None:
        self._guard(0)

    @property
    def receiving(self) -> bool:
        """Whether a receive runs in the caller's thread, not in the channel's ring."""
        return self.channel.get(at.C_RECEIVING) != 0

    def take_unexpected(self, tag: int) -> UnexpectedMessage | None:
        """Remove and return the oldest queued message with `tag`; the caller holds the inbox."""
        for kept in self.unexpected:
            if kept.tag == tag:
                self.unexpected.remove(kept)
                return kept
        return None

    def keep_in_order(self, in_order: bool) -> None:
        """Send prepared receives to the Mailbox, or let them receive directly again."""
        with self.lock:
            self.in_order = in_order
            self._guard(0)

    def first_unexpected(self, fits: Callable[[int], bool]) -> Header | None:
        """Return the oldest queued message with a fitting tag; the caller holds the inbox."""
        found = (kept for kept in self.unexpected if fits(kept.tag))
        return next(((kept.tag, kept.data.size, kept.dtype) for kept in found), None)

    def _guard(self, holders: int) -> None:
        # The word counts the holder, the queued messages, and `in_order`: while the word is not 0,
        # no thread may receive directly. The word is recomputed on every call, so that a call
        # interrupted by Ctrl-C is repaired by the next holder. The swap is a full fence: either a
        # thread that begins a direct receive sees this word, or this thread sees that receive.
        before = self.channel.get(at.C_GUARD)
        after = holders + len(self.unexpected) + self.in_order
        entry_points.compare_and_swap(self.channel.address + at.C_GUARD, before, after)

    def unmatched(self) -> Header | None:
        """Return (tag, bytes, dtype) of the message at the link's head if no receive matches."""
        # The caller holds the inbox, so no receive is posted meanwhile. But an earlier receive may
        # match and end during this call; then the link has another head, and the result is None.
        channel = self.channel
        # A direct receive that began before the inbox was held takes the message, or gives up soon.
        while self.receiving and channel.get(at.C_UNMATCHED):
            time.sleep(0)
        position = channel.get(at.C_TICKS)
        if self.receiving or not channel.get(at.C_UNMATCHED):
            return None
        first = at.C_MESSAGE_TAG // 8
        tag, nbytes, dtype = (int(word) for word in channel.words[first : first + 3])
        if self._posted(tag) or channel.get(at.C_TICKS) != position:
            return None
        return tag, nbytes, dtype

    def _posted(self, tag: int) -> bool:
        # A copy: other threads remove finished submissions meanwhile.
        posted = list(self.channel.in_flight.values())
        return any(not sub.finished() and int(sub.words[at.D_TAG // 8]) == tag for sub in posted)


class Links:
    """All of a rank's links in a group."""

    def __init__(
        self,
        memory: GroupMemory,
        channels: Channels,
        allocate: Callable[[int], int],
        free: Callable[[int], None],
        remote: RemoteGroup | None = None,
    ) -> None:
        """`allocate` and `free` manage memory in this rank's arena, by offset."""
        self._memory = memory
        self._make_channel = channels.make
        self._allocate, self._free = allocate, free
        self._remote = remote
        self._lock = threading.RLock()
        self._out: dict[int, Channel] = {}
        self._in: dict[int, Inbox] = {}
        self._programs: dict[tuple[bool, int, bool, int, bool], Linked] = {}
        self.sync_sends = os.environ.get("NC10D_SYNC_SENDS") == "1"
        """Whether a send on this host ends only when the receiver has the message."""
        self.owned: list[int] = []
        """The offsets in this rank's arena that links occupy."""
        self._stopped = False

    def to(self, peer: int) -> Channel:
        """Return the sending end of the link to a rank; LinksStopped if none can be made."""
        with self._lock:
            found = self._out.get(peer)
            if found is None:
                found = self._out[peer] = self._connect(self._memory.group_rank, peer)
            return found

    def inbox(self, peer: int) -> Inbox:
        """Return the receiving end of the link from a rank; LinksStopped if none can be made."""
        with self._lock:
            found = self._in.get(peer)
            if found is None:
                found = self._in[peer] = Inbox(self._connect(peer, self._memory.group_rank))
            return found

    def program(
        self, sending: bool, nbytes: int, packed: bool = False, gates: int = 0, away: bool = False
    ) -> Linked:
        """Return the program that moves `nbytes` through a link."""
        # The operands are the message; for a `packed` message, which is a contiguous copy, also the
        # strided array and its shape; and `gates` dependencies to wait for first. `away` selects a
        # link to another host.
        key = (sending, nbytes, packed, gates, away)
        found = self._programs.get(key)
        if found is None:
            call = CallInfo("send" if sending else "recv", count=nbytes)
            users = (3 if packed else 1) + gates
            steps = [*_message(sending, nbytes, packed, range(users - gates, users), away)]
            if sending and self.sync_sends and not away:
                steps.append(wait(message.RECEIVER, 0))
            found = link_program(Program(call, tuple(steps), users), 2, at.C_TABLES, _no_kernel)
            # Sizes may all differ: an unbounded cache would grow with every message.
            if len(self._programs) > 1024:
                self._programs.clear()
            self._programs[key] = found
        return found

    def channels(self) -> list[Channel]:
        """Return the channels of all links made so far."""
        with self._lock:
            return [*self._out.values(), *(inbox.channel for inbox in self._in.values())]

    def stop(self) -> None:
        """Stop all links for good, and let none be made any more."""
        # Under the lock: a link is either made before this and stopped below, or refused.
        with self._lock:
            self._stopped = True
        for channel in self.channels():
            channel.stop()

    def inboxes(self) -> list[Inbox]:
        """Return the inboxes of all incoming links made so far."""
        with self._lock:
            return list(self._in.values())

    def peer_of(self, channel: Channel) -> int | None:
        """Return the rank at the other end of a link."""
        with self._lock:
            ends = [*self._out.items(), *((peer, box.channel) for peer, box in self._in.items())]
        return next((peer for peer, end in ends if end is channel), None)

    def used(self, rank: int) -> list[str]:
        """Return, as texts, the links on which a local rank (an index) passed messages."""
        numbers = self._memory.group_ranks
        sent = [("to", rank, peer, at.LINK_SENT) for peer in range(len(numbers))]
        received = [("from", peer, rank, at.LINK_TAKEN) for peer in range(len(numbers))]
        return [
            f"{direction} rank {numbers[receiver if direction == 'to' else sender]}"
            for direction, sender, receiver, counter in (*sent, *received)
            if (start := self._start(sender, receiver)) and entry_points.load_word(start + counter)
        ]

    def _connect(self, sender: int, receiver: int) -> Channel:
        # A link made after `stop` would never be stopped, and could touch failed calls' arrays.
        if self._stopped:
            raise LinksStopped
        peer = receiver if sender == self._memory.group_rank else sender
        if self._remote is not None and self._remote.has(peer):
            start = self._memory.address(self._memory.rank)
            # Between hosts there is no shared memory: the engine uses the socket of messages.
            spec = self._remote.message_end(peer, start, sending=peer == receiver)
            return self._make_channel(spec)
        numbers = self._memory.group_ranks
        return self._connect_local(numbers.index(sender), numbers.index(receiver))

    def _connect_local(self, sender: int, receiver: int) -> Channel:
        """Make this end of a link on this host; arguments are indices of `GroupMemory.peers`."""
        memory = self._memory
        sending = memory.rank == sender
        start = self._start(sender, receiver)
        if not start:
            self._make(memory.links_word(sender, receiver), sending)
            start = self._start(sender, receiver)
        buffer = start + at.LINK_STAGING
        return self._make_channel(
            ChannelSpec(
                rank=message.SENDER if sending else message.RECEIVER,
                size=2,
                area=memory.address(memory.rank),
                counters=(start + at.LINK_SENT, start + at.LINK_TAKEN),
                slots=((buffer, buffer), (buffer + SLOT, buffer + SLOT)),
                kind=at.SENDER if sending else at.RECEIVER,
                peer_access=memory.peer_access([sender, receiver]),
                cells=at.CELLS,
            )
        )

    def _start(self, sender: int, receiver: int) -> int:
        """Return the address of a link on this host, by indices; 0 if not made yet."""
        location = int(entry_points.load_word(self._memory.links_word(sender, receiver)))
        # Offsets are multiples of 4 at least, so the two lowest bits are free for the owner.
        owner = sender if location & 3 == BY_SENDER else receiver
        return self._memory.arena_base(owner) + (location & ~3) if location else 0

    def _make(self, word: int, sending: bool) -> None:
        """Allocate a link's memory, unless the other end does so first."""
        # Both ends may allocate at once; the swap decides, and the loser uses the winner's memory.
        offset = self._allocate(LINK_BYTES)
        location = offset | (BY_SENDER if sending else BY_RECEIVER)
        if entry_points.compare_and_swap(word, 0, location) != 0:
            self._free(offset)
        else:
            self.owned.append(offset)


def _message(
    sending: bool, nbytes: int, packed: bool, gates: Iterable[int], away: bool
) -> Iterator[Step]:
    yield from (gate(number, 0) for number in gates)
    if sending and packed:
        yield pack(0, 1, 2)
    if away:
        yield from (message.send_away if sending else message.recv_away)(nbytes)
    elif sending:
        yield from message.send(SLOT, nbytes, DIRECT)
    else:
        yield from message.recv(SLOT, nbytes, DIRECT)
    if packed and not sending:
        yield unpack(1, 0, 2)


def _no_kernel(_: object) -> int:
    raise AssertionError("messages need no kernel")
