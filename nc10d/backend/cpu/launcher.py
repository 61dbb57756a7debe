"""Launching: from operations to programs that run.

The way of a synchronous call is short: find the program for (operation, dtype, count), hand the
array to the engine, done. Everything else is a submission: arrays are resolved and checked, their
addresses written into a descriptor, and a Work follows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nc10d.arrays.validate import validate
from nc10d.backend.cpu.algorithms.group_shape import GroupShape
from nc10d.backend.cpu.engine import call_sites
from nc10d.backend.cpu.engine.channel import Channel, Submission
from nc10d.backend.cpu.engine.clock import deadline_ns
from nc10d.backend.cpu.lowering.fuse import fuse
from nc10d.backend.cpu.lowering.lower import LoweredOp, request
from nc10d.backend.cpu.lowering.ordering import FREE, BatchDependencies, find_gates
from nc10d.backend.cpu.lowering.prepared import NewBatch, Prepared, PreparedBatch
from nc10d.backend.cpu.lowering.program_cache import BatchCache, ProgramCache
from nc10d.backend.cpu.lowering.strided import Operands, resolve, straighten
from nc10d.backend.cpu.native import entry_points
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native import prepared_calls as plain
from nc10d.backend.cpu.native import prepared_messages as messages
from nc10d.backend.cpu.p2p.mailbox import DeferredReceive
from nc10d.backend.cpu.program.linker import Linked
from nc10d.backend.cpu.waiter import LOOK, SLICE, Waiter
from nc10d.backend.cpu.works import CombinedWork, CompletedMessage, CpuWork, Part
from nc10d.base.deadline import Deadline
from nc10d.base.outcome import fresh
from nc10d.ops import Op, Recv, Send
from nc10d.work import Work


class OpLauncher(Waiter):
    """The part of a group's backend that launches operations."""

    size: int
    layout: GroupShape
    channel: Channel
    plans: ProgramCache
    batches: BatchCache
    latest: Mapping[type[Any], Mapping[Any, Prepared]]
    """By type of operation and what it has besides arrays: what was found for it last."""
    _address: int

    def launch(self, ops: Sequence[Op], timeout: float, async_op: bool) -> Work | None:
        """Run `ops`; see Backend."""
        if len(ops) == 1:
            return self.launch_one(ops[0], timeout, async_op)
        batch = self.batches.find(ops)
        if batch is not None:
            return self._launch_batch(ops, batch, timeout, async_op)
        works = self.quick_batch(ops, timeout) if async_op else None
        if works is not None:
            return CombinedWork(self, ops, works, works)
        return self._launch_any(ops, timeout, async_op)

    def quick(self, known: Prepared, x: Any, y: Any, timeout: float) -> bool:
        """Run a known operation or message here and now; False: nothing has happened."""
        try:
            return self.finish(known, known.run(known.words, x, y), x, y, timeout)
        except BaseException:
            self.let_go(known, x, y)
            raise

    def finish(self, known: Prepared, answer: int, x: Any, y: Any, timeout: float) -> bool:
        """See to what is left of an operation after `known.run`; see HotBackend."""
        while answer == at.NEW_SITE:
            call_sites.learn()
            answer = known.run(known.words, x, y)
        if answer == at.BUSY:
            return False
        if answer != at.DONE:
            try:
                self._go_on(known.channel, answer, known.ops(x, y), timeout)
            finally:
                known.end()
        if known.flying:
            known.channel.forget_ended()
        return True

    def let_go(self, known: Prepared, x: Any, y: Any) -> None:
        """Something (Ctrl-C, say) ended a call in the middle; see HotBackend."""
        self._let_go(known.channel, known.ops(x, y))

    def _streaming(self) -> bool:
        """Say whether messages between hosts are under way."""
        return any(link.shared.streams and not link.idle() for link in self.links.channels())

    def quick_start(self, kind: type[Send | Recv], peer: int, x: Any, tag: int) -> Work | None:
        """Send or receive as the latest message if that ends at once; else None, nothing done."""
        lane = self.post.lanes.latest[kind].get(peer)
        if lane is None or not lane.short or not self.post.lanes.ends(lane, x, tag):
            return None
        return CompletedMessage(kind, peer, x, tag)

    def quick_batch(self, ops: Sequence[Op], timeout: float) -> list[Work] | None:
        """Start messages, all of them known; None, and none is started, for any others.

        Sends go first, since peers may wait for them.
        """
        known = self.post.lanes.all_known(ops)
        if known is None:
            return None
        self.host.need_worker()
        works: dict[int, Work] = {}
        for kind, how_soon in ((Send, messages.AT_ONCE), (Recv, messages.SOON)):
            for number, (lane, op) in enumerate(known):
                if isinstance(op, kind):
                    start = self.post.lanes.start_on
                    work = start(lane, op, timeout, here=False, how_soon=how_soon)
                    works[number] = work or self._launch((op,), timeout)
        return [works[number] for number in range(len(ops))]

    def launch_one(self, op: Op, timeout: float, async_op: bool) -> Work | None:
        """Run one operation; if it is known, its arrays plain and nothing in its way, at once."""
        if async_op:
            return self._start(op, timeout) or self._launch_any((op,), timeout, async_op)
        if isinstance(op, (Send, Recv)):
            self._message_now(op, timeout)
            return None
        found = self.plans.find(op)
        done = found is not None and self.quick(*found, timeout)
        return None if done else self._launch_any((op,), timeout, async_op)

    def _message_now(self, op: Send | Recv, timeout: float) -> None:
        """Send or receive, and wait; a known message in its turn if not at once."""
        lane = self.post.lanes.find(op)
        # Of several long ones between hosts, one thread moves all best.
        alone = lane is not None and not (lane.bulky and self._streaming())
        if lane is not None and alone and self.quick(lane, op.x, op.tag, timeout):
            return
        try:
            work = self.post.lanes.start(op, timeout, here=True) if lane is not None else None
            work = work or self._launch((op,), timeout)
        except KeyboardInterrupt:  # it may be under way
            self.interrupted((op,))
            raise
        self.wait_work(work)

    def _launch_any(self, ops: Sequence[Op], timeout: float, async_op: bool) -> Work | None:
        """Run what is not known, checked first."""
        if async_op:
            self.host.need_worker()
            return self._launch(ops, timeout)
        if any(isinstance(op, (Send, Recv)) for op in ops):
            try:
                work = self._launch(ops, timeout)
            except KeyboardInterrupt:  # some of them may be under way
                self.interrupted(ops)
                raise
            self.wait_work(work)
        else:
            self._run(ops, timeout)
        return None

    def _start(self, op: Op, timeout: float) -> Work | None:
        """Submit a known operation on plain arrays; None if it is not known, or has no room."""
        self.host.need_worker()
        if isinstance(op, (Send, Recv)):
            return self.post.lanes.start(op, timeout, here=False)
        found = self.plans.find(op)
        if found is None:
            return None
        _ = plain.submit_known  # compiled now if need be: the deadline is for the peers
        deadline = Deadline.after(timeout)
        known, x, y = found
        channel, keep = self.channel, (op, known)
        answer, submission = channel.submit_known(known.address, x, y, keep, deadline_ns(deadline))
        if answer == at.BUSY:
            return None
        if answer < 0 and answer != at.ABORTED:
            self.health.engine_failed(channel, answer)
        return CpuWork(self, (op,), [(channel, submission)], deadline)

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
        if not self._run_here(linked, plain.address(table), ops, timeout):
            deadline = Deadline.after(timeout)
            part = self._enqueue(linked, resolved, deadline)
            self.wait_work(CpuWork(self, ops, [part], deadline))

    def _run_here(self, linked: Linked, table: int, ops: Sequence[Op], timeout: float) -> bool:
        """Run a program on the arrays of a table in this thread; False if the channel is busy."""
        try:
            while (answer := entry_points.run(self._address, linked.address, table)) == at.NEW_SITE:
                call_sites.learn()
            if answer == at.BUSY:
                return False
            if answer != at.DONE:
                self._go_on(self.channel, answer, ops, timeout)
        except BaseException:
            self._let_go(self.channel, ops)
            raise
        if self.channel.flying:
            self.channel.forget_ended()
        return True

    def _let_go(self, channel: Channel, ops: Sequence[Op]) -> None:
        """Something (Ctrl-C, say) ended this thread's call: if its program goes on, fail it."""
        channel.give_up()
        if channel.given_up and self.health.failure() is None:
            self.interrupted(ops)

    def _enqueue(self, linked: Linked, resolved: Operands, deadline: Deadline) -> Part:
        submission = Submission(linked, resolved.addresses, resolved.keep, deadline_ns(deadline))
        return self.enqueue(self.channel, submission)

    def _launch_batch(
        self, ops: Sequence[Op], batch: PreparedBatch | NewBatch, timeout: float, async_op: bool
    ) -> Work | None:
        """Run all_reduces of plain arrays as one program, here and now if the channel is free."""
        if isinstance(batch, NewBatch):
            for op in ops:
                validate(op, self.rank, self.size)
            batch = self.batches.remember(batch, self.plans.linked(self._joined(ops)))
        if not async_op and self._run_here(batch.linked, batch.address, ops, timeout):
            return None
        self.health.check()
        addresses, deadline = batch.table[0], Deadline.after(timeout)
        submission = Submission(batch.linked, addresses, tuple(ops), deadline_ns(deadline))
        part = self.enqueue(self.channel, submission)
        work = CpuWork(self, ops, [part], deadline)
        if async_op:
            self.host.need_worker()
            return work
        self.wait_work(work)
        return None

    def _joined(
        self, ops: Sequence[Op], gates: BatchDependencies | None = None, numbers: Sequence[int] = ()
    ) -> LoweredOp:
        requests = [straighten(request(op, self.layout)) for op in ops]
        if len(requests) == 1 and gates is None:
            return requests[0]
        return fuse(requests, self.layout, gates, numbers)

    def _go_on(self, channel: Channel, answer: int, ops: Sequence[Op], timeout: float) -> None:
        """Drive a program that this thread has begun to its end, a slice at a time."""
        deadline = Deadline.after(max(0.0, timeout - SLICE))
        try:
            while answer == at.BLOCKED and not self.health.trouble(channel, deadline):
                if self.is_stuck(channel):
                    break
                answer = entry_points.drive(
                    channel.address, max(1, int(deadline.slice(LOOK) * 1e9))
                )
        finally:
            self.host.deadlocks.over()
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
        deadline = Deadline.after(timeout)
        limit = deadline_ns(deadline)
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
        return CombinedWork(self, ops, works, messages)

    def _submit(
        self,
        ops: Sequence[Op],
        numbers: Sequence[int],
        gates: BatchDependencies | None,
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

    def _started(self, work: Work | DeferredReceive, deadline: Deadline) -> Work:
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
            entry_points.open_gate(self._address, work.passage.own)
        return started
