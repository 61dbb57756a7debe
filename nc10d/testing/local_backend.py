"""A backend for ranks in one process that moves NumPy arrays by assignment, for testing the rest.

Deliberately simple: every launch leaves its operations in a room that the ranks share; whoever
comes last computes with the oracle in `reference` for all of them and ends their Works. No thread
of its own, no shared memory, no speed. `run_local` runs a function once per rank on it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from nc10d import ops as O
from nc10d.arrays.validate import validate
from nc10d.backend.base import Backend, BackendSetup
from nc10d.backend.registry import register_backend
from nc10d.base.deadline import Deadline
from nc10d.base.outcome import fresh
from nc10d.errors import CollectiveMismatch, CollectiveTimeout, GroupClosed
from nc10d.testing.compute import assign, compute
from nc10d.testing.ranks import Ranks
from nc10d.work import Work

if TYPE_CHECKING:
    from nc10d.store.base import Store

T = TypeVar("T")
_P2P = (O.Send, O.Recv)


class LocalWork(Work):
    """A launch that ends when all of its operations have; fails when its own time is over."""

    __slots__ = ("_deadline", "_left", "_room", "_senders")

    def __init__(self, ops: Sequence[O.Op], room: LocalRoom, timeout: float) -> None:
        super().__init__(ops)
        self._room = room
        self._left = len(ops)
        self._senders: list[int | None] = [None] * len(ops)
        self._deadline = Deadline.after(timeout)

    def one_done(self, place: int, sender: int | None = None) -> None:
        """Take note that one operation is over; the last one ends the launch."""
        self._senders[place] = sender
        self._left -= 1
        if not self._left:
            self._finish(None, self._senders if len(self._senders) > 1 else sender)

    def _poll(self) -> None:
        if self._deadline.expired():
            self._time_out()

    def _block(self, deadline: Deadline) -> None:
        super()._block(min(deadline, self._deadline, key=lambda d: d.at))
        self._poll()

    def _time_out(self) -> None:
        what = self._describe()
        self._room.fail(CollectiveTimeout(f"{what} timed out: not all ranks came", op=what))


class LocalRoom:
    """Where the ranks of one group leave their operations."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.RLock()
        self.failure: BaseException | None = None
        self._meetings: dict[int, dict[int, _Posted]] = {}
        self._mail: list[_Posted] = []

    def post(self, posted: _Posted, seq: int | None) -> None:
        """Leave an operation; run it if it was the last that was missing."""
        if seq is None:
            self._match(posted)
            return
        meeting = self._meetings.setdefault(seq, {})
        meeting[posted.rank] = posted
        if len(meeting) == self.size:
            del self._meetings[seq]
            self._meet([meeting[rank] for rank in range(self.size)])

    def _meet(self, posted: list[_Posted]) -> None:
        ops = [one.op for one in posted]
        if len({type(op) for op in ops}) > 1:
            names = [O.OP_NAMES[type(op)] for op in ops]
            self.fail(CollectiveMismatch(f"the ranks made different calls: {names}"))
            for one in posted:
                one.work._finish(self.failure)
            return
        compute(ops)
        for one in posted:
            one.work.one_done(one.place)

    def _match(self, mine: _Posted) -> None:
        for other in self._mail:
            send, recv = (mine, other) if isinstance(mine.op, O.Send) else (other, mine)
            if _fits(send, recv):
                self._mail.remove(other)
                assign(recv.op.x, send.op.x)
                send.work.one_done(send.place)
                recv.work.one_done(recv.place, send.rank)
                return
        self._mail.append(mine)

    def fail(self, reason: BaseException) -> None:
        """Fail everything that is pending, and all that comes; the first reason stays."""
        with self.lock:
            self.failure = self.failure or reason
            waiting = [one for meeting in self._meetings.values() for one in meeting.values()]
            waiting += self._mail
            self._meetings.clear()
            self._mail.clear()
        for one in waiting:
            one.work._finish(self.failure)


class _Posted:
    """One rank's operation, and its place in the launch that it belongs to."""

    def __init__(self, rank: int, op: Any, work: LocalWork, place: int) -> None:
        self.rank = rank
        self.op = op
        self.work = work
        self.place = place


def _fits(send: _Posted, recv: _Posted) -> bool:
    if not (isinstance(send.op, O.Send) and isinstance(recv.op, O.Recv)):
        return False
    named = recv.op.peer in (None, send.rank) and send.op.peer == recv.rank
    return named and send.op.tag == recv.op.tag


class LocalHub:
    """The rooms of one job, by group name: `pg_options` of a local group."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rooms: dict[str, LocalRoom] = {}
        self.launches = 0

    def room(self, name: str, size: int) -> LocalRoom:
        """Return the room of a group, made for the first who asks."""
        with self._lock:
            return self._rooms.setdefault(name, LocalRoom(size))


class LocalBackend(Backend):
    """One rank's door to a room."""

    name = "local"
    device_type = "cpu"

    def __init__(self, hub: LocalHub, group_name: str, rank: int, size: int) -> None:
        self.hub = hub
        self.rank = rank
        self.size = size
        self.launched: list[Sequence[O.Op]] = []
        self._room = hub.room(group_name, size)
        self._seq = 0
        self._closed: BaseException | None = None

    def launch(self, ops: Sequence[O.Op], timeout: float, async_op: bool) -> Work | None:
        """Leave `ops` in the room; without `async_op`, wait until all are done."""
        for op in ops:
            validate(op, self.rank, self.size)
        work = LocalWork(ops, self._room, timeout)
        with self._room.lock:
            failure = self._closed or self._room.failure
            if failure is not None:
                raise fresh(failure)
            self.launched.append(ops)
            for place, op in enumerate(ops):
                self._room.post(_Posted(self.rank, op, work, place), self._ticket(op))
        if async_op:
            return work
        work.wait()
        return None

    def _ticket(self, op: O.Op) -> int | None:
        """Number the collectives; point-to-point operations meet by rank and tag."""
        if isinstance(op, _P2P):
            return None
        self._seq += 1
        return self._seq

    def split(
        self,
        ranks: Sequence[int],
        name: str,
        store: Store,
        deadline: Deadline,
        options: Any = None,
    ) -> LocalBackend:
        """Make the door to another room."""
        return LocalBackend(self.hub, name, ranks.index(self.rank), len(ranks))

    def abort(self, reason: BaseException) -> None:
        """Fail everything in the room, for every rank."""
        self._room.fail(reason)

    def close(self) -> None:
        """Refuse what comes; what this rank left pending fails everywhere."""
        self._closed = self._closed or GroupClosed("the local backend is closed")


def make(setup: BackendSetup) -> LocalBackend:
    """Make one rank's backend; `options` is the Hub that the ranks share."""
    return LocalBackend(setup.options, setup.group_name, setup.rank, setup.size)


def run_local(
    function: Callable[..., T], world_size: int, *columns: Sequence[Any], timeout: float = 20.0
) -> list[T]:
    """Call function(group, *row) on each of `world_size` threads; return the results by rank.

    `run_ranks` on this backend: nothing is compiled, and `group` is each rank's default group as
    well. Each column has one entry a rank.
    """
    with Ranks(world_size, "threads", "local", timeout, LocalHub()) as ranks:
        return ranks.run(function, *columns)


register_backend("local", make, ["cpu"], options=(LocalHub,))
