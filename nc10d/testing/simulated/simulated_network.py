"""Simulated ranks' network, in virtual time, with the local backend's arithmetic.

A message is under way for a drawn time, and messages between a pair of ranks arrive in order. A
collective is computed when the last rank has come; each rank's call ends a drawn time later. So the
seed decides which of its peers' calls a rank's call meets.
"""

# ruff: noqa: D102  (Backend documents the methods)
from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from nc10d import ops as O
from nc10d.arrays.buffer import as_buffer
from nc10d.arrays.call_info import call_of
from nc10d.base import promise
from nc10d.base.call_site import called, here
from nc10d.base.deadline import Deadline
from nc10d.base.text import RETURNED, in_seconds, join_words
from nc10d.errors import CollectiveMismatch, CollectiveTimeout, PeerLost
from nc10d.group import world
from nc10d.testing.local_backend import LocalExchange, LocalHub, LocalWork, _PostedOp
from nc10d.testing.reference import assign, compute
from nc10d.testing.simulated.faults import Fault, Partition
from nc10d.testing.simulated.posted_ops import calls_text, copied, fits
from nc10d.testing.simulated.survivors import Announcements
from nc10d.testing.simulated.virtual_time import RankTask, Scheduler

LATENCY = 1e-4
"""The mean seconds that a message is under way."""
DETECTION_SECONDS = 5e-3
"""From a rank's death to its peers' errors."""


class SimulatedHub(LocalHub):
    """A simulated job's network; the `pg_options` of its groups."""

    def __init__(
        self, scheduler: Scheduler, seed: int, faults: Sequence[Fault], sync_sends: bool
    ) -> None:
        super().__init__()
        self.sync_sends = sync_sends
        self.scheduler, self._random = scheduler, random.Random(seed)
        self._partitions = [fault for fault in faults if isinstance(fault, Partition)]
        self.worlds: dict[int, world.World] = {}
        self.changed: list[RankTask] = []
        """Tasks that wait for any change in the network."""
        self.waits: dict[int, str] = {}
        """The call in which a rank of the job waits."""
        self.returned: dict[int, str] = {}
        """The line that a rank has returned from."""
        self.dead: dict[int, str] = {}
        self.exchanges: dict[str, SimulatedExchange] = {}
        self.kind_of_exchange: type[SimulatedExchange] = SimulatedExchange

    def exchange(self, name: str, size: int) -> SimulatedExchange:
        found = self.exchanges.get(name)
        if found is None:
            found = self.exchanges[name] = self.kind_of_exchange(size, self)
        return found

    def delay(self, src: int, dst: int) -> float:
        """Return the seconds that a message takes now, from a rank in the job to another."""
        seconds = self._random.expovariate(1 / LATENCY)
        now = self.scheduler.now
        return max(
            [seconds, *(part.blocked_until(src, dst, now) - now for part in self._partitions)]
        )

    @contextlib.contextmanager
    def as_rank(self, rank: int) -> Iterator[None]:
        """Run a rank's callbacks: with its default group, also if this thread waits."""
        ident, worlds = threading.get_ident(), world.own_worlds
        before, waits = worlds.get(ident), ident in promise._waiting_threads
        worlds[ident] = self.worlds[rank]
        promise._waiting_threads.discard(ident)
        try:
            yield
        finally:
            worlds.pop(ident)
            if before is not None:
                worlds[ident] = before
            if waits:
                promise._waiting_threads.add(ident)

    def kill(self, rank: int, why: str) -> None:
        """End a rank, and have its peers learn of it a little later."""
        self.dead[rank] = why
        self.scheduler.kill(rank)
        when = self.scheduler.now + DETECTION_SECONDS
        self.scheduler.at(when, lambda: self._mourn(rank))

    def _mourn(self, rank: int) -> None:
        for exchange in self.exchanges.values():
            places = [place for place, member in exchange.members.items() if member == rank]
            if places:
                exchange.survivors.gone.update(places)
                text = f"rank {places[0]} is lost: {self.dead[rank]}"
                exchange.fail(PeerLost(text, rank=places[0], cause=self.dead[rank]))

    def stuck(self) -> BaseException:
        """Return the error for all waiting ranks, when no rank can go on."""
        waits = [f"rank {rank} waits in {self.waits[rank]}" for rank in sorted(self.waits)]
        gone = [called(f"rank {rank} {RETURNED}", site) for rank, site in self.returned.items()]
        text = f"no rank can go on: {join_words([*waits[:8], *gone[:8]])}"
        if gone:
            return PeerLost(text, rank=next(iter(self.returned)), cause="it has returned")
        return CollectiveMismatch(text, cause="a circle of waits")


