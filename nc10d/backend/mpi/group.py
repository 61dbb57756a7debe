"""One group's traffic: its calls in order, its messages, and whether it still works.

Two communicators of the same ranks: `comm` carries data, `control` the questions whether all ranks
made the same call, and notices. A question is asked when a call is launched, its data follows when
all have answered and every earlier call is over, so the order of requests on each communicator is
the order of launch on every rank. Messages run beside.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from nc10d.backend.mpi.call_check import CallCheck, describe, exchanged_texts, mismatch
from nc10d.backend.mpi.control import FAILED, LEFT, MOST_BYTES, MpiControl
from nc10d.backend.mpi.dependencies import Dependencies, dependencies_of
from nc10d.backend.mpi.leaving import LeaveProtocol
from nc10d.backend.mpi.library import MPI, Comm, Steps, error_from, keep
from nc10d.backend.mpi.message_queue import MessageQueue
from nc10d.backend.mpi.mpi_collectives import steps
from nc10d.backend.mpi.progress_thread import ProgressThread
from nc10d.backend.mpi.tasks import MessageTask, MpiWork, Task, after, side_by_side
from nc10d.base import error_wire
from nc10d.base.deadline import Deadline
from nc10d.base.outcome import fresh
from nc10d.errors import CollectiveTimeout, DistError, GroupClosed, PeerLost
from nc10d.ops import Op, Recv, Send
from nc10d.work import Work

_NOTHING: frozenset[int] = frozenset()
_EVERY = 8
"""One look in so many is for what is rare: notices, departures, deadlines."""


class MpiGroup:
    """One rank's side of one group. The engine's lock is held by whoever is inside."""

    def __init__(
        self, name: str, comm: Comm, control: Comm, any_order: bool, engine: ProgressThread
    ) -> None:
        self.name = name
        self.comm = comm
        self.failure: DistError | None = None
        self._control = control
        self._any_order = any_order
        self._engine = engine
        self._mail = MessageQueue(comm)
        self._notices = MpiControl(control)
        self._departures = LeaveProtocol(self._mail, comm.rank, comm.size)
        self._seq = itertools.count(1)
        self._calls: deque[Task] = deque()
        self._messages: list[MessageTask] = []
        self._looks = 0
        self._closed = self._whole = False
        engine.join(self)

    # -- launching -------------------------------------------------------------------------

    def launch(self, ops: Sequence[Op], deadline: Deadline) -> Work:
        """Start validated operations; raises the group's failure if it has one."""
        together = [n for n, op in enumerate(ops) if not isinstance(op, (Send, Recv))]
        apart = [n for n, op in enumerate(ops) if isinstance(op, (Send, Recv))]
        work = MpiWork(ops, self._engine, len(apart) + bool(together))
        waits = dependencies_of(ops)
        with self._engine.lock:
            self._hear()
            self.check()
            if together:
                self._call(work, together, waits, deadline)
            for place in apart:
                self._message(work, place, waits.get(place, _NOTHING), deadline)
        return work

    def check(self) -> None:
        """Raise the group's failure, if there is one."""
        if self.failure is not None:
            raise fresh(self.failure) from None  # it was never raised here: once is enough

    def _call(
        self, work: MpiWork, places: Sequence[int], waits: Dependencies, deadline: Deadline
    ) -> None:
        task = Task(work, places, deadline, next(self._seq))
        self._calls.append(task)
        self._begin(task, self._agreed(work, places, waits, task.seq))

    def _agreed(self, work: MpiWork, places: Sequence[int], waits: Dependencies, seq: int) -> Steps:
        """Ask whether all ranks make this call, then make it."""
        ops = [work.ops[place] for place in places]
        agreement = CallCheck(describe(ops), bool(waits))
        yield [agreement.ask(self._control)]
        if not agreement.reached:
            mine, everybody = exchanged_texts(agreement.text, self.comm.size)
            yield [self.comm.Iallgather(mine, everybody)]
            raise mismatch(everybody, seq, self.name)
        parts = [steps(self.comm, op, self._any_order) for op in ops]
        if agreement.one_by_one:  # a single call too may have to wait, for messages before it
            yield from self._one_by_one(work, places, parts, waits)
        elif len(parts) == 1:
            yield from parts[0]
        else:
            yield from side_by_side(parts)

    def _one_by_one(
        self, work: MpiWork, places: Sequence[int], parts: Sequence[Steps], waits: Dependencies
    ) -> Steps:
        """Make the calls of a block one after another; messages of it may come between."""
        for place, part in zip(places, parts, strict=True):
            while not waits.get(place, _NOTHING) <= work.over:
                yield None
            yield from part
            work.over.add(place)

    def _message(
        self, work: MpiWork, place: int, earlier: frozenset[int], deadline: Deadline
    ) -> None:
        message = MessageTask(work, place, deadline)
        first = self._mail.steps(message.op, message.status)
        if earlier or self._held(message):
            first = after(lambda: earlier <= work.over and not self._held(message), first)
        self._messages.append(message)
        self._begin(message, first)

    def _held(self, message: MessageTask) -> bool:
        """Say whether an earlier message that must not be overtaken has not begun."""
        before = itertools.takewhile(lambda other: other is not message, self._messages)
        return any(map(message.must_follow, before))

    def _begin(self, task: Task, first: Steps) -> None:
        try:
            task.begin(first)
        except MPI.Exception as error:
            self.fail(error_from(error, task.work.describe()))

    # -- going on --------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether something is on its way."""
        return bool(self._calls or self._messages)

    def advance(self) -> None:
        """Go as far as MPI allows; never blocks."""
        if not self.busy:
            return
        self._looks += 1
        if self._looks % _EVERY == 0:
            self._hear()
            self._look_for_trouble()
        while self._calls and self._over(self._calls[0]):
            self._calls.popleft()
        if self._messages:
            self._mail.listen()
            for message in tuple(self._messages):
                if self._over(message):
                    self._messages.remove(message)

    def _over(self, task: Task) -> bool:
        """Advance a task; True if it is over. What goes wrong in it fails the group."""
        if self.failure is not None:
            return False
        try:
            if not task.advance():
                return False
        except MPI.Exception as error:
            self.fail(error_from(error, task.work.describe()))
            return False
        except DistError as error:
            self.fail(error)
            return False
        except Exception as error:  # noqa: BLE001  (whatever it is: peers must not wait for it)
            self.fail(DistError(f"{task.work.describe()}: {type(error).__name__}: {error}"))
            return False
        if task.work.one_over(task.places, task.result):
            self._engine.end(task.work, None, task.work.outcome())
        return True

    def _look_for_trouble(self) -> None:
        """Fail the group if a task needs a rank that has left, or is late."""
        tasks = (*self._calls, *self._messages)
        missed = self._departures.missed(tasks)
        if missed is not None:
            task, rank = missed
            text = f"{task.work.describe()}: rank {rank} of group {self.name!r} has left"
            self.fail(PeerLost(text, rank=rank, **self._about(task)))
            return
        now = time.monotonic()
        late = next((task for task in tasks if task.deadline.at <= now), None)
        if late is not None:
            rank = self.comm.rank
            text = f"{late.work.describe()} timed out on rank {rank} of group {self.name!r}"
            self.fail(CollectiveTimeout(text, rank=rank, **self._about(late)))

    def _about(self, task: Task) -> dict[str, Any]:
        return {"group": self.name, "op": task.work.describe(), "seq": task.seq or None}

    def _hear(self) -> None:
        for source, kind, text in self._notices.hear():
            if kind == FAILED:
                self.fail(error_wire.read(text), tell=False)
            elif kind == LEFT:
                self._departures.heard(source, text)

    # -- ending ----------------------------------------------------------------------------

    def fail(self, error: DistError, tell: bool = True) -> None:
        """Fail all that is on its way and all that comes; the first reason stays."""
        if self.failure is not None:
            return
        error.group = error.group or self.name
        self.failure = error
        if tell:
            self._notices.tell_all(FAILED, error_wire.written(error, MOST_BYTES))
        for message in self._messages:
            message.cancel()
        for task in (*self._calls, *self._messages):
            self._engine.end(task.work, error)
            keep(task)
        self._calls.clear()
        self._messages = []

    def close(self) -> None:
        """Leave the group; idempotent. Peers are told, for what they may need of this rank."""
        with self._engine.lock:
            if self._closed:
                return
            self._closed = True
            self._whole = self.failure is None and not self.busy
            if self.failure is None:
                done = self._calls[0].seq - 1 if self._calls else next(self._seq) - 1
                self._notices.tell(LEFT, self._departures.farewell(done))
                text = f"group {self.name!r} has been closed on rank {self.comm.rank}"
                self.fail(GroupClosed(text, group=self.name), tell=False)
        self._engine.leave(self)

    def let_go(self) -> bool:
        """Free the communicators of a closed group if nothing can come any more; say whether.

        MPI uses a freed communicator's number again, so a late message would reach a later group.
        """
        self._hear()
        if not (self._whole and self._departures.complete()):
            return False
        self._notices.close()
        self.comm.Free()
        self._control.Free()
        return True

    def stop_listening(self) -> None:
        """Take back what MPI would wait for at its end."""
        self._notices.close()
