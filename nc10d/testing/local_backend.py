"""A backend for ranks in one process that assigns NumPy arrays, to test everything above backends.

The backend is simple on purpose. Every launch posts its operations to an exchange that the ranks
share. A collective's last rank computes all ranks' results with `reference` and ends their Works.
There is no thread, no shared memory and no speed. `run_local` runs a function on each rank.
"""

# ruff: noqa: D102  (Backend documents the methods)
from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from nc10d import ops as O
from nc10d.arrays.buffer import as_buffer
from nc10d.arrays.call_info import call_of
from nc10d.arrays.validate import validate
from nc10d.backend.protocol import Backend, BackendSetup
from nc10d.backend.registry import register_backend
from nc10d.base.deadline import Deadline
from nc10d.base.promise import copy_to_raise
from nc10d.base.signal_errors import Condition
from nc10d.base.text import in_seconds
from nc10d.errors import CollectiveMismatch, CollectiveTimeout, GroupClosed
from nc10d.store.base import Store
from nc10d.testing.ranks import Ranks
from nc10d.testing.reference import assign, compute
from nc10d.work import Work

T = TypeVar("T")
_P2P = (O.Send, O.Recv)


class LocalWork(Work):
    """A launch that ends when all its operations have, or fails at its own timeout."""

    __slots__ = ("_deadline", "_exchange", "_left", "_senders")

    def __init__(self, ops: Sequence[O.Op], exchange: LocalExchange, timeout: float) -> None:
        super().__init__(ops)
        self._exchange = exchange
        self._left = len(ops)
        self._senders: list[int | None] = [None] * len(ops)
        self._deadline = Deadline.after(timeout)

    def op_done(self, index: int, sender: int | None = None) -> None:
        """Record an operation's end; the last operation ends the launch."""
        self._senders[index] = sender
        self._left -= 1
        if not self._left:
            self._finish(None, self._senders if len(self._senders) > 1 else sender)

    def _poll(self) -> None:
        if self._deadline.expired():
            call = self._describe()
            self._exchange.fail(
                CollectiveTimeout(
                    f"{call} timed out after {in_seconds(self._deadline.limit)}: not all ranks "
                    "came",
                    op=call,
                )
            )

    def _block(self, deadline: Deadline) -> None:
        super()._block(min(deadline, self._deadline, key=lambda d: d.at))
        self._poll()


class LocalExchange:
    """The pending operations of all ranks in a group."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lock = threading.RLock()
        self.come = Condition(self.lock)
        """Notified about a message, and about the failure."""
        self.failure: BaseException | None = None
        self._collectives: dict[int, dict[int, _PostedOp]] = {}
        self._messages: list[_PostedOp] = []

    def post(self, posted: _PostedOp, seq: int | None) -> None:
        """Add an operation; run its collective or message if it is complete now."""
        if seq is None:
            self._match(posted)
            return
        collective = self._collectives.setdefault(seq, {})
        collective[posted.rank] = posted
        if len(collective) == self.size:
            del self._collectives[seq]
            self._run([collective[rank] for rank in range(self.size)])

    def _run(self, collective: list[_PostedOp]) -> None:
        ops = [posted.op for posted in collective]
        calls = [call_of(op).describe() for op in ops]
        if len(set(calls)) > 1:
            self.fail(CollectiveMismatch(f"the ranks made different calls: {calls}"))
            for posted in collective:
                posted.work._finish(self.failure)
            return
        compute(ops)
        for posted in collective:
            posted.work.op_done(posted.place)

    def _match(self, posted: _PostedOp) -> None:
        for other in self._messages:
            send, recv = (posted, other) if isinstance(posted.op, O.Send) else (other, posted)
            if _matches(send, recv):
                self._messages.remove(other)
                assign(recv.op.x, send.op.x)
                send.work.op_done(send.place)
                recv.work.op_done(recv.place, send.rank)
                return
        self._messages.append(posted)
        self.come.notify_all()

    def probe(self, rank: int, peer: int | None, tag: int | None) -> O.MessageInfo | None:
        """Return the first message to `rank` from a peer with a tag; None stands for any."""
        for send in self._messages:
            op = send.op
            named = peer in (None, send.rank) and isinstance(op, O.Send) and op.peer == rank
            if named and tag in (None, op.tag):
                return O.MessageInfo(send.rank, op.tag, as_buffer(op.x).nbytes)
        return None

    def fail(self, reason: BaseException) -> None:
        """Fail all pending and later operations; the first reason stays."""
        with self.lock:
            self.failure = self.failure or reason
            waiting = [posted for ops in self._collectives.values() for posted in ops.values()]
            waiting += self._messages
            self._collectives.clear()
            self._messages.clear()
            self.come.notify_all()
        for posted in waiting:
            posted.work._finish(self.failure)


class _PostedOp(NamedTuple):
    """A rank's operation, and its place in the launch."""

    rank: int
    op: Any
    work: LocalWork
    place: int


