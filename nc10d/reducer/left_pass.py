"""A pass that this rank has left by an exception, and how the other ranks learn of it.

Contract: before its next call in the group, the rank launches an all_reduce without elements, whose
purpose names the pass. If every rank has left the pass at the same place, these calls meet, and the
group goes on. A peer that has not left the pass makes another call there: a CollectiveMismatch on
every rank, whose text has the purpose.

The call is not launched at once. So if the exception ends the program, peers learn of it as the
reason, as for any rank that leaves a group.
"""

from __future__ import annotations

import threading

import numpy as np

from nc10d.arrays.buffer import device_type
from nc10d.base.signal_errors import suppress_here
from nc10d.errors import DistError
from nc10d.group.host_calls import HostCalls
from nc10d.group.process_group import ProcessGroup
from nc10d.ops import SUM, AllReduce, Array
from nc10d.reducer.hooks.grad_bucket import require_work
from nc10d.work import Work


class LeftPass:
    """Lets the ranks of `group` agree that all have left `what`, such as "pass 3 of reducer 1".

    `nothing` is an array without elements on the device that the pass's calls use; None: the host.
    """

    def __init__(self, group: ProcessGroup, what: str, nothing: Array = None) -> None:
        self.error = RuntimeError(f"an exception in {what}")
        self._group = group
        self._nothing = np.zeros(0, np.uint8) if nothing is None else nothing
        self._work: Work | None = None
        self._told, self._lock = False, threading.RLock()
        if hasattr(group, "observe"):
            self._stop = group.observe(self._before_call)
        else:  # a user's own kind of group
            self._stop = lambda: None
            self._tell()

    def _before_call(self, *_: object) -> None:
        self._tell()

    def _tell(self) -> None:
        with self._lock:  # any thread may make the next call
            if self._told:
                return
            self._told = True
            self._stop()
            with suppress_here(DistError):  # the group has failed, so its ranks know
                self._work = self._launch()

    def _launch(self) -> Work | None:
        group, x = self._group, self._nothing
        op = SUM.meant_for(str(self.error))
        if not hasattr(group, "launch"):
            return group.all_reduce(x, op, async_op=True)
        if device_type(x) == "cpu":
            return HostCalls(group).all_reduce(x, op, async_op=True)
        return group.launch((AllReduce(x, op),), device_type(x), True)

    def wait(self) -> None:
        """Block until every rank has left the pass; CollectiveMismatch if one has not."""
        self._tell()
        require_work(self._work or self._launch()).wait()
