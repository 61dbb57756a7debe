"""A backend that moves no data: every operation ends at once and needs no other rank.

For tracing, and for measuring the cost of the layers above. Arrays keep their values. `launched`
holds the operations of the latest launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nc10d.backend.protocol import Backend, BackendSetup
from nc10d.base.deadline import Deadline
from nc10d.base.run_to_end import import_to_end
from nc10d.errors import GroupClosed
from nc10d.ops import MessageInfo, Op, Recv
from nc10d.store.base import Store
from nc10d.work import Work


class FakeBackend(Backend):
    """Completes at once; fails at once after `abort` or `close`."""

    name = "fake"
    device_type = "any"

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.launched: Sequence[Op] = ()
        self._failure: BaseException | None = None

    def launch(self, ops: Sequence[Op], timeout: float, async_op: bool) -> Work | None:
        """Keep `ops` in `launched`; they have ended."""
        self._check()
        self.launched = ops
        if not async_op:
            return None
        work = Work(ops)
        senders = [self._sender(op) for op in ops]
        work._finish(None, senders if len(ops) > 1 else senders[0])
        return work

    def _sender(self, op: Op) -> int | None:
        """Return the sender that a receive reports: its `peer`, else the next rank."""
        if not isinstance(op, Recv):
            return None
        return (self.rank + 1) % self.size if op.peer is None else op.peer

    def probe(self, peer: int | None, tag: int | None, deadline: Deadline) -> MessageInfo | None:
        """Return an empty message from `peer`, else from the next rank."""
        self._check()
        return MessageInfo((self.rank + 1) % self.size if peer is None else peer, tag or 0, 0)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def split(
        self, ranks: Sequence[int], name: str, store: Store, deadline: Deadline, options: Any = None
    ) -> FakeBackend:
        """Make a fake for a group with these `ranks`."""
        return FakeBackend(ranks.index(self.rank), len(ranks))

    def abort(self, reason: BaseException) -> None:
        """Refuse all later operations with `reason`; the first reason stays."""
        self._failure = self._failure or reason

    def droppable(self) -> bool:
        """Return True: nothing is ever in flight."""
        return True

    def close(self) -> None:
        """Refuse all later operations."""
        self._failure = self._failure or GroupClosed("the fake backend is closed")


def meet(rank: int, size: int, deadline: Deadline) -> tuple[Store, int, int]:
    """Return a store of this process alone; rank and size are 0 and 1 unless given."""
    return import_to_end("nc10d.store.local").HashStore(), max(rank, 0), max(size, 1)


def make(setup: BackendSetup) -> FakeBackend:
    """Make the fake of one rank; waits for no other rank."""
    return FakeBackend(setup.rank, setup.size)
