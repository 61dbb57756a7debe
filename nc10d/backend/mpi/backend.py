"""The MPI backend: hands validated operations to an MpiGroup, and makes communicators."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nc10d.arrays.validate import validate
from nc10d.backend.mpi.buffers import check_devices
from nc10d.backend.mpi.forming import wait_for_members
from nc10d.backend.mpi.library import MPI, Comm, require_threads, serialized
from nc10d.backend.mpi.mpi_group import MpiGroup, engine
from nc10d.backend.polled.polled_backend import PolledBackend
from nc10d.backend.protocol import BackendSetup
from nc10d.base.deadline import Deadline
from nc10d.base.stored import read_number
from nc10d.base.text import ranks_text
from nc10d.base.wait_report import WaitReport
from nc10d.errors import RendezvousError
from nc10d.ops import MessageInfo, Op
from nc10d.store.arrival import await_ranks
from nc10d.store.base import Store
from nc10d.work import Work


@dataclass(frozen=True, slots=True)
class MpiOptions:
    """`pg_options` of a group on MPI.

    With `any_order`, MPI's own algorithms may choose the order in which floats are summed. Results
    are then equal on all ranks only if that MPI makes them so, and may differ from those of other
    backends in the last bits. For many ranks on a fast network such algorithms are faster.
    """

    any_order: bool = False


def make(setup: BackendSetup) -> MpiBackend:
    """Make the backend of a job's first group; blocks until all ranks have arrived.

    RendezvousError if a rank is late, or if MPI has fewer processes than the group has ranks.
    """
    require_threads()
    options = setup.options or MpiOptions()
    world = MPI.COMM_WORLD
    if setup.size > world.size:
        raise RendezvousError(
            f"group {setup.group_name!r} has {setup.size} ranks, and MPI has {world.size}: start "
            f"the program with mpirun -n {setup.size}"
        )
    if setup.size == world.size:
        wait_for_members(world, range(world.size), setup.group_name, setup.deadline)
        with _blocking_calls():
            comm = world.Split(0, setup.rank)
    else:
        comm = _create_from_processes(setup)
    return MpiBackend(setup.group_name, comm, options)


def _create_from_processes(setup: BackendSetup) -> Comm:
    """Make the communicator of some of MPI's processes, which exchange ranks over the store."""
    setup.store.set(f"mpi/{setup.rank}", str(MPI.COMM_WORLD.rank))
    keys = [f"mpi/{rank}" for rank in range(setup.size)]
    report = WaitReport(f"rank {setup.rank} of {setup.size}", setup.deadline)

    def missing(ranks: Sequence[int]) -> str:
        return f"{ranks_text(ranks)} did not come to the group {setup.group_name!r}"

    await_ranks(setup.store, keys, report, missing, setup.deadline)
    texts, last = setup.store.multi_get(keys), MPI.COMM_WORLD.size - 1
    members = [read_number(*pair, 0, last) for pair in zip(keys, texts, strict=True)]
    return _create(MPI.COMM_WORLD, members, setup.group_name, setup.deadline)


def _create(
    comm: Comm,
    members: Sequence[int],
    name: str,
    deadline: Deadline,
    check: Callable[[], None] = lambda: None,
) -> Comm:
    """Make the communicator of some ranks of `comm`; only `members` call."""
    wait_for_members(comm, members, name, deadline, check=check)
    # The tag distinguishes groups that different threads make at the same time.
    with _blocking_calls():
        return comm.Create_group(comm.Get_group().Incl(members), zlib.crc32(name.encode()) % 32768)


def _blocking_calls() -> contextlib.AbstractContextManager[object]:
    """Return what surrounds blocking calls of MPI: where threads take turns, the others wait."""
    return engine.lock if serialized() else contextlib.nullcontext()


class MpiBackend(PolledBackend):
    """A group's operations by MPI; a method's docstring states if it blocks."""

    name = "mpi"
    device_type = "cpu"
    _engine = engine
    _group: MpiGroup

    def __init__(self, group_name: str, comm: Comm, options: MpiOptions) -> None:
        self.rank: int = comm.rank
        self.size: int = comm.size
        with _blocking_calls():
            control = comm.Dup()
        self._group = MpiGroup(group_name, comm, control, options.any_order)

    def launch(self, ops: Sequence[Op], timeout: float, async_op: bool) -> Work | None:
        """Run `ops`; see Backend. Operations that MPI can't run raise before anything is sent."""
        ops = [validate(op, self.rank, self.size) for op in ops]
        check_devices(ops)
        return self._run(ops, timeout, async_op)

    def probe(self, peer: int | None, tag: int | None, deadline: Deadline) -> MessageInfo | None:
        """Return the next message; see Backend."""
        found = self._group.probe(peer, tag)
        waiting = Work()  # never ends: engine.pause waits as for any other Work
        polls = 0
        while found is None and not deadline.expired():
            polls += 1
            engine.pause(waiting, polls, deadline)
            found = self._group.probe(peer, tag)
        return found

    def split(
        self, ranks: Sequence[int], name: str, store: Store, deadline: Deadline, options: Any = None
    ) -> MpiBackend:
        """Make the backend for a subgroup of `ranks`; blocks until all have arrived."""
        self._group.check()
        # While ranks wait, the group may fail: because others make another call, for example.
        comm = _create(self._group.comm, ranks, name, deadline, self._group.check)
        return MpiBackend(name, comm, options or MpiOptions())
