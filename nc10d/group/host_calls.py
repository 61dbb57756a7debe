"""Calls on small host arrays, in a group with any devices.

A group without a backend for host arrays has a failure detector, which is a backend for them: what
nc10d itself has to exchange goes that way. Users' own host arrays are refused there, as in c10d.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nc10d import ops
from nc10d.backend.config import FAILURE_DETECTOR
from nc10d.ops import SUM, Array, Op, ReduceOp
from nc10d.work import Work

if TYPE_CHECKING:
    from nc10d.group.process_group import ProcessGroup


class HostCalls:
    """Some collectives of `group` on NumPy arrays; as the group's own methods with these names."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.rank, self.size = int(group.rank), int(group.size)
        places = group.config.places
        self._place = "cpu" if FAILURE_DETECTOR not in places else FAILURE_DETECTOR

    def all_reduce(self, x: Array, op: ReduceOp = SUM, async_op: bool = False) -> Work | None:
        """Reduce `x` over the group in place."""
        return self._run(ops.AllReduce(x, op), async_op)

    def broadcast(self, x: Array, src: int, async_op: bool = False) -> Work | None:
        """Overwrite `x` by rank `src`'s."""
        return self._run(ops.Broadcast(x, src), async_op)

    def all_gather_into_tensor(self, out: Array, inp: Array, async_op: bool = False) -> Work | None:
        """Fill `out` with every rank's `inp`."""
        return self._run(ops.AllGather(out, inp), async_op)

    def all_gather(self, out: Sequence[Array], inp: Array, async_op: bool = False) -> Work | None:
        """Fill each array of `out` with a rank's `inp`; their sizes may differ."""
        return self._run(ops.AllGather(out, inp), async_op)

    def _run(self, op: Op, async_op: bool) -> Work | None:
        return self.group.launch((op,), self._place, async_op)


def on_host(group: ProcessGroup) -> ProcessGroup | HostCalls:
    """Return the group if it has a backend for host arrays, else HostCalls on the group."""
    config = getattr(group, "config", None)  # objects that stand for a group take host arrays
    return group if config is None or "cpu" in config.devices else HostCalls(group)