class SimulatedExchange(LocalExchange):
    """A group's operations under way; `members` maps the group's ranks to the job's."""

    def __init__(self, size: int, hub: SimulatedHub) -> None:
        super().__init__(size)
        self.hub = hub
        self._arrived: dict[tuple[int, int], float] = {}
        self._calls: dict[int, dict[int, str]] = {}
        self.works: dict[SimulatedWork, None] = {}
        """The unfinished works, in launch order."""
        self.survivors = Announcements(hub.scheduler, hub.delay, hub.changed)
        self.members = self.survivors.members
        self.probes: dict[int, tuple[int | None, int | None]] = {}
        """Peer and tag of the messages that ranks look for, by rank."""

    def announce(self, rank: int, seq: int, op: object) -> None:
        """Compare a rank's collective with those of the ranks that came before."""
        calls = self._calls.setdefault(seq, {})
        calls[rank] = called(call_of(op).describe(), here())
        for other, call in calls.items():
            if call.partition(" at ")[0] != calls[rank].partition(" at ")[0]:
                self.fail(
                    CollectiveMismatch(
                        f"ranks disagree on operation #{seq}: rank {other} called {call}, rank "
                        f"{rank} called {calls[rank]}",
                        rank=rank,
                        seq=seq,
                    )
                )
                return
        if len(calls) == self.size:
            del self._calls[seq]

    def _run(self, collective: list[_PostedOp]) -> None:
        if self.failure is None:
            compute([posted.op for posted in collective])
        for posted in collective:
            source = self.hub._random.choice(list(self.members.values()))
            self._end(posted, self.hub.delay(source, self.members[posted.rank]))

    def _match(self, posted: _PostedOp) -> None:
        if isinstance(posted.op, O.Send):
            sent, pair = copied(posted), (posted.rank, posted.op.peer)
            delay = self.hub.delay(self.members[pair[0]], self.members.get(pair[1], -1))
            now = self.hub.scheduler.now
            when = max(now + delay, self._arrived.get(pair, 0.0))
            self._arrived[pair] = when
            self._later(when - now, lambda: self._arrive(sent))
            if not self.hub.sync_sends:
                self._end(posted, LATENCY)
            return
        for send in self._messages:
            if isinstance(send.op, O.Send) and fits(send, posted):
                self._messages.remove(send)
                self._deliver(send, posted)
                return
        self._messages.append(posted)

    def _arrive(self, send: _PostedOp) -> None:
        for receive in self._messages:
            if isinstance(receive.op, O.Recv) and fits(send, receive):
                self._messages.remove(receive)
                self._deliver(send, receive)
                return
        self._messages.append(send)
        self.hub.scheduler.wake_all(self.hub.changed)  # for probes

    def _deliver(self, send: _PostedOp, receive: _PostedOp) -> None:
        sent, wanted = as_buffer(send.op.x), as_buffer(receive.op.x)
        if (sent.nbytes, sent.dtype) != (wanted.nbytes, wanted.dtype):
            text = f"rank {send.rank} sent {sent.nbytes} bytes of {sent.dtype.label}, but rank "
            text += f"{receive.rank} receives {wanted.nbytes} bytes of {wanted.dtype.label}"
            self.fail(CollectiveMismatch(text, rank=send.rank, op="recv"))
            receive.work._finish(self.failure)
            return
        assign(receive.op.x, send.op.x)
        if self.hub.sync_sends:
            self._end(send)
        self._end(receive, sender=send.rank)

    def _end(self, posted: _PostedOp, seconds: float = 0.0, sender: int | None = None) -> None:
        """End an operation, after some seconds."""
        action = partial(posted.work.op_done, posted.place, sender)
        if seconds:
            self._later(seconds, action)
        else:
            action()

    def _later(self, seconds: float, action: Callable[[], object]) -> None:
        self.hub.scheduler.at(self.hub.scheduler.now + seconds, action)

    def fail(self, reason: BaseException) -> None:
        super().fail(reason)
        for work in [*self.works]:
            work._finish(self.failure)
        self.hub.scheduler.wake_all(self.hub.changed)


class SimulatedWork(LocalWork):
    """A launch whose waits take virtual time."""

    __slots__ = ("call", "hub", "owner", "waiters")

    def __init__(
        self, ops: Sequence[O.Op], exchange: SimulatedExchange, timeout: float, owner: int
    ) -> None:
        super().__init__(ops, exchange, timeout)
        self.hub, self.owner = exchange.hub, owner
        self.call = called(calls_text(ops), here())
        self.waiters: list[RankTask] = []
        exchange.works[self] = None

    def _finish(self, exception: BaseException | None = None, result: Any = None) -> bool:
        self._network.works.pop(self, None)
        with self.hub.as_rank(self.owner):  # callbacks run here
            first = super()._finish(exception, result)
        self.hub.scheduler.wake_all(self.waiters)
        return first

    @property
    def _network(self) -> SimulatedExchange:
        assert isinstance(self._exchange, SimulatedExchange)
        return self._exchange

    def _poll(self) -> None:
        self.hub.scheduler.look()
        super()._poll()

    def _block(self, deadline: Deadline) -> None:
        hub = self.hub
        own = self._deadline.at <= deadline.at
        until = min(deadline.at, self._deadline.at)
        hub.waits[self.owner] = self.call
        try:
            hub.scheduler.wait(lambda: self._state != 0, until, self.waiters, limit=own)
        finally:
            hub.waits.pop(self.owner, None)
        if self._state == 0 and self._deadline.expired():
            text = f"{self.call} timed out after {in_seconds(self._deadline.limit)}"
            self._exchange.fail(CollectiveTimeout(text, op=self._describe()))
