"""A group's traffic on UCC: its launches in order, its messages, and its failure.

A launch's collectives begin when all earlier ones have ended. All ranks first agree on the call in
a small all_reduce of the CPU backend, which also shows if the arrays of any rank make the
operations depend on each other. So UCC's collectives are posted in the same order on every rank.
The operations of a block run side by side if they may. Messages run concurrently.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from nc10d.arrays.call_info import block_of, call_of
from nc10d.backend.abilities import cause_of
from nc10d.backend.polled.block_order import Dependencies, dependencies_of
from nc10d.backend.polled.flat_buffers import keep
from nc10d.backend.polled.launches import Steps, side_by_side
from nc10d.backend.polled.polled_collectives import steps
from nc10d.backend.polled.progress_thread import ProgressThread
from nc10d.backend.protocol import Backend
from nc10d.backend.ucc.team import UccTeam
from nc10d.backend.ucc.ucc_requests import UccCalls
from nc10d.backend.ucc.ucc_tasks import CollectivesTask, HeldMessage, InnerWork, UccWork
from nc10d.base.deadline import Deadline
from nc10d.base.promise import copy_to_raise
from nc10d.base.text import in_seconds
from nc10d.errors import (
    CollectiveTimeout,
    DistBackendError,
    DistError,
    GroupClosed,
    PeerLost,
    UCCError,
)
from nc10d.ops import MIN, AllReduce, Op, Recv, Send
from nc10d.work import Work

_NOTHING: frozenset[int] = frozenset()
_CHECK_INTERVAL = 8
"""Polls between two checks for rare events: failures and deadlines."""
_log = logging.getLogger(__name__)


class UccGroup:
    """A rank's side of a group. Its methods run under the lock of the progress thread."""

    def __init__(
        self, name: str, team: UccTeam, inner: Backend, any_order: bool, engine: ProgressThread
    ) -> None:
        self.name, self.team, self.inner = name, team, inner
        self.failure: DistError | None = None
        self._library = UccCalls(team, any_order)
        self._engine = engine
        self._seq = itertools.count(1)
        self._calls: deque[CollectivesTask] = deque()
        self._messages: list[HeldMessage] = []
        self._polls = 0
        self._closed = self._stuck = False
        engine.join(self)

    # -- launching -------------------------------------------------------------------------

    def launch(self, ops: Sequence[Op], deadline: Deadline) -> Work:
        """Start validated operations; raises the group's failure if it has failed."""
        collectives = [n for n, op in enumerate(ops) if not isinstance(op, (Send, Recv))]
        messages = [n for n, op in enumerate(ops) if isinstance(op, (Send, Recv))]
        work = UccWork(ops, self._engine, len(messages) + bool(collectives))
        dependencies = dependencies_of(ops)
        with self._engine.lock:
            self.check()
            if collectives:
                task = CollectivesTask(work, collectives, deadline, next(self._seq))
                task.steps = self._agreed_steps(task, dependencies)
                self._calls.append(task)
            for place in messages:
                earlier = dependencies.get(place, _NOTHING)
                self._messages.append(HeldMessage(work, place, earlier, deadline))
            self.advance()
        return work

    def holds_messages_back(self) -> bool:
        """Return whether a message waits for a collective: no later message may overtake it."""
        return any(message.inner is None for message in self._messages)

    def check(self) -> None:
        """Raise the group's failure, if it has failed."""
        if self.failure is None:
            self._check_inner()
        if self.failure is not None:
            raise copy_to_raise(self.failure) from None  # its context is another call's

    def _agreed_steps(self, task: CollectivesTask, dependencies: Dependencies) -> Steps:
        """Check that all ranks make this call, then make it."""
        work = task.work
        ops = [work.ops[place] for place in task.places]
        conflicts = np.array([0 if dependencies else 1], np.int8)
        calls = [call_of(op) for op in ops]
        call = block_of(calls)
        agree = AllReduce(conflicts, MIN.meant_for(f"UCC: {call.describe()}"))
        timeout = task.deadline.remaining()
        agreement = InnerWork(self.inner.launch([agree], timeout, True))
        work.agreement = agreement.work
        yield [agreement]
        task.checked = True
        counts = [call.count for call in calls]
        parts = [steps(self._library, *each) for each in zip(ops, counts, strict=True)]
        if conflicts[0] == 0:
            yield from self._in_order(task, dependencies, parts)
        elif len(parts) == 1:
            yield from parts[0]
        else:
            yield from side_by_side(parts)

    def _in_order(
        self, task: CollectivesTask, dependencies: Dependencies, parts: Sequence[Steps]
    ) -> Steps:
        ended = task.work.ended
        for place, part in zip(task.places, parts, strict=True):
            while not dependencies.get(place, _NOTHING) <= ended:
                yield None  # messages of the block may run in between
            yield from part
            ended.add(place)

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
        try:
            if self._polls % _CHECK_INTERVAL == 0:
                self._check_inner()
                self._check_deadlines()
            if self.failure is None:
                self._advance()
        except DistError as error:
            self.fail(error)
        except Exception as error:  # noqa: BLE001  (peers must not wait for this rank)
            self.fail(DistBackendError(f"group {self.name!r}: {type(error).__name__}: {error}"))

    def _advance(self) -> None:
        if self._calls and self._calls[0].checked:
            self.team.context.progress()
        while self._calls and self._advance_call(self._calls[0]):
            task = self._calls.popleft()
            self._part_ended(task.work, task.places, None)
        for message in tuple(self._messages):
            if self._message_ended(message):
                self._messages.remove(message)

    def _advance_call(self, task: CollectivesTask) -> bool:
        try:
            return task.advance()
        except DistError as error:
            error.group, error.op = error.group or self.name, error.op or task.work._describe()
            error.seq = error.seq or task.seq
            raise

    def _message_ended(self, message: HeldMessage) -> bool:
        """Begin a message if it may begin; return whether it has ended."""
        if message.inner is None:
            before = itertools.takewhile(lambda other: other is not message, self._messages)
            if not message.earlier <= message.work.ended or any(map(message.must_follow, before)):
                return False
            timeout = message.deadline.remaining()
            message.inner = InnerWork(self.inner.launch([message.op], timeout, True))
        if not message.inner.ready():
            return False
        sender = message.inner.work.result() if isinstance(message.op, Recv) else None
        self._part_ended(message.work, [message.place], sender)
        return True

    def _part_ended(self, work: UccWork, places: Sequence[int], result: int | None) -> None:
        if work.part_ended(places, result):
            self._engine.end(work, None, work.outcome())

    def _check_inner(self) -> None:
        """Fail with the error on which the CPU backends of all ranks have agreed, if any."""
        detector = self.inner.failure_detector
        found = None if detector is None else cause_of(detector)
        if found is not None:
            self.fail(found, notify=False)

    def _check_deadlines(self) -> None:
        # The CPU backend keeps the deadline of a call until all ranks have agreed on it.
        for task in self._calls:
            if task.checked and task.deadline.expired():
                name, rank = task.work._describe(), self.team.rank
                text = f"{name} timed out on rank {rank} of group {self.name!r} after "
                limit = in_seconds(task.deadline.limit)
                about: dict[str, Any] = {"group": self.name, "op": name, "seq": task.seq}
                text += f"{limit}: all ranks had entered it, and UCC has not ended it"
                raise CollectiveTimeout(text, rank=rank, **about)

    # -- ending ----------------------------------------------------------------------------

    def fail(self, error: DistError, notify: bool = True) -> None:
        """Fail all calls and messages in flight, and all later calls; the first error stays."""
        # With `notify` all ranks agree on a cause first.
        detector = self.inner.failure_detector
        if self.failure is not None:
            return
        if notify and detector is not None:
            detector.abort(error)
            error = cause_of(detector) or error
        self.failure = error
        for work in self._works_in_flight():
            self._engine.end(work, error)
        for task in self._calls:
            if task.checked:  # UCC may still write
                self._stuck = True
                keep(task)
        self._calls.clear()
        self._messages = []

    def _works_in_flight(self) -> Iterator[UccWork]:
        works = [task.work for task in self._calls] + [held.work for held in self._messages]
        return iter({id(work): work for work in works}.values())

    def close(self) -> None:
        """Leave the group; idempotent. Peers are notified, so that none waits for this rank."""
        with self._engine.lock:
            if self._closed:
                return
            self._closed = True
            if self._calls and self.failure is None and self.inner.failure_detector is not None:
                # UCC's collective ends on no rank without this rank's progress. Peers may be in it
                # although this rank has not looked yet at what they agreed on.
                rank = self.team.rank
                text = f"rank {rank} of group {self.name!r} has left in the middle of a collective"
                self.inner.failure_detector.abort(PeerLost(text, rank=rank, group=self.name))
            text = f"group {self.name!r} has been closed on rank {self.team.rank}"
            self.fail(GroupClosed(text, group=self.name), notify=False)
        self._engine.leave(self)
        self.team.context.end()  # without the lock: it waits for other ranks
        self.inner.close()

    def free(self) -> bool:
        """Destroy a closed group's team, without blocking; return whether it is gone."""
        if self._stuck:
            return True  # a team with requests in flight can't be destroyed
        try:
            return self.team.destroyed()
        except UCCError as error:
            _log.warning("group %r: UCC could not destroy its team: %s", self.name, error)
            return True

    def stop_listening(self) -> None:
        """Do nothing: a team that UCC has not destroyed yet ends with the process."""
