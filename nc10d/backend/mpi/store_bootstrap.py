"""How the ranks of an MPI job meet when nobody says how: MPI knows who and how many they are.

MPI itself needs no store; groups have one for their users and for other backends. Rank 0 hosts it
on a port of its choice, and MPI tells the others where.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence

from nc10d.backend.mpi.forming import wait_for_members
from nc10d.backend.mpi.library import MPI, require_threads
from nc10d.base.deadline import Deadline
from nc10d.errors import RendezvousError
from nc10d.store import HashStore, TCPStore
from nc10d.store.base import Store

_LONGEST = 10.0 * 365 * 86400  # seconds; for ever is more than a socket can hold


def meet(rank: int, size: int, deadline: Deadline) -> tuple[Store, int, int]:
    """Return a store that all of MPI's processes share, and rank and size as MPI has them.

    `rank` and `size` are what the caller expects (negative: nothing); RendezvousError if MPI says
    otherwise, or made a world of one where another launcher started more. The store's host is
    MASTER_ADDR if set, else what rank 0's machine calls itself. Blocks until all have come;
    RendezvousError names those who have not by `deadline`.
    """
    require_threads()
    world = MPI.COMM_WORLD
    if (rank >= 0 and rank != world.rank) or (size > 0 and size != world.size):
        raise RendezvousError(
            f"MPI made this process rank {world.rank} of {world.size}, not rank {rank} of {size}: "
            "start it with mpirun, or give a store to use ranks of your own"
        )
    if world.size == 1:
        if size <= 0:  # nobody says that this is meant
            _check_alone()
        return HashStore(), 0, 1
    store = _Host(min(deadline.remaining(), _LONGEST))
    mine = MPI.Get_processor_name().encode()
    told = wait_for_members(world, range(world.size), "the store", deadline, mine, store.start)
    host, port = json.loads(told)
    return store.mine or TCPStore(host, port, timeout=store.timeout), world.rank, world.size


def _check_alone() -> None:
    """Refuse a world of one process where WORLD_SIZE, as other launchers set it, says more."""
    told = os.environ.get("WORLD_SIZE", "1")
    if told != "1":
        raise RendezvousError(
            f"WORLD_SIZE is {told}, and MPI has this process alone: the mpi backend's ranks are "
            "started by MPI's mpirun, not by torchrun or nc10d.run (unset WORLD_SIZE for a world "
            "of one)"
        )


class _Host:
    """Starts the store on rank 0, when all are there."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.mine: Store | None = None

    def start(self, machines: Sequence[bytes]) -> bytes:
        """Start the store; return what the others need to reach it."""
        alone = len(set(machines)) == 1
        host = "127.0.0.1" if alone else os.environ.get("MASTER_ADDR") or socket.gethostname()
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=self.timeout)
        self.mine = store
        return json.dumps([host, store.port]).encode()
