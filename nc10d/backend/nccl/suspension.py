"""A group's communicators give up their device memory for a while, and tell how much they have.

A suspended group keeps ranks, streams and registered arrays; a launch is a ValueError. Each rank's
calls run in the order of communicators' names, so that no two ranks wait for each other in
different communicators.
"""

from __future__ import annotations

from dataclasses import dataclass

from nc10d.backend.nccl.backend import NcclBackend
from nc10d.backend.nccl.bindings.header_table import CONSTANTS, FUNCTIONS
from nc10d.backend.nccl.comm.comm_streams import COLLECTIVES
from nc10d.base.deadline import Deadline
from nc10d.errors import DistError

_SUSPEND, _RESUME = "ncclCommSuspend", "ncclCommResume"


@dataclass(frozen=True, slots=True)
class MemoryStats:
    """The device memory that this rank's communicators hold, in bytes.

    `suspendable` is what `suspend` gives up, `persistent` the rest, `total` both.
    """

    suspendable: int
    persistent: int
    total: int
    suspended: bool


def suspend(backend: NcclBackend, deadline: Deadline) -> None:
    """Wait for the operations in flight, then release what NCCL can; all ranks call."""
    _require(backend, _SUSPEND)
    if backend.started.refusal is not None:
        raise ValueError(backend.started.refusal)
    backend.started.formed(COLLECTIVES, deadline)  # a group without operations has none yet
    backend.started.pending.drain(deadline)  # while deferred launches can still be submitted
    backend.started.refuse(f"group {backend.group_name!r} is suspended: resume it first")
    try:
        backend.started.pending.drain(deadline)
        backend.started.meet("suspending", deadline)
    except BaseException:
        backend.started.accept()
        raise
    _turn(backend, _SUSPEND, deadline, CONSTANTS["NCCL_SUSPEND_MEM"])


def resume(backend: NcclBackend, deadline: Deadline) -> None:
    """Take a suspended group's memory again; all ranks call."""
    _require(backend, _RESUME)
    if backend.started.refusal is None:
        raise ValueError(f"group {backend.group_name!r} is not suspended")
    backend.started.meet("resuming", deadline)
    _turn(backend, _RESUME, deadline)
    backend.started.accept()


def memory_stats(backend: NcclBackend) -> MemoryStats:
    """Return the memory of formed communicators; blocks for no other rank."""
    _require(backend, "ncclCommMemStats")
    comms = [each.comm for each in backend.started.comm_streams.all() if each.comm is not None]

    def sums(which: str) -> int:
        return sum(comm.memory_stat(f"ncclStatGpuMem{which}") for comm in comms)

    return MemoryStats(sums("Suspend"), sums("Persist"), sums("Total"), sums("Suspended") > 0)


def _require(backend: NcclBackend, name: str) -> None:
    backend.library.require(FUNCTIONS[name].since, name)


def _turn(backend: NcclBackend, name: str, deadline: Deadline, *flags: int) -> None:
    """Make a call with every communicator; a failure leaves them different, and ends the group."""
    try:
        for comm_stream in backend.started.comm_streams.settled():
            comm_stream.formed.call_with_all(name, deadline, *flags)
    except DistError as error:
        backend.fail(error)
        raise