def _matches(send: _PostedOp, recv: _PostedOp) -> bool:
    if not (isinstance(send.op, O.Send) and isinstance(recv.op, O.Recv)):
        return False
    named = recv.op.peer in (None, send.rank) and send.op.peer == recv.rank
    return named and send.op.tag == recv.op.tag


class LocalHub:
    """A job's exchanges, by group name; a local group's `pg_options`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._exchanges: dict[str, LocalExchange] = {}

    def exchange(self, name: str, size: int) -> LocalExchange:
        """Return a group's exchange; the first call makes it."""
        with self._lock:
            return self._exchanges.setdefault(name, LocalExchange(size))


class LocalBackend(Backend):
    """A rank's backend; all ranks in a group share an exchange."""

    name = "local"
    device_type = "cpu"

    def __init__(self, hub: LocalHub, group_name: str, rank: int, size: int) -> None:
        self.hub = hub
        self.rank = rank
        self.size = size
        self.launched: list[Sequence[O.Op]] = []
        self._exchange = hub.exchange(group_name, size)
        self._seq = 0
        self._closed: BaseException | None = None

    def launch(self, ops: Sequence[O.Op], timeout: float, async_op: bool) -> Work | None:
        """Post `ops` to the exchange; without `async_op`, wait until all are done."""
        ops = [validate(op, self.rank, self.size) for op in ops]
        work = LocalWork(ops, self._exchange, timeout)
        with self._exchange.lock:
            failure = self._closed or self._exchange.failure
            if failure is not None:
                raise copy_to_raise(failure)
            self.launched.append(ops)
            for index, op in enumerate(ops):
                self._exchange.post(_PostedOp(self.rank, op, work, index), self._next_seq(op))
        if async_op:
            return work
        work.wait()
        return None

    def probe(self, peer: int | None, tag: int | None, deadline: Deadline) -> O.MessageInfo | None:
        exchange = self._exchange

        def look() -> O.MessageInfo | None:
            failure = self._closed or exchange.failure
            if failure is not None:
                raise copy_to_raise(failure)
            return exchange.probe(self.rank, peer, tag)

        return exchange.come.until(look, deadline)

    def _next_seq(self, op: O.Op) -> int | None:
        """Return a collective's number; None for messages, which match by rank and tag."""
        if isinstance(op, _P2P):
            return None
        self._seq += 1
        return self._seq

    def split(
        self, ranks: Sequence[int], name: str, store: Store, deadline: Deadline, options: Any = None
    ) -> LocalBackend:
        return LocalBackend(self.hub, name, ranks.index(self.rank), len(ranks))

    def abort(self, reason: BaseException) -> None:
        self._exchange.fail(reason)

    def close(self) -> None:
        self._closed = self._closed or GroupClosed("the local backend is closed")


def make(setup: BackendSetup) -> LocalBackend:
    """Make a rank's backend; `options` is the LocalHub that the ranks share."""
    return LocalBackend(setup.options, setup.group_name, setup.rank, setup.size)


def run_local(
    function: Callable[..., T], world_size: int, *columns: Sequence[object], timeout: float = 20.0
) -> list[T]:
    """Call function(group, *row) on each of `world_size` threads; return the results by rank.

    `run_ranks` on this backend: nothing is compiled, and `group` is each rank's default group as
    well. Each column has an entry per rank.
    """
    with Ranks(world_size, "threads", "local", timeout, LocalHub()) as ranks:
        return ranks.run(function, *columns)


register_backend("local", make, ["cpu"], options=(LocalHub,))
