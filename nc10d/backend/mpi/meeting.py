"""How the ranks of an MPI job meet when nobody says how: MPI knows who and how many they are.

MPI itself needs no store; groups have one for their users and for other backends. Rank 0 hosts it
on a port of its choice, and MPI tells the others where.
"""

from __future__ import annotations

import os
import socket

from nc10d.backend.mpi.library import MPI, require_threads
from nc10d.deadline import Deadline
from nc10d.errors import DistError, RendezvousError
from nc10d.store.base import Store

_LONGEST = 10.0 * 365 * 86400  # seconds; for ever is more than a socket can hold


def meet(rank: int, size: int, deadline: Deadline) -> tuple[Store, int, int]:
    """Return a store that all of MPI's processes share, and rank and size as MPI has them.

    `rank` and `size` are what the caller expects (negative: nothing); RendezvousError if MPI says
    otherwise. The store's host is MASTER_ADDR if set, else what rank 0's machine calls itself.
    Blocks until all have come, for which MPI has no timeout; `deadline` is the store's.
    """
    require_threads()
    world = MPI.COMM_WORLD
    if (rank >= 0 and rank != world.rank) or (size > 0 and size != world.size):
        raise RendezvousError(
            f"MPI made this process rank {world.rank} of {world.size}, not rank {rank} of {size}: "
            "start it with mpirun, or give a store to use ranks of your own"
        )
    if world.size == 1:
        from nc10d.store import HashStore

        return HashStore(), 0, 1
    return _shared(min(deadline.remaining(), _LONGEST)), world.rank, world.size


def _shared(timeout: float) -> Store:
    from nc10d.store import TCPStore

    world = MPI.COMM_WORLD
    one_host = world.Split_type(MPI.COMM_TYPE_SHARED)
    alone = one_host.size == world.size
    one_host.Free()
    host = "127.0.0.1" if alone else os.environ.get("MASTER_ADDR") or socket.gethostname()
    store: Store | None = None
    failure = ""
    if world.rank == 0:
        try:
            store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        except (DistError, OSError) as error:
            failure = str(error)  # told before it is raised: the others are waiting
    host, port, failure = world.bcast((host, getattr(store, "port", 0), failure))
    if failure:
        raise RendezvousError(f"rank 0 could not host the store: {failure}", rank=0)
    return store or TCPStore(host, port, timeout=timeout)
