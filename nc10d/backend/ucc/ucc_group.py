"""A group's traffic on UCC, beside a CPU backend that carries messages and detects dead ranks.

Ranks agree on a call in a small all_reduce of the CPU backend, which also shows if any rank's
arrays make a block's operations depend on each other.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from nc10d.arrays.call_info import CallInfo
from nc10d.backend.abilities import cause_of
from nc10d.backend.polled.flat_buffers import keep
from nc10d.backend.polled.launches import MessageTask, Steps, Task
from nc10d.backend.polled.polled_group import PolledGroup
from nc10d.backend.polled.progress_thread import progress_thread
from nc10d.backend.protocol import Backend
from nc10d.backend.ucc.team import UccTeam
from nc10d.backend.ucc.ucc_requests import UccCalls, UccRequest
from nc10d.errors import DistError, PeerLost, UCCError
from nc10d.ops import MIN, AllReduce, Op, Recv
from nc10d.work import Work

engine = progress_thread("nc10d-ucc")
"""Advances this process's groups on UCC."""
_log = logging.getLogger(__name__)


class InnerWork:
    """A Work of the CPU backend as a request that a step waits for."""

    __slots__ = ("work",)

    def __init__(self, inner: Backend, op: Op, timeout: float) -> None:
        """Launch an operation that has `timeout` seconds."""
        work = inner.launch([op], timeout, True)
        assert work is not None, "an asynchronous launch returns a Work"
        self.work: Work = work

    def ready(self) -> bool:
        """Return whether the Work has ended; raises the Work's error."""
        if not self.work.is_completed():
            return False
        error = self.work.exception()
        if error is not None:
            raise error
        return True


class UccGroup(PolledGroup):
    """A rank's side of a group on UCC; closes `inner`, the CPU backend."""

    def __init__(self, name: str, team: UccTeam, inner: Backend, any_order: bool) -> None:
        self.team, self.inner = team, inner
        self._detector = inner.failure_detector
        self._stuck = False
        super().__init__(name, UccCalls(team, any_order), engine)

    def holds_messages_back(self) -> bool:
        """Return whether a message waits for a collective: no later message may overtake it."""
        return any(not message.requests for message in self._messages)

    def _agree(
        self, task: Task, call: CallInfo, conflict: bool
    ) -> Generator[Sequence[InnerWork] | None, None, bool]:
        if task is not self._calls[0]:
            # Where ranks do not agree, the CPU backend fails the group at once: earlier calls, too.
            yield None
        free = np.array([not conflict], np.int8)
        same = AllReduce(free, MIN.meant_for(f"UCC: {call.describe()}"))
        agreement = InnerWork(self.inner, same, task.deadline.remaining())
        task.work.agreement = agreement.work
        yield [agreement]
        return not free[0]

    def _message_steps(self, message: MessageTask) -> Steps:
        inner = InnerWork(self.inner, message.op, message.deadline.remaining())
        yield [inner]
        return inner.work.result() if isinstance(message.op, Recv) else None

    def _requests_ended(self, requests: Sequence[Any]) -> bool:
        if isinstance(requests[0], UccRequest):
            self.team.context.progress()
        return all(request.ready() for request in requests)

    def _look_at_peers(self) -> None:
        # The CPU backends of all ranks have agreed on the error.
        found = None if self._detector is None else cause_of(self._detector)
        if found is not None:
            self.fail(found, notify=False)

    def _check_tasks(self) -> None:
        # The CPU backend keeps a call's deadline until all ranks have agreed on the call.
        agreed = [task for task in self._calls if task.agreed]
        self._fail_overdue(agreed, ": all ranks had entered it, and UCC has not ended it")

    def _notify_peers(self, error: DistError) -> DistError:
        if self._detector is None:
            return error
        self._detector.abort(error)
        return cause_of(self._detector) or error

    def _drop(self, task: Task) -> None:
        if task.agreed:  # UCC may still write
            self._stuck = True
            keep(task)

    def _notify_of_departure(self) -> None:
        if self._calls and self._detector is not None:
            # UCC's collective ends on no rank without this rank's progress. Peers may be in the
            # collective although this rank has not looked yet at the agreed call.
            text = f"rank {self.rank} of group {self.name!r} has left in the middle of a collective"
            self._detector.abort(PeerLost(text, rank=self.rank, group=self.name))

    def close(self) -> None:
        """Leave the group; idempotent. Peers are notified, so that none waits for this rank.

        A context's last group waits until the other ranks end the context too, at most 5 seconds.
        """
        super().close()
        self.team.context.end()
        self.inner.close()

    def free(self) -> bool:
        """Destroy a closed group's team, without blocking; return whether the team is gone."""
        if self._stuck:
            return True  # a team with requests in flight can't be destroyed
        try:
            return self.team.destroyed()
        except UCCError as error:
            _log.warning("group %r: UCC could not destroy its team: %s", self.name, error)
            return True

    def stop_listening(self) -> None:
        """Do nothing: a team that UCC has not destroyed yet ends with the process."""
