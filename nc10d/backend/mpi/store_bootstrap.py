"""The store of an MPI job that was started without any: rank and size come from MPI.

MPI itself needs no store; groups have a store for their users and for other backends. Rank 0 hosts
it on a free port, and sends its address to the others over MPI.
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

_MAX_TIMEOUT = 10.0 * 365 * 86400  # seconds; a socket takes no infinite timeout


def meet(rank: int, size: int, deadline: Deadline) -> tuple[Store, int, int]:
    """Return a store that all of MPI's processes share, and rank and size as MPI has them.

    `rank` and `size` are the caller's expectations, negative if it has none. RendezvousError if
    they differ from MPI's, or if MPI made a single-process world though another launcher started
    more. The store's host is MASTER_ADDR if set, else the hostname of rank 0. Blocks until all
    ranks have arrived; RendezvousError names the ranks that have not by `deadline`.
    """
    require_threads()
    world = MPI.COMM_WORLD
    if (rank >= 0 and rank != world.rank) or (size > 0 and size != world.size):
        raise RendezvousError(
            f"MPI made this process rank {world.rank} of {world.size}, not rank {rank} of {size}: "
            "start it with mpirun, or give a store to use ranks of your own"
        )
    if world.size == 1:
        if size <= 0:  # the caller has not asked for a world of one
            _check_alone()
        return HashStore(), 0, 1
    store = _Host(min(deadline.remaining(), _MAX_TIMEOUT))
    own_name = MPI.Get_processor_name().encode()
    answer = wait_for_members(
        world, range(world.size), "the store", deadline, own_name, store.start
    )
    host, port = json.loads(answer)
    return store.store or TCPStore(host, port, timeout=store.timeout), world.rank, world.size


def _check_alone() -> None:
    """Refuse a single-process world if WORLD_SIZE, which other launchers set, is larger."""
    answer = os.environ.get("WORLD_SIZE", "1")
    if answer != "1":
        raise RendezvousError(
            f"WORLD_SIZE is {answer}, and MPI has this process alone: the mpi backend's ranks are "
            "started by MPI's mpirun, not by torchrun or nc10d.run (unset WORLD_SIZE for a world "
            "of one)"
        )


class _Host:
    """Starts the store on rank 0 when all ranks have arrived."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.store: Store | None = None

    def start(self, machines: Sequence[bytes]) -> bytes:
        """Start the store; return its host and port as JSON."""
        alone = len(set(machines)) == 1
        host = "127.0.0.1" if alone else os.environ.get("MASTER_ADDR") or socket.gethostname()
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=self.timeout)
        self.store = store
        return json.dumps([host, store.port]).encode()
