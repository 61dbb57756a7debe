"""A group's traffic on a polled library: calls in order, messages, and the group's failure.

A launch's collectives are a call. All ranks first agree on the call; requests follow once the ranks
have agreed and every earlier call has ended. So requests are in launch order on every rank. A
block's operations run side by side if no rank's arrays make them depend on each other. Messages run
concurrently.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

from nc10d.arrays.call_info import CallInfo, block_of, call_of
from nc10d.backend.polled.block_order import Dependencies, dependencies_of
from nc10d.backend.polled.launches import MessageTask, PolledWork, Steps, Task, after, side_by_side
from nc10d.backend.polled.polled_collectives import CollectiveLibrary, steps
from nc10d.backend.polled.progress_thread import ProgressedGroup, ProgressThread
from nc10d.base.deadline import Deadline, monotonic
from nc10d.base.promise import copy_to_raise
from nc10d.base.text import in_seconds
from nc10d.errors import CollectiveTimeout, DistBackendError, DistError, GroupClosed
from nc10d.ops import Op
from nc10d.ops.facts import is_message
from nc10d.work import Work

_NOTHING: frozenset[int] = frozenset()
_CHECK_INTERVAL = 8
"""Polls between two checks for rare events: failures, departures, deadlines."""


class PolledGroup(ProgressedGroup, ABC):
    """A rank's side of a group. The methods run under the progress thread's lock.

    A subclass adds agreement on a call, the transport for messages, and notices between ranks.
    """

    def __init__(self, name: str, library: CollectiveLibrary, engine: ProgressThread) -> None:
        self.name = name
        self.rank = library.rank
        self.failure: DistError | None = None
        self._library = library
        self._engine = engine
        self._seq = itertools.count(1)
        self._calls: deque[Task] = deque()
        self._messages: deque[MessageTask] = deque()
        self._polls = 0
        self._closed = False
        engine.join(self)

    # -- of each library -------------------------------------------------------------------

    @abstractmethod
    def _agree(
        self, task: Task, call: CallInfo, conflict: bool
    ) -> Generator[Sequence[Any] | None, None, bool]:
        """Check that all ranks make this call; return whether the operations run in order.

        They do if their arrays have a `conflict` on any rank. The first step runs at the launch,
        the others when all earlier calls have ended.
        """

    @abstractmethod
    def _message_steps(self, message: MessageTask) -> Steps:
        """Return a message's steps."""

    @abstractmethod
    def _requests_ended(self, requests: Sequence[object]) -> bool:
        """Return whether a step's requests have ended; never blocks."""

    @abstractmethod
    def _look_at_peers(self) -> None:
        """Fail the group if another rank has failed it."""

    @abstractmethod
    def _notify_peers(self, error: DistError) -> DistError:
        """Fail the group on all other ranks; return the group's error."""

    @abstractmethod
    def _drop(self, task: Task) -> None:
        """Give up a task, because the group has failed; the library may still write the arrays."""

    @abstractmethod
    def _notify_of_departure(self) -> None:
        """Notify the other ranks that this rank leaves the group, which has not failed."""

    # -- launching -------------------------------------------------------------------------

    def launch(self, ops: Sequence[Op], deadline: Deadline) -> Work:
        """Start validated operations; raises the group's failure, if any."""
        collectives = [n for n, op in enumerate(ops) if not is_message(op)]
        messages = [n for n, op in enumerate(ops) if is_message(op)]
        work = PolledWork(ops, self._engine, len(messages) + bool(collectives))
        dependencies = dependencies_of(ops)
        with self._engine.lock:
            self.check()
            if collectives:
                call = Task(work, collectives, deadline, next(self._seq))
                self._begin(call, self._calls, self._call_steps(call, dependencies))
            for place in messages:
                message = MessageTask(work, place, deadline)
                earlier = dependencies.get(place, _NOTHING)
                self._begin(message, self._messages, self._steps_in_turn(message, earlier))
        return work

    def check(self) -> None:
        """Raise the group's failure, if any; looks at the other ranks before."""
        with self._engine.lock:
            self._look_at_peers()
        if self.failure is not None:
            raise copy_to_raise(self.failure) from None  # the context is another call's

    def _begin(self, task: Task, queue: deque[Any], steps_of_task: Steps) -> None:
        if self.failure is not None:  # an earlier task of the launch could not begin
            return
        queue.append(task)
        try:
            task.begin(steps_of_task)
        except Exception as error:  # noqa: BLE001  (peers must not wait for this rank)
            self.fail(self._error_of(error, task))

    def _call_steps(self, task: Task, dependencies: Dependencies) -> Steps:
        """Agree on a call with all ranks, then make that call."""
        work = task.work
        ops = [work.ops[place] for place in task.places]
        calls = [call_of(op) for op in ops]
        in_order = yield from self._agree(task, block_of(calls), bool(dependencies))
        task.agreed = True
        each = zip(ops, calls, strict=True)
        parts = [steps(self._library, op, call.count) for op, call in each]
        if in_order:  # a single operation too may have to wait for earlier messages
            for place, part in zip(task.places, parts, strict=True):
                yield from after(_have_ended(work, dependencies.get(place, _NOTHING)), part)
                work.ended.add(place)
        elif len(parts) == 1:
            yield from parts[0]
        else:
            yield from side_by_side(parts)

    def _steps_in_turn(self, message: MessageTask, earlier: frozenset[int]) -> Steps:
        """Return a message's steps, which wait for the launch's `earlier` operations."""
        steps_of_task = self._message_steps(message)
        ended = _have_ended(message.work, earlier)

        def may_begin() -> bool:
            before = itertools.takewhile(lambda other: other is not message, self._messages)
            return ended() and not any(map(message.must_follow, before))

        return steps_of_task if may_begin() else after(may_begin, steps_of_task)

    # -- progress --------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a call or a message is in flight."""
        return bool(self._calls or self._messages)

    def advance(self) -> None:
        """Advance calls and messages without blocking; their errors fail the group."""
        if not self.busy:
            return
        self._polls += 1
        if self._polls % _CHECK_INTERVAL == 0:
            self._look_at_peers()
            self._check_tasks()
        while self._calls and self._advance_task(self._calls[0]):
            self._calls.popleft()
        for message in tuple(self._messages):
            if self._advance_task(message):
                self._messages.remove(message)

    def _advance_task(self, task: Task) -> bool:
        if self.failure is not None:
            return False
        try:
            if not task.advance(self._requests_ended):
                return False
        except Exception as error:  # noqa: BLE001  (peers must not wait for this rank)
            self.fail(self._error_of(error, task))
            return False
        if task.work.part_ended(task.places, task.result):
            self._engine.end(task.work, None, task.work.outcome())
        return True

    def _error_of(self, error: Exception, task: Task) -> DistError:
        name = task.work._describe()
        if not isinstance(error, DistError):
            error = DistBackendError(f"{name}: {type(error).__name__}: {error}")
        error.op, error.seq = error.op or name, error.seq or task.seq or None
        return error

    def _check_tasks(self) -> None:
        """Fail the group if a task can't end, or has missed its deadline."""
        self._fail_overdue((*self._calls, *self._messages))

    def _fail_overdue(self, tasks: Iterable[Task], reason: str = "") -> None:
        now = monotonic()
        task = next((task for task in tasks if task.deadline.at <= now), None)
        if task is not None:
            name, limit = task.work._describe(), in_seconds(task.deadline.limit)
            text = f"{name} timed out on rank {self.rank} of group {self.name!r} after {limit}"
            self.fail(CollectiveTimeout(text + reason, rank=self.rank, **self._about(task)))

    def _about(self, task: Task) -> dict[str, Any]:
        return {"group": self.name, "op": task.work._describe(), "seq": task.seq or None}

    # -- ending ----------------------------------------------------------------------------

    def fail(self, error: DistError, notify: bool = True) -> None:
        """Fail all calls and messages in flight, and all later calls; the first error stays."""
        if self.failure is not None:
            return
        error.group = error.group or self.name
        self.failure = error
        if notify:
            self.failure = error = self._notify_peers(error)
        for task in (*self._calls, *self._messages):
            self._drop(task)
            self._engine.end(task.work, error)
        self._calls.clear()
        self._messages.clear()

    def close(self) -> None:
        """Leave the group; idempotent. Peers are notified, so that none waits for this rank."""
        with self._engine.lock:
            if self._closed:
                return
            self._closed = True
            if self.failure is None:
                self._notify_of_departure()
                text = f"group {self.name!r} has been closed on rank {self.rank}"
                self.fail(GroupClosed(text, group=self.name), notify=False)
        self._engine.leave(self)


def _have_ended(work: PolledWork, places: frozenset[int]) -> Callable[[], bool]:
    return lambda: places <= work.ended
