"""Messages that are known already: by kind, peer, dtype and size, for plain arrays.

As program_cache.py for collectives: the same message has passed all checks before, and what
depends on the
very array is looked at by compiled code. A short one goes here and now if nothing is in its way.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from nc10d.arrays import intervals
from nc10d.arrays.arguments import LARGEST_TAG
from nc10d.backend.cpu.engine import call_sites
from nc10d.backend.cpu.engine.clock import deadline_ns
from nc10d.backend.cpu.lowering.prepared import _WORD, PreparedMessage
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native import prepared_calls as plain
from nc10d.backend.cpu.native import prepared_messages
from nc10d.backend.cpu.native.progress import LOOKS
from nc10d.backend.cpu.works import CompletedMessage, CpuWork
from nc10d.base.deadline import Deadline
from nc10d.ops import Op, Recv, Send
from nc10d.work import Work

if TYPE_CHECKING:
    from nc10d.backend.cpu.waiter import Waiter

LIMIT = 1024

Owner = TypeVar("Owner")


class Owned(Generic[Owner]):
    """What an owner has and calls; it is alive while it does."""

    __slots__ = ("_reference",)

    def __init__(self, owner: Owner) -> None:
        self._reference = weakref.ref(owner)

    @property
    def _owner(self) -> Owner:
        owner = self._reference()
        assert owner is not None, "it is the one who calls"
        return owner


class MessageCache(Owned["Waiter"]):
    """The known messages of one rank."""

    def __init__(self, backend: Waiter) -> None:
        super().__init__(backend)
        self._known: dict[tuple[Any, ...], PreparedMessage] = {}
        self.latest: dict[type[Any], dict[int, PreparedMessage]] = {Send: {}, Recv: {}}
        """By kind and peer: the message that was found last, if it is not bulky."""

    def knows(self, op: Send | Recv) -> bool:
        """Say whether a message on an ndarray is known, by this very dtype object."""
        lane = self._known.get((type(op), op.peer, op.x.dtype, op.x.size))
        return lane is not None and lane.dtype is op.x.dtype

    def remember(self, op: Send | Recv, lane: PreparedMessage) -> None:
        """Know a message again that has passed all checks; `lane.model` is its own from now on."""
        if type(op.x) is np.ndarray and op.peer is not None:
            lane.model.words[at.D_ARRAY_DTYPE // _WORD] = id(lane.dtype)
            lane.model.words[at.D_ARRAY_COUNT // _WORD] = op.x.size
            if len(self._known) >= LIMIT:
                self._known.clear()
                for by_peer in self.latest.values():
                    by_peer.clear()
            self._known[type(op), op.peer, op.x.dtype, op.x.size] = lane

    def find(self, op: Send | Recv) -> PreparedMessage | None:
        """Return what is known of a message; it is the latest of its kind then, unless bulky."""
        x = op.x
        if type(x) is not np.ndarray or op.peer is None:
            return None
        lane = self._known.get((type(op), op.peer, x.dtype, x.size))
        # Whoever has a strange tag is told by validate.
        if lane is None or type(op.tag) is not int or not 0 <= op.tag <= LARGEST_TAG:
            return None
        if not lane.bulky:
            self.latest[type(op)][op.peer] = lane
        return lane

    def all_known(self, ops: Sequence[Op]) -> list[tuple[PreparedMessage, Send | Recv]] | None:
        """Return the lanes of messages if all are known and in any order mean the same."""
        known: list[tuple[PreparedMessage, Send | Recv]] = []
        read: set[intervals.Span] = set()
        written: list[intervals.Span] = []
        for op in ops:
            if not isinstance(op, (Send, Recv)) or type(op.x) is not np.ndarray:
                return None
            lane = self.find(op)
            if lane is None or not op.x.flags.carray:
                return None
            known.append((lane, op))
            first = plain.address(op.x)
            span = first, first + op.x.nbytes
            read.add(span) if isinstance(op, Send) else written.append(span)
        return known if intervals.apart([*read, *written]) else None

    def ends(
        self, lane: PreparedMessage, x: Any, tag: int, how_soon: int = prepared_messages.AT_ONCE
    ) -> bool:
        """Send or receive a short message if that ends at once (or soon); else nothing happens."""
        while (
            answer := prepared_messages.try_message(lane.address, x, tag, how_soon)
        ) == at.NEW_SITE:
            call_sites.learn()
        if answer != at.DONE:
            return False
        if lane.channel.flying:
            lane.channel.forget_ended()
        return True

    def start(self, op: Send | Recv, timeout: float, *, here: bool) -> Work | None:
        """Do as `start_on` if the message is known; else None."""
        lane = self.find(op)
        return None if lane is None else self.start_on(lane, op, timeout, here=here)

    def start_on(
        self,
        lane: PreparedMessage,
        op: Send | Recv,
        timeout: float,
        *,
        here: bool,
        how_soon: int = prepared_messages.AT_ONCE,
    ) -> Work | None:
        """Send or receive without waiting; None if that can't be, and then nothing has happened.

        `here`: even a long message is advanced by this thread first, since it will wait for it; not
        a bulky one, which goes beside others. `how_soon` says how soon a short one must end so that
        nothing is submitted.
        """
        if lane.short and op.peer is not None and self.ends(lane, op.x, op.tag, how_soon):
            return CompletedMessage(type(op), op.peer, op.x, op.tag)
        if lane.inbox is None:
            return self._submit(lane, op, timeout, here)
        with lane.inbox.lock, lane.inbox:
            return None if lane.inbox.early else self._submit(lane, op, timeout, here)

    def _submit(
        self, lane: PreparedMessage, op: Send | Recv, timeout: float, here: bool
    ) -> Work | None:
        _ = (
            prepared_messages.submit_message
        )  # compiled now if need be: the deadline is for the peer
        channel, deadline, spins = lane.channel, Deadline.after(timeout), -1
        if lane.small or (here and not lane.bulky):
            spins = LOOKS
        elif lane.near and lane.inbox is None:
            spins = 0  # the peer will read it where it lies: that takes a while
        answer, submission = channel.submit_message(lane.model, op, deadline_ns(deadline), spins)
        if answer == at.BUSY:
            return None
        if answer < 0 and answer != at.ABORTED:
            self._owner.health.engine_failed(channel, answer)
        sender = None if lane.inbox is None else op.peer
        return CpuWork(self._owner, (op,), [(channel, submission)], deadline, sender=sender)
