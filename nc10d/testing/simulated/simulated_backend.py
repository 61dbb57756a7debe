"""Simulated ranks' backend, over their network."""

# ruff: noqa: D102  (Backend documents the methods)
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nc10d import ops as O
from nc10d.arrays.validate import validate
from nc10d.backend.protocol import BackendSetup
from nc10d.backend.registry import register_backend
from nc10d.base.call_site import called, here
from nc10d.base.deadline import Deadline
from nc10d.base.promise import copy_to_raise
from nc10d.base.text import ranks_text
from nc10d.errors import PeerLost, RendezvousError
from nc10d.store.base import Store
from nc10d.testing.local_backend import LocalBackend, _PostedOp
from nc10d.testing.simulated.simulated_network import SimulatedHub, SimulatedWork
from nc10d.testing.simulated.survivors import SimulatedControl
from nc10d.work import Work


class SimulatedBackend(LocalBackend):
    """A simulated rank's backend."""

    name = "simulated"
    hub: SimulatedHub

    def __init__(self, hub: SimulatedHub, group_name: str, rank: int, size: int) -> None:
        super().__init__(hub, group_name, rank, size)
        task = hub.scheduler.current()
        assert task is not None, "a simulated rank is a task"
        self._task = task.number
        self._network = hub.exchange(group_name, size)
        self._network.members[rank] = task.number
        self.control: Any = SimulatedControl(self._network.survivors, rank, size)
        hub.scheduler.wake_all(hub.changed)

    def launch(self, ops: Sequence[O.Op], timeout: float, async_op: bool) -> Work | None:
        ops = [validate(op, self.rank, self.size) for op in ops]
        self.hub.scheduler.give_way("call")
        failure = self._closed or self._network.failure
        if failure is not None:
            raise copy_to_raise(failure)
        work = SimulatedWork(ops, self._network, timeout, self._task)
        for index, op in enumerate(ops):
            seq = self._next_seq(op)
            if seq is not None:
                self._network.announce(self.rank, seq, op)
            if self._network.failure is None:
                self._network.post(_PostedOp(self.rank, op, work, index), seq)
        if self._network.failure is not None:
            work._finish(self._network.failure)
        if async_op:
            return work
        work.wait()
        return None

    def probe(self, peer: int | None, tag: int | None, deadline: Deadline) -> O.MessageInfo | None:
        hub, found = self.hub, list[O.MessageInfo]()

        def ready() -> bool:
            message = self._network.probe(self.rank, peer, tag)
            found.extend([message] if message is not None else [])
            return bool(found) or self._network.failure is not None

        self._network.probes[self.rank] = peer, tag
        try:
            hub.scheduler.look()
            hub.waits[self._task] = called("probe", here())
            hub.scheduler.wait(ready, deadline.at, hub.changed)
        finally:
            hub.waits.pop(self._task, None)
            del self._network.probes[self.rank]
        if not found and self._network.failure is not None:
            raise copy_to_raise(self._network.failure)
        return found[0] if found else None

    def split(
        self, ranks: Sequence[int], name: str, store: Store, deadline: Deadline, options: Any = None
    ) -> SimulatedBackend:
        return SimulatedBackend(self.hub, name, ranks.index(self.rank), len(ranks))

    @property
    def shrinkable(self) -> SimulatedBackend:
        return self

    def gone(self) -> set[int]:
        """Return the ranks that are known to be dead, or have returned."""
        members = self._network.members
        returned = {rank for rank, task in members.items() if task in self.hub.returned}
        return returned | self._network.survivors.gone

    def shrink(
        self, ranks: Sequence[int], name: str, store: Store, deadline: Deadline
    ) -> SimulatedBackend:
        """Make the surviving ranks' backend, once all `ranks` have come."""
        new = SimulatedBackend(self.hub, name, ranks.index(self.rank), len(ranks))
        members, hub = new._network.members, self.hub

        def ready() -> bool:
            return len(members) == len(ranks) or bool(self.gone() & {*ranks})

        hub.scheduler.wait(ready, deadline.at, hub.changed)
        if len(members) < len(ranks):
            missing = [rank for place, rank in enumerate(ranks) if place not in members]
            if self.gone() & {*ranks}:
                raise PeerLost(f"{ranks_text(missing)} did not come", rank=missing[0])
            raise RendezvousError(f"{ranks_text(missing)} did not come in time", group=name)
        return new


def make(setup: BackendSetup) -> SimulatedBackend:
    """Make a rank's backend; `options` is the job's SimulatedHub."""
    return SimulatedBackend(setup.options, setup.group_name, setup.rank, setup.size)


register_backend("simulated", make, ["cpu"], options=(SimulatedHub,))
