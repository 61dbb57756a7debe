"""A backend over a polled library: runs launches on a PolledGroup, and ends that group."""

from __future__ import annotations

import os
from collections.abc import Sequence

from nc10d.backend.polled.polled_group import PolledGroup
from nc10d.backend.polled.progress_thread import ProgressThread
from nc10d.backend.protocol import Backend
from nc10d.base.deadline import Deadline
from nc10d.errors import Aborted, DistError
from nc10d.ops import Op
from nc10d.work import Work


class PolledBackend(Backend):
    """The common part of the backends over polled libraries; a docstring states if it blocks."""

    _group: PolledGroup
    _engine: ProgressThread

    def _run(self, ops: Sequence[Op], timeout: float, async_op: bool) -> Work | None:
        """Run checked operations; blocks without `async_op`. An interrupt aborts the group."""
        work = self._group.launch(ops, Deadline.after(timeout))
        if async_op:
            self._engine.need_thread()
            return work
        try:
            work.wait()
        except BaseException:
            if not work.is_completed():
                self.abort(self._interrupted(work))
            raise
        return None

    def _interrupted(self, work: Work) -> Aborted:
        """Return a group's error after an interrupt, such as Ctrl-C, on this rank."""
        name = work._describe()
        text = f"rank {self.rank} was interrupted in {name}"
        return Aborted(text, rank=self.rank, pid=os.getpid(), group=self._group.name, op=name)

    def abort(self, reason: BaseException) -> None:
        """Fail the group with `reason` here, and on every peer at its next poll."""
        error = reason if isinstance(reason, DistError) else Aborted(str(reason))
        with self._engine.lock:
            self._group.fail(error)
        self._engine.finish_ended()

    def close(self) -> None:
        """Leave the group; idempotent. Operations still in flight fail with GroupClosed."""
        self._group.close()
