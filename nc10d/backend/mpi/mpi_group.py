"""A group's traffic on MPI: call checks, messages, and notices of ranks that fail or leave.

A group has two communicators of the same ranks. `comm` carries data; `control` carries call checks
and control messages. A call check starts when a call is launched, the call's data follows.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

from nc10d.arrays.call_info import CallInfo
from nc10d.backend.mpi.call_check import CallCheck, exchanged_texts, mismatch
from nc10d.backend.mpi.control import FAILED, LEFT, MOST_BYTES, LeaveProtocol, MpiControl
from nc10d.backend.mpi.library import MPI, Comm, Request, error_from
from nc10d.backend.mpi.message_queue import MessageQueue, Receive
from nc10d.backend.mpi.mpi_requests import MpiCalls
from nc10d.backend.polled.flat_buffers import keep
from nc10d.backend.polled.launches import MessageTask, Steps, Task
from nc10d.backend.polled.polled_group import PolledGroup
from nc10d.backend.polled.progress_thread import progress_thread
from nc10d.base import error_wire
from nc10d.errors import DistError, PeerLost
from nc10d.ops import MessageInfo

# The engine ends at exit before mpi4py finalises MPI: no thread may call MPI then.
engine = progress_thread("nc10d-mpi")
"""Advances this process's groups on MPI."""


class MpiGroup(PolledGroup):
    """A rank's side of a group on MPI."""

    def __init__(self, name: str, comm: Comm, control: Comm, any_order: bool) -> None:
        self.comm = comm
        self._control_comm = control
        self._message_queue = MessageQueue(comm)
        self._control = MpiControl(control)
        self._leave_protocol = LeaveProtocol(self._message_queue, comm.rank, comm.size)
        self._drained_at_close = False
        super().__init__(name, MpiCalls(comm, any_order), engine)

    def probe(self, peer: int | None, tag: int | None) -> MessageInfo | None:
        """Return a message that has arrived; raises the group's failure, if any."""
        self.check()
        with self._engine.lock:
            return self._message_queue.probe(peer, tag)

    def _agree(
        self, task: Task, call: CallInfo, conflict: bool
    ) -> Generator[Sequence[Request], None, bool]:
        check = CallCheck(call, conflict)
        yield [check.ask(self._control_comm)]
        if not check.agrees:
            own_text, texts = exchanged_texts(call, self.comm.size)
            yield [self.comm.Iallgather(own_text, texts)]
            raise mismatch(texts, task.seq, self.name)
        return check.is_sequential

    def _message_steps(self, message: MessageTask) -> Steps:
        return self._message_queue.steps(message.op)

    def _requests_ended(self, requests: Sequence[Request]) -> bool:
        if isinstance(requests[0], Receive):
            return requests[0].ended()
        return bool(MPI.Request.Testall(requests))

    def advance(self) -> None:
        """Advance calls and messages without blocking; their errors fail the group."""
        if self._messages:
            self._message_queue.accept_announcements()
        super().advance()

    def _error_of(self, error: Exception, task: Task) -> DistError:
        if isinstance(error, MPI.Exception):
            error = error_from(error, task.work._describe())
        return super()._error_of(error, task)

    def _look_at_peers(self) -> None:
        for source, kind, text in self._control.received():
            if kind == FAILED:
                self.fail(error_wire.decode_error(text), notify=False)
            elif kind == LEFT:
                self._leave_protocol.record_leave(source, text)

    def _check_tasks(self) -> None:
        blocked = self._leave_protocol.blocked_task((*self._calls, *self._messages))
        if blocked is not None:
            task, rank = blocked
            reason = f"{task.work._describe()}: rank {rank} of group {self.name!r} has left"
            self.fail(PeerLost(reason, rank=rank, **self._about(task)))
        super()._check_tasks()

    def _notify_peers(self, error: DistError) -> DistError:
        self._control.broadcast(FAILED, error_wire.encode_error(error, MOST_BYTES))
        return error

    def _drop(self, task: Task) -> None:
        for request in task.requests:
            if isinstance(request, Receive):  # the caller may reuse the array
                request.cancel()
        keep(task)

    def _notify_of_departure(self) -> None:
        self._drained_at_close = not self.busy
        done = self._calls[0].seq - 1 if self._calls else next(self._seq) - 1
        self._control.send(LEFT, self._leave_protocol.leave_notices(done))

    def free(self) -> bool:
        """Free a closed group's communicators if no message can arrive any more; return whether."""
        # MPI reuses a freed communicator's number, so a late message would reach a later group.
        self._look_at_peers()
        if not (self._drained_at_close and self._leave_protocol.all_left()):
            return False
        self._control.close()
        self.comm.Free()
        self._control_comm.Free()
        return True

    def stop_listening(self) -> None:
        """Cancel the receive that MPI_Finalize would wait for."""
        self._control.close()
