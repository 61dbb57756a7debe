"""A group's traffic: its calls in order, its messages, and its failure.

A group has two communicators of the same ranks. `comm` carries data; `control` carries call checks
and control messages. A call check starts when a call is launched. The call's data follows when the
check and every earlier call have ended. So the order of requests on each communicator is the order
of launch on every rank. Messages run concurrently.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any

from nc10d.arrays.call_info import block_of, call_of
from nc10d.backend.mpi import tasks
from nc10d.backend.mpi.call_check import CallCheck, exchanged_texts, mismatch
from nc10d.backend.mpi.control import FAILED, LEFT, MOST_BYTES, LeaveProtocol, MpiControl
from nc10d.backend.mpi.library import MPI, Comm, error_from
from nc10d.backend.mpi.message_queue import MessageQueue
from nc10d.backend.mpi.mpi_requests import MpiCalls
from nc10d.backend.mpi.tasks import MessageTask, Task
from nc10d.backend.polled.block_order import Dependencies, dependencies_of
from nc10d.backend.polled.flat_buffers import keep
from nc10d.backend.polled.launches import PolledWork, Steps, side_by_side
from nc10d.backend.polled.polled_collectives import steps
from nc10d.backend.polled.progress_thread import ProgressThread
from nc10d.base import error_wire
from nc10d.base.deadline import Deadline, monotonic
from nc10d.base.promise import copy_to_raise
from nc10d.base.text import in_seconds
from nc10d.errors import CollectiveTimeout, DistBackendError, DistError, GroupClosed, PeerLost
from nc10d.ops import MessageInfo, Op, Recv, Send
from nc10d.work import Work

_NOTHING: frozenset[int] = frozenset()
_CHECK_INTERVAL = 8
"""Polls between two checks for rare events: control messages, departures, deadlines."""


class MpiGroup:
    """A rank's side of a group. Its methods run under the lock of the progress thread."""

    def __init__(
        self, name: str, comm: Comm, control: Comm, any_order: bool, engine: ProgressThread
    ) -> None:
        self.name = name
        self.comm = comm
        self.failure: DistError | None = None
        self._control_comm = control
        self._library = MpiCalls(comm, any_order)
        self._engine = engine
        self._message_queue = MessageQueue(comm)
        self._control = MpiControl(control)
        self._leave_protocol = LeaveProtocol(self._message_queue, comm.rank, comm.size)
        self._seq = itertools.count(1)
        self._calls: deque[Task] = deque()
        self._messages: list[MessageTask] = []
        self._polls = 0
        self._closed = self._drained_at_close = False
        engine.join(self)

    # -- launching -------------------------------------------------------------------------

    def launch(self, ops: Sequence[Op], deadline: Deadline) -> Work:
        """Start validated operations; raises the group's failure if it has failed."""
        collectives = [n for n, op in enumerate(ops) if not isinstance(op, (Send, Recv))]
        messages = [n for n, op in enumerate(ops) if isinstance(op, (Send, Recv))]
        work = PolledWork(ops, self._engine, len(messages) + bool(collectives))
        dependencies = dependencies_of(ops)
        with self._engine.lock:
            self._handle_notices()
            self.check()
            if collectives:
                task = Task(work, collectives, deadline, next(self._seq))
                self._calls.append(task)
                steps = self._agreed_steps(work, collectives, dependencies, task.seq)
                self._begin_task(task, steps)
            for place in messages:
                self._launch_message(work, place, dependencies.get(place, _NOTHING), deadline)
        return work

    def check(self) -> None:
        """Raise the group's failure, if it has failed."""
        if self.failure is not None:
            raise copy_to_raise(self.failure) from None  # its context is another call's

    def check_notices(self) -> None:
        """As `check`, but after reading the notices of other ranks, also in an idle group."""
        with self._engine.lock:
            self._handle_notices()
        self.check()

    def probe(self, peer: int | None, tag: int | None) -> MessageInfo | None:
        """Return a message that has arrived; raises the group's failure if it has failed."""
        self.check_notices()
        with self._engine.lock:
            return self._message_queue.probe(peer, tag)

    def _agreed_steps(
        self, work: PolledWork, places: Sequence[int], dependencies: Dependencies, seq: int
    ) -> Steps:
        """Check that all ranks make this call, then make it."""
        ops = [work.ops[place] for place in places]
        calls = [call_of(op) for op in ops]
        check = CallCheck(block_of(calls), bool(dependencies))
        yield [check.ask(self._control_comm)]
        if not check.agrees:
            own_text, texts = exchanged_texts(check.call, self.comm.size)
            yield [self.comm.Iallgather(own_text, texts)]
            raise mismatch(texts, seq, self.name)
        counts = [call.count for call in calls]
        parts = [steps(self._library, *each) for each in zip(ops, counts, strict=True)]
        if check.is_sequential:  # a single call too may have to wait for earlier messages
            for place, part in zip(places, parts, strict=True):
                while not dependencies.get(place, _NOTHING) <= work.ended:
                    yield None  # messages of the block may run in between
                yield from part
                work.ended.add(place)
        elif len(parts) == 1:
            yield from parts[0]
        else:
            yield from side_by_side(parts)

    def _launch_message(
        self, work: PolledWork, place: int, earlier: frozenset[int], deadline: Deadline
    ) -> None:
        message = MessageTask(work, place, deadline)
        steps_of_task = self._message_queue.steps(message.op, message.status)
        if earlier or self._is_held_back(message):
            steps_of_task = tasks.after(
                lambda: earlier <= work.ended and not self._is_held_back(message), steps_of_task
            )
        self._messages.append(message)
        self._begin_task(message, steps_of_task)

    def _is_held_back(self, message: MessageTask) -> bool:
        """Return whether an earlier message that must not be overtaken has not begun."""
        before = itertools.takewhile(lambda other: other is not message, self._messages)
        return any(map(message.must_follow, before))

    def _begin_task(self, task: Task, steps_of_task: Steps) -> None:
        try:
            task.begin(steps_of_task)
        except MPI.Exception as error:
            self.fail(error_from(error, task.work._describe()))

    # -- progress --------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a call or a message is in flight."""
        return bool(self._calls or self._messages)

    def advance(self) -> None:
        """Advance calls and messages as far as MPI allows; never blocks."""
        if not self.busy:
            return
        self._polls += 1
        if self._polls % _CHECK_INTERVAL == 0:
            self._handle_notices()
            self._check_tasks()
        while self._calls and self._advance_task(self._calls[0]):
            self._calls.popleft()
        if self._messages:
            self._message_queue.accept_announcements()
            for message in tuple(self._messages):
                if self._advance_task(message):
                    self._messages.remove(message)

    def _advance_task(self, task: Task) -> bool:
        """Advance a task; return whether it has ended. Its errors fail the group."""
        if self.failure is not None:
            return False
        try:
            if not task.advance():
                return False
        except MPI.Exception as error:
            self.fail(error_from(error, task.work._describe()))
            return False
        except DistError as error:
            self.fail(error)
            return False
        except Exception as error:  # noqa: BLE001  (peers must not wait for this rank)
            self.fail(DistBackendError(f"{task.work._describe()}: {type(error).__name__}: {error}"))
            return False
        if task.work.part_ended(task.places, task.result):
            self._engine.end(task.work, None, task.work.outcome())
        return True

    def _check_tasks(self) -> None:
        """Fail the group if a task needs a rank that has left, or has missed its deadline."""
        in_flight = (*self._calls, *self._messages)
        blocked = self._leave_protocol.blocked_task(in_flight)
        if blocked is not None:
            task, rank = blocked
            text = f"{task.work._describe()}: rank {rank} of group {self.name!r} has left"
            self.fail(PeerLost(text, rank=rank, **self._about(task)))
            return
        now = monotonic()
        overdue = next((task for task in in_flight if task.deadline.at <= now), None)
        if overdue is not None:
            rank = self.comm.rank
            text = (
                f"{overdue.work._describe()} timed out on rank {rank} of group {self.name!r} after "
                f"{in_seconds(overdue.deadline.limit)}"
            )
            self.fail(CollectiveTimeout(text, rank=rank, **self._about(overdue)))

    def _about(self, task: Task) -> dict[str, Any]:
        return {"group": self.name, "op": task.work._describe(), "seq": task.seq or None}

    def _handle_notices(self) -> None:
        for source, kind, text in self._control.received():
            if kind == FAILED:
                self.fail(error_wire.decode_error(text), notify=False)
            elif kind == LEFT:
                self._leave_protocol.record_leave(source, text)

    # -- ending ----------------------------------------------------------------------------

    def fail(self, error: DistError, notify: bool = True) -> None:
        """Fail all calls and messages in flight, and all later calls; the first error stays."""
        # With `notify`, peers get the error as a control message.
        if self.failure is not None:
            return
        error.group = error.group or self.name
        self.failure = error
        if notify:
            self._control.broadcast(FAILED, error_wire.encode_error(error, MOST_BYTES))
        for message in self._messages:
            message.cancel()
        for task in (*self._calls, *self._messages):
            self._engine.end(task.work, error)
            keep(task)
        self._calls.clear()
        self._messages = []

    def close(self) -> None:
        """Leave the group; idempotent. Peers are notified, so that none waits for this rank."""
        with self._engine.lock:
            if self._closed:
                return
            self._closed = True
            self._drained_at_close = self.failure is None and not self.busy
            if self.failure is None:
                done = self._calls[0].seq - 1 if self._calls else next(self._seq) - 1
                self._control.send(LEFT, self._leave_protocol.leave_notices(done))
                text = f"group {self.name!r} has been closed on rank {self.comm.rank}"
                self.fail(GroupClosed(text, group=self.name), notify=False)
        self._engine.leave(self)

    def free(self) -> bool:
        """Free a closed group's communicators if no message can arrive any more; return whether."""
        # MPI reuses a freed communicator's number, so a late message would reach a later group.
        self._handle_notices()
        if not (self._drained_at_close and self._leave_protocol.all_left()):
            return False
        self._control.close()
        self.comm.Free()
        self._control_comm.Free()
        return True

    def stop_listening(self) -> None:
        """Cancel the receive that MPI_Finalize would wait for."""
        self._control.close()
