"""Launching: from operations to programs that run.

1. A prepared call runs at once, in the caller's thread, or is submitted.
2. Any other operations are checked, lowered to a program, and run or submitted. Single operations
   on plain arrays, and batches of all_reduces, are then remembered as prepared calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nc10d.arrays.validate import validate
from nc10d.backend.cpu.algorithms.group_shape import GroupShape
from nc10d.backend.cpu.engine import call_sites
from nc10d.backend.cpu.engine.channel import Submission, deadline_ns
from nc10d.backend.cpu.lowering.fuse import fuse
from nc10d.backend.cpu.lowering.lower import LoweredOp, ProgramCache, lower
from nc10d.backend.cpu.lowering.ordering import INDEPENDENT, BatchDependencies, find_dependencies
from nc10d.backend.cpu.lowering.prepared import (
    AT_ONCE,
    SOON,
    Prepared,
    PreparedCollective,
    PreparedMessage,
    PreparedProgram,
)
from nc10d.backend.cpu.lowering.prepared_cache import PreparedCache, parts_of
from nc10d.backend.cpu.lowering.strided import make_contiguous, operands
from nc10d.backend.cpu.membership.group import Group
from nc10d.backend.cpu.native import entry_points, prepared_exchange
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.p2p.mailbox import DeferredReceive, Mailbox
from nc10d.backend.cpu.program.linker import Linked
from nc10d.backend.cpu.waiter import SLICE, SLICE_NS, Flight, Waiter
from nc10d.backend.cpu.works import CombinedWork, CpuWork
from nc10d.backend.prepared_protocol import Arguments
from nc10d.base.deadline import Deadline
from nc10d.base.promise import copy_to_raise
from nc10d.base.signal_errors import from_handler
from nc10d.ops import Op, Recv, Send
from nc10d.work import Work

Pair = tuple[PreparedMessage, PreparedMessage]
"""A send, and a receive that runs beside it."""


class OpLauncher:
    """Launches a group's operations. Synchronous launches block."""

    def __init__(self, group: Group, shape: GroupShape, waiter: Waiter) -> None:
        self._group, self._channel = group, group.channel
        self._shape = shape
        self.waiter = waiter
        """What Works wait through; see PreparingBackend."""
        self.programs = ProgramCache(shape)
        self.cache = PreparedCache(group.channel)
        self.latest, self.hooked = self.cache.latest, self.cache.hooked
        self.find_hooked = self.cache.find_hooked
        self.mailbox = Mailbox(group, waiter, self.cache)

    def launch(self, ops: Sequence[Op], timeout: float, async_op: bool) -> Work | None:
        """Run `ops`; see Backend."""
        found = self.cache.find(ops)
        if found is None:
            works = self.start_messages(ops, timeout) if async_op and len(ops) > 1 else None
            if works is not None:
                return CombinedWork(self.waiter, ops, works, works)
            return self._launch_new(ops, timeout, async_op)
        prepared, x, y = found
        if async_op:
            work = prepared.start(self.waiter, x, y, timeout)
            return work or self._launch_new(ops, timeout, True)
        # While another message crosses a socket, a bulky message goes to the worker, which moves
        # them all: a second thread would only compete for the sockets.
        links = self._group.links.channels() if prepared.bulky else []
        alone = not any(link.spec.streams and not link.idle() for link in links)
        done = (alone and self.run(prepared, x, y, timeout)) or self._start_and_wait(
            lambda: prepared.start(self.waiter, x, y, timeout, waits=True), lambda: ops
        )
        return None if done else self._launch_new(ops, timeout, False)

    # -- prepared calls --------------------------------------------------------------------------

    def run(self, prepared: Prepared, x: Arguments, y: Arguments, timeout: float) -> bool:
        """Run a prepared call in this thread; False: nothing has happened."""
        try:
            answer = prepared.run(prepared.words, x, y)
            return self.finish(prepared, answer, x, y, timeout)
        except BaseException:
            self.abandon(prepared, x, y)
            raise

    def finish(
        self, prepared: Prepared, answer: int, x: Arguments, y: Arguments, timeout: float
    ) -> bool:
        """Complete a call after `prepared.run`, which returned `answer`; see PreparingBackend."""
        while answer == at.NEW_SITE:
            call_sites.learn()
            answer = prepared.run(prepared.words, x, y)
        if answer == at.BUSY:
            # A receive that can't run now is posted. `launch` would check the operation again.
            return prepared.sender is not None and self._start_and_wait(
                lambda: prepared.submit(self.waiter, x, y, timeout, waits=True),
                lambda: prepared.ops(x, y),
            )
        if answer != at.DONE:
            try:
                self.waiter.drive(prepared.channel, answer, prepared.ops(x, y), timeout)
            finally:
                prepared.end()
        if prepared.in_flight:
            prepared.channel.reap()
        return True

    def abandon(self, prepared: Prepared, x: Arguments, y: Arguments) -> None:
        """Leave a call after an exception such as Ctrl-C; see PreparingBackend."""
        self.waiter.abandon(prepared.channel, prepared.ops(x, y))

    def _start_and_wait(
        self, start: Callable[[], Work | None], ops: Callable[[], Sequence[Op]]
    ) -> bool:
        """Submit a call by `start` and wait for it; False: nothing has happened. Blocks."""
        try:
            work = start()
            if work is not None:
                self.waiter.wait_work(work)
        except BaseException as error:
            # After Ctrl-C, or whatever a signal's handler raises, the call may be under way.
            if not isinstance(error, Exception) or from_handler(error):
                self.waiter.interrupted(ops())
            raise
        return work is not None

    def start_messages(self, ops: Sequence[Op], timeout: float) -> list[Work] | None:
        """Start messages if all are prepared, sends first; None: nothing has happened."""
        found = self.cache.find_messages(ops)
        if found is None:
            return None
        works: dict[int, Work] = {}
        # Peers may wait for the sends, so no send spins; a receive spins for its peer's send.
        for kind, how_soon in ((Send, AT_ONCE), (Recv, SOON)):
            for number, (prepared, x, y) in enumerate(found):
                op = ops[number]
                if type(op) is kind:
                    work = prepared.finish_soon(x, y, how_soon)
                    work = work or prepared.submit(self.waiter, x, y, timeout)
                    works[number] = work or self._submit((op,), timeout)
        return [works[number] for number in range(len(ops))]

    def exchange(
        self, dst: int, x: Arguments, tag: int, src: int, y: Arguments, take: int, timeout: float
    ) -> bool:
        """Send x and receive y if both are prepared; see PreparingBackend. Blocks."""
        latest = self.latest[Send].get(dst), self.latest[Recv].get(src)
        if None not in latest and self._exchange_by(latest, x, tag, y, take, timeout):
            return True
        found = self.cache.find_messages((Send(x, dst, tag), Recv(y, src, take)))
        if found is None:
            return False
        pair = found[0][0], found[1][0]
        # Not the latest: arrays with other sizes.
        return pair != latest and self._exchange_by(pair, x, tag, y, take, timeout)

    def _exchange_by(
        self, pair: Any, x: Arguments, tag: int, y: Arguments, take: int, timeout: float
    ) -> bool:
        """Exchange by two PreparedMessages; False: nothing has happened. Blocks."""
        send, receive = pair
        if send.short and self._exchange_soon(pair, x, tag, y, take, timeout):
            return True
        # Through sockets, two threads move more.
        if send.channel.spec.streams or receive.channel.spec.streams:
            return False
        return self._exchange_long(pair, x, tag, y, take, timeout)

    def _exchange_soon(
        self, pair: Pair, x: Arguments, tag: int, y: Arguments, take: int, timeout: float
    ) -> bool:
        """Exchange if the send, a short one, can end at once; False: nothing has happened."""
        send, receive = pair
        run = prepared_exchange.run_exchange
        try:
            while (answer := run(send.words, receive.words, x, y, tag, take)) == at.NEW_SITE:
                call_sites.learn()
            if answer == at.BUSY:
                return False
            if send.in_flight:
                send.channel.reap()
            if answer == prepared_exchange.SENT:
                answer = at.BUSY
            done = not (answer or receive.in_flight) or self.finish(
                receive, answer, y, take, timeout
            )
        except BaseException:
            self.abandon(receive, y, take)
            raise
        if not done:
            self.launch((Recv(y, receive.peer, take),), timeout, False)
        return True

    def _exchange_long(
        self, pair: Pair, x: Arguments, tag: int, y: Arguments, take: int, timeout: float
    ) -> bool:
        """Submit both messages and advance them in this thread; False: nothing has happened."""
        send, receive = pair
        deadline = Deadline.after(timeout)
        flights = [_blank_flight(message, array) for message, array in ((send, x), (receive, y))]
        sent, received = [submission for _, submission in flights]
        words = send.words, receive.words, x, y, tag, take, sent.words, received.words
        limit, ops = deadline_ns(deadline), (*send.ops(x, tag), *receive.ops(y, take))
        start = prepared_exchange.start_exchange
        answer = at.NEW_SITE
        try:
            while answer == at.NEW_SITE:
                answer = start(*words, limit, SLICE_NS)
                if answer == at.NEW_SITE:
                    call_sites.learn()
        except BaseException:
            # The engine may have begun: then its descriptors must stay where they are.
            self.waiter.interrupted(ops)
            raise
        if answer not in (at.FINISHED, at.BUSY):
            self.waiter.go_on_together(flights, ops, deadline, answer)
        for channel, submission in flights:
            channel.forget(submission)
        return answer != at.BUSY

    # -- new calls -------------------------------------------------------------------------------

    def _launch_new(self, ops: Sequence[Op], timeout: float, async_op: bool) -> Work | None:
        """Check operations that are not prepared, and run or submit them."""
        if async_op:
            self._group.context.need_worker()
            return self._submit(ops, timeout)
        if not any(isinstance(op, (Send, Recv)) for op in ops):
            self._run_new(ops, timeout)
            return None
        self._start_and_wait(lambda: self._submit(ops, timeout), lambda: ops)
        return None

    def _checked(self, ops: Sequence[Op]) -> Sequence[Op]:
        self.waiter.health.check()
        return [validate(op, self._group.rank, self._group.size) for op in ops]

    def _run_new(self, ops: Sequence[Op], timeout: float) -> None:
        """Run collectives in this thread, or in their turn if the channel is busy; blocks."""
        ops = self._checked(ops)
        lowered = self._lower(ops)
        linked = self.programs.linked(lowered)
        self._remember(ops, linked, lowered)
        memory = operands(lowered)
        addresses = np.array(memory.addresses or [0], np.int64)
        program = PreparedProgram(self._channel, linked, addresses, memory.keep)
        if not self.run(program, ops, None, timeout):
            started = self._start_and_wait(
                lambda: program.start(self.waiter, ops, None, timeout, waits=True), lambda: ops
            )
            assert started, "a program always fits"

    def _remember(self, ops: Sequence[Op], linked: Linked, lowered: LoweredOp) -> None:
        if len(ops) > 1:
            self.cache.remember_batch(ops, linked)
            return
        op = ops[0]
        parts = parts_of(op)
        if parts is not None and not lowered.strided:
            call = PreparedCollective(
                self._channel, linked, type(op), parts, lowered, self._group.rank
            )
            self.cache.remember(op, call)

    def _lower(
        self,
        ops: Sequence[Op],
        dependencies: BatchDependencies | None = None,
        numbers: Sequence[int] = (),
    ) -> LoweredOp:
        lowered = [make_contiguous(lower(op, self._shape)) for op in ops]
        if len(lowered) == 1 and dependencies is None:
            return lowered[0]
        return fuse(lowered, self._shape, dependencies, numbers)

    def _submit(self, ops: Sequence[Op], timeout: float) -> Work:
        """Check and submit messages and collectives; return the Work of all."""
        ops = self._checked(ops)
        deadline = Deadline.after(timeout)
        dependencies = find_dependencies(ops, self._shape)
        posted = [
            self.mailbox.launch(
                op, deadline, dependencies.of_message(number) if dependencies else INDEPENDENT
            )
            for number, op in enumerate(ops)
            if isinstance(op, (Send, Recv))
        ]
        numbers = [number for number, op in enumerate(ops) if not isinstance(op, (Send, Recv))]
        works = [self._submit_collectives(ops, numbers, dependencies, deadline)] if numbers else []
        # Last: a deferred receive blocks here for gates that the submissions above open.
        messages = [self._started(work, deadline) for work in posted]
        works += messages
        if len(works) == 1:
            return works[0]
        # A thread waits for a single Work at a time; the worker advances the others.
        self._group.context.need_worker()
        return CombinedWork(self.waiter, ops, works, messages)

    def _submit_collectives(
        self,
        ops: Sequence[Op],
        numbers: Sequence[int],
        dependencies: BatchDependencies | None,
        deadline: Deadline,
    ) -> Work:
        """Append a batch's collectives, `ops[n]` for n in `numbers`, as one submission."""
        collectives = [ops[number] for number in numbers]
        lowered = self._lower(collectives, dependencies, numbers)
        linked = self.programs.linked(lowered)
        if dependencies is None and len(collectives) == len(ops):
            self._remember(ops, linked, lowered)
        memory = operands(lowered)
        submission = Submission(linked, memory.addresses, memory.keep, deadline_ns(deadline))
        self._channel.submit(submission)
        return CpuWork(self.waiter, collectives, self._channel, submission, deadline)

    def _started(self, work: Work | DeferredReceive, deadline: Deadline) -> Work:
        """Return a Work unchanged; carry out a deferred receive, and open its gate. May block."""
        # The engine can't, so even an asynchronous launch waits here for the receive's gates.
        if isinstance(work, Work):
            return work
        context, health = self._group.context, self._group.health
        context.need_worker()
        for gate in work.dependencies.waits:
            while not self.mailbox.await_gate(gate, SLICE):
                failure = health.check_wait((), self._channel, deadline)
                if failure is not None:
                    raise copy_to_raise(failure)
        started = work.start()
        self.waiter.wait_work(started)
        if work.dependencies.own:
            entry_points.open_gate(self._channel.address, work.dependencies.own)
        return started


def _blank_flight(message: PreparedMessage, x: Arguments) -> Flight:
    """Return a prepared message as a submission in flight, which the engine fills in."""
    channel = message.channel
    submission = channel.blank(1)
    submission.keep = message, x
    channel.in_flight[submission.address] = submission
    return channel, submission
