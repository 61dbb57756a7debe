"""The CPU backend: runs a group's operations by programs on shared memory.

The way of a synchronous call is short: find the program for (operation, dtype, count), hand the
array to the engine, done. Everything else is a submission: arrays are resolved and checked, their
addresses written into a descriptor, and a Work follows it.

What a failure does: whoever learns a cause publishes it (causes.py); every wait of every rank
looks at it in slices of 50 ms at the latest, stops its channels and raises the same error.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nc10d.backend.base import BackendSetup
from nc10d.backend.cpu.algorithms.layout import BY_KERNEL, DIRECT, Layout
from nc10d.backend.cpu.area import Areas
from nc10d.backend.cpu.batches import Batches, Fresh, Known
from nc10d.backend.cpu.channel import Channel, Shared, Submission
from nc10d.backend.cpu.forming import check_alive, check_parent, form, withdraw
from nc10d.backend.cpu.fusing import fuse
from nc10d.backend.cpu.gates import FREE, Gates, find_gates
from nc10d.backend.cpu.health import Health, describe
from nc10d.backend.cpu.host import Host, deadline_ns
from nc10d.backend.cpu.linking import Linked
from nc10d.backend.cpu.links import Links
from nc10d.backend.cpu.memory import Resolved, resolve
from nc10d.backend.cpu.native import engine
from nc10d.backend.cpu.native import layout as at
from nc10d.backend.cpu.outside import Outside, reach
from nc10d.backend.cpu.plans import Plans
from nc10d.backend.cpu.post import Late, Post
from nc10d.backend.cpu.requests import Request, request
from nc10d.backend.cpu.strided import straighten
from nc10d.backend.cpu.works import AnySource, CpuWork, Joined, Part
from nc10d.deadline import Deadline
from nc10d.errors import (
    Aborted,
    DistError,
)
from nc10d.ops import Op, Recv, Send
from nc10d.outcome import fresh
from nc10d.store.base import Store
from nc10d.validate import validate
from nc10d.work import Work

WORLD_HALF = 256 * 1024
GROUP_HALF = 32 * 1024
SLICE_NS = engine.SLICE_NS
SLICE = SLICE_NS / 1e9


def make(setup: BackendSetup, host_id: str | None = None) -> CpuBackend:
    """Make the backend of a job's first group; blocks until all of its ranks have come.

    Ranks with the same `host_id` share memory; where it is not given, the kernel tells.
    """
    host = Host(setup.store, setup.rank, setup.size, setup.deadline, host_id)
    name, members = setup.group_name, range(setup.size)

    def check() -> None:
        check_alive(host, name, members)

    try:
        return _made(
            host, name, members, setup.rank, setup.store, WORLD_HALF, setup.deadline, check
        )
    except BaseException:
        host.close()
        raise


def _made(
    host: Host,
    name: str,
    members: Sequence[int],
    rank: int,
    store: Store,
    half: int,
    deadline: Deadline,
    check: Callable[[], None],
) -> CpuBackend:
    areas = form(host, name, members, rank, store, half, deadline, check)
    try:
        outside = reach(host, name, members, areas, store, deadline, check)
    except BaseException:
        withdraw(areas)
        raise
    return CpuBackend(areas, name, members, outside)


class CpuBackend:
    """One group. Methods that block say so."""

    name = "cpu"
    device_type = "cpu"

    def __init__(
        self, areas: Areas, group_name: str, members: Sequence[int], outside: Outside | None
    ) -> None:
        self.host = host = areas.host
        self.group_name = group_name
        self.members = list(members)
        self.areas = areas
        self.outside = outside
        self.rank = rank = areas.number
        self.size = len(members)
        hosts = None if outside is None else outside.hosts
        small = 65536 if self.size <= 2 else 16384
        self.layout = Layout(self.size, rank, areas.half, small, hosts, DIRECT, BY_KERNEL)
        self.channel = host.channel(self._shared())
        self.links = Links(self.areas, outside)
        self.post = Post(self)
        self.plans = Plans(self.layout)
        self.batches = Batches()
        self._run_arrays = engine.run_arrays
        self._address = self.channel.address
        self.health = Health(group_name, self.areas, self.channel, self.links, outside)
        self.ending = threading.RLock()
        self._watched: set[Work] = set()
        host.join(self)

    def _shared(self) -> Shared:
        mates, areas = range(self.areas.size), self.areas
        even, odd = ([areas.board(mate, half) for mate in mates] for half in (0, 1))
        return Shared(
            rank=areas.rank,
            size=areas.size,
            area=areas.address(areas.rank),
            counters=[areas.address(mate) for mate in mates],
            boards=(even, odd),
            streams=0 if self.outside is None else self.outside.streams.address,
            reach=areas.reach(mates, folding=True),
        )

    # -- launching -------------------------------------------------------------------------

    def launch(self, ops: Sequence[Op], timeout: float, async_op: bool) -> Work | None:
        """Run `ops`; see Backend. A known program on plain arrays goes straight in."""
        if len(ops) == 1:
            if not async_op:
                op = ops[0]
                if isinstance(op, (Send, Recv)):
                    if not self.post.quick(op, timeout):
                        self.wait_work(self._launch(ops, timeout))
                    return None
                found = self.plans.quick(op)
                if found is not None:
                    linked, x, y = found
                    try:
                        answer = self._run_arrays(self._address, linked.address, x, y)
                        if answer == at.DONE:
                            return None
                        if answer != at.BUSY:
                            self._go_on(answer, ops, timeout)
                            return None
                    except BaseException:
                        self._let_go(ops)
                        raise
        else:
            batch = self.batches.find(ops)
            if batch is not None:
                return self._launch_batch(ops, batch, timeout, async_op)
        if async_op:
            self.host.need_worker()
            return self._launch_plain(ops, timeout) or self._launch(ops, timeout)
        if any(isinstance(op, (Send, Recv)) for op in ops):
            self.wait_work(self._launch(ops, timeout))
        else:
            self._run(ops, timeout)
        return None

    def _launch_plain(self, ops: Sequence[Op], timeout: float) -> Work | None:
        """Submit a known program on plain arrays; None if there is none, or no room."""
        found = self.plans.quick(ops[0]) if len(ops) == 1 else None
        if found is None:
            return None
        deadline = Deadline.after(timeout)
        linked, x, y = found
        channel = self.channel
        answer, submission = channel.submit_arrays(linked, x, y, ops, deadline_ns(timeout))
        if answer == at.BUSY:
            return None
        if answer < 0 and answer != at.ABORTED:
            self.health.engine_failed(channel, answer)
        return CpuWork(self, ops, [(channel, submission)], deadline)

    def _run(self, ops: Sequence[Op], timeout: float) -> None:
        """Run collectives here and now, or in their turn if the channel is busy."""
        self.health.check()
        for op in ops:
            validate(op, self.rank, self.size)
        wanted = self._joined(ops)
        linked = self.plans.linked(wanted)
        if len(ops) == 1:
            self.plans.remember(ops[0], linked)
        resolved = resolve(wanted)
        table = np.array(resolved.addresses or [0], np.int64)
        if not self._run_here(linked, engine.address(table), ops, timeout):
            part = self._enqueue(linked, resolved, timeout)
            self.wait_work(CpuWork(self, ops, [part], Deadline.after(timeout)))

    def _run_here(self, linked: Linked, table: int, ops: Sequence[Op], timeout: float) -> bool:
        """Run a program on the arrays of a table in this thread; False if the channel is busy."""
        try:
            answer = engine.run(self._address, linked.address, table)
            if answer == at.BUSY:
                return False
            if answer != at.DONE:
                self._go_on(answer, ops, timeout)
        except BaseException:
            self._let_go(ops)
            raise
        return True

    def _let_go(self, ops: Sequence[Op]) -> None:
        """Something (Ctrl-C, say) ended this thread's call: if its program goes on, fail it."""
        if self.channel.held():
            self.channel.give_up()
            self.interrupted(ops)

    def _enqueue(self, linked: Linked, resolved: Resolved, timeout: float) -> Part:
        submission = Submission(linked, resolved.addresses, resolved.keep, deadline_ns(timeout))
        return self.enqueue(self.channel, submission)

    def _launch_batch(
        self, ops: Sequence[Op], batch: Known | Fresh, timeout: float, async_op: bool
    ) -> Work | None:
        """Run all_reduces of plain arrays as one program, here and now if the channel is free."""
        if isinstance(batch, Fresh):
            for op in ops:
                validate(op, self.rank, self.size)
            batch = self.batches.remember(batch, self.plans.linked(self._joined(ops)))
        if not async_op and self._run_here(batch.linked, batch.address, ops, timeout):
            return None
        self.health.check()
        addresses = batch.table[0]
        submission = Submission(batch.linked, addresses, tuple(ops), deadline_ns(timeout))
        part = self.enqueue(self.channel, submission)
        work = CpuWork(self, ops, [part], Deadline.after(timeout))
        if async_op:
            self.host.need_worker()
            return work
        self.wait_work(work)
        return None

    def _joined(
        self, ops: Sequence[Op], gates: Gates | None = None, numbers: Sequence[int] = ()
    ) -> Request:
        requests = [straighten(request(op, self.layout)) for op in ops]
        if len(requests) == 1 and gates is None:
            return requests[0]
        return fuse(requests, self.layout, gates, numbers)

    def wait_work(self, work: Work) -> None:
        """Wait for a synchronous call; an interrupt ends it for the whole group."""
        try:
            work.wait()
        except BaseException:
            if not work.is_completed():
                self.interrupted(work.ops)
            raise

    def interrupted(self, ops: Sequence[Op]) -> None:
        """This thread's call was interrupted: fail the group."""
        name, (seq, _) = describe(ops), self.areas.last_record(self.areas.rank)
        message = f"rank {self.rank} was interrupted in {name} #{seq}"
        self.abort(Aborted(message, rank=self.rank, op=name, seq=seq))

    def _go_on(self, answer: int, ops: Sequence[Op], timeout: float) -> None:
        """Drive a program that this thread has begun to its end, a slice at a time."""
        channel = self.channel
        deadline = Deadline.after(max(0.0, timeout - SLICE))
        while answer == at.BLOCKED and not self.health.trouble(channel, deadline):
            answer = engine.drive(self._address, max(1, int(deadline.slice(SLICE) * 1e9)))
        if answer == at.DONE:
            return
        # Whoever learns of a failure stops the channels: this thread must have left before.
        channel.give_up()
        if answer not in (at.BLOCKED, at.ABORTED):
            self.health.engine_failed(channel, answer)
        failure = self.health.settled(ops, channel, deadline)
        assert failure is not None, f"the engine answered {answer}, but the group has not failed"
        raise fresh(failure) from None  # it was never raised here: once is enough

    def _launch(self, ops: Sequence[Op], timeout: float) -> Work:
        self.health.check()
        for op in ops:
            validate(op, self.rank, self.size)
        deadline, limit = Deadline.after(timeout), deadline_ns(timeout)
        gates = find_gates(ops, self.layout)
        sent = [
            self.post.launch(op, deadline, limit, gates.passage(number) if gates else FREE)
            for number, op in enumerate(ops)
            if isinstance(op, (Send, Recv))
        ]
        numbers = [number for number, op in enumerate(ops) if not isinstance(op, (Send, Recv))]
        works = [self._submit(ops, numbers, gates, deadline, limit)] if numbers else []
        messages = [self._started(work, deadline) for work in sent]
        works += messages
        if len(works) == 1:
            return works[0]
        # A thread waits for one of them at a time; the worker sees to the others.
        self.host.need_worker()
        return Joined(self, ops, works, messages)

    def _submit(
        self,
        ops: Sequence[Op],
        numbers: Sequence[int],
        gates: Gates | None,
        deadline: Deadline,
        limit: int,
    ) -> Work:
        """Append the collectives of a batch to the channel as one submission."""
        mine = [ops[number] for number in numbers]
        wanted = self._joined(mine, gates, numbers)
        linked = self.plans.linked(wanted)
        if len(ops) == 1:
            self.plans.remember(ops[0], linked)
        resolved = resolve(wanted)
        submission = Submission(linked, resolved.addresses, resolved.keep, limit)
        return CpuWork(self, mine, [self.enqueue(self.channel, submission)], deadline)

    def _started(self, work: Work | Late, deadline: Deadline) -> Work:
        """Carry out a receive that has to wait for gates, and then open its own."""
        if isinstance(work, Work):
            return work
        self.host.need_worker()
        for gate in work.passage.waits:
            while not self.post.await_words([(gate, 1)], SLICE):
                failure = self.health.look((), self.channel, deadline)
                if failure is not None:
                    raise fresh(failure)
        started = work.start()
        self.wait_work(started)
        if work.passage.own:
            engine.open_gate(self._address, work.passage.own)
        return started

    def enqueue(self, channel: Channel, submission: Submission) -> Part:
        """Append a submission to a channel; waits for room if its ring is full."""
        while not channel.submit(submission):
            self.make_room(channel, submission)
        return channel, submission

    def make_room(self, channel: Channel, submission: Submission) -> None:
        """Help a full ring along, for a slice; the operation's deadline holds here too."""
        self.health.check()
        limit = int(submission.words[at.D_DEADLINE // 8])
        if limit and time.monotonic_ns() > limit:
            raise fresh(self.health.fail_timeout((), channel))
        oldest = channel.oldest()
        if oldest is None:
            return
        answer = engine.wait(channel.address, oldest.address, SLICE_NS)
        if answer == at.UNMATCHED:
            self.post.absorb(channel)
        elif answer < 0 and answer != at.ABORTED:
            self.health.engine_failed(channel, answer)

    # -- waiting ---------------------------------------------------------------------------

    def wait_part(
        self,
        channel: Channel,
        submission: Submission,
        until: Deadline,
        limit: Deadline,
        ops: Sequence[Op],
    ) -> DistError | None:
        """Block until a submission has ended, or `until`; return the group's failure, if any.

        `limit` is the operation's own deadline: when it passes, the group fails.
        """
        while True:
            slice_ns = max(1, int(until.slice(SLICE) * 1e9))
            answer = engine.wait(channel.address, submission.address, slice_ns)
            if answer == at.FINISHED:
                return None
            if answer == at.UNMATCHED:
                self.post.absorb(channel)
            elif answer < 0 and answer != at.ABORTED:
                self.health.engine_failed(channel, answer)
            failure = self.health.look(ops, channel, limit)
            if failure is not None or until.expired():
                return failure

    def clear_way(self, parts: Sequence[Part]) -> None:
        """Take messages nobody asked for out of the way of receives that are only polled."""
        for channel, _ in parts:
            if channel.shared.kind == at.RECEIVER and channel.get(at.C_UNMATCHED):
                self.post.absorb(channel)

    def watch(self, work: Work) -> None:
        """Have the notifier finish a work that nobody waits for."""
        self._watched.add(work)
        self.host.need_notifier()
        if self.health.closed or not self.host.poke_notifier():
            self.notify()

    def notify(self) -> bool:
        """Finish what has ended; called by the notifier. True: look again, nobody will tell."""
        for work in list(self._watched):
            try:
                work._poll()
            except Exception as error:  # noqa: BLE001  (this work's own; the others go on)
                work._finish(error)
            if work._state != 0:
                self._watched.discard(work)
                work._finish()
        return any(isinstance(work, AnySource) for work in list(self._watched))

    def on_failure(self, address: int, answer: int) -> None:
        """The worker could not go on with one of my channels: say why to everyone."""
        for channel in (self.channel, *self.links.channels()):
            if channel.address == address:
                self.health.engine_failed(channel, answer)

    def failure(self) -> DistError | None:
        """Return why the group has failed on all its ranks, or None."""
        return self.health.failure()

    def abort(self, reason: BaseException) -> None:
        """Fail the group with `reason` on every rank; the first reason wins."""
        self.health.abort(reason)

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return registered memory, which goes back when no array refers to it any more."""
        self.health.check()
        return self.host.arena.lend(nbytes)

    # -- groups ----------------------------------------------------------------------------

    def split(
        self,
        ranks: Sequence[int],
        name: str,
        store: Store,
        deadline: Deadline,
        options: Any = None,
    ) -> CpuBackend:
        """Make the backend of a group of some of my ranks; blocks until they all have come."""
        self.health.check()
        members = [self.members[rank] for rank in ranks]

        def check() -> None:
            check_parent(self, name, members)

        rank = list(ranks).index(self.rank)
        return _made(self.host, name, members, rank, store, GROUP_HALF, deadline, check)

    def close(self) -> None:
        """Leave the group; idempotent. What is still in flight fails with GroupClosed."""
        if not self.health.close():
            return
        self.notify()
        for channel in (self.channel, *self.links.channels()):
            self.host.retire(channel)
        if self.outside is not None:
            self.outside.close()
        withdraw(self.areas, self.links.memory())
        self.host.leave(self)

    def disown(self) -> None:
        """Become unusable in a forked child; what the group owns stays the parent's."""
        self.ending = threading.RLock()
        self.health.disown()
        if self.outside is not None:
            self.outside.disown()

    def __del__(self) -> None:
        health = getattr(self, "health", None)
        if health is not None and not health.closed and os.getpid() == self.host.pid:
            self.close()
