"""The libraries that are compared, each with its collectives bound to arrays, ready to be called.

`calls(out, x)` binds all of a library's collectives to two flat float32 arrays. What can be done
once is done there (tensors over the arrays' memory, MPI's descriptions of buffers), and what is
timed is one call of the library's own function: no wrapper stands between for one library only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Call = Callable[[], object]


class Library(Protocol):
    """A library on one rank of a job.

    all_reduce and broadcast work in place on `out`; the others read `x`. Messages go between
    neighbours: ranks 0 and 1, 2 and 3, and so on.
    """

    rank: int
    size: int

    def calls(self, out: Array, x: Array) -> dict[str, Call]:
        """Return every collective, bound to these arrays."""

    def close(self) -> None:
        """Leave."""


class Nc10d:
    """nc10d by its public calls."""

    def __init__(self) -> None:
        import nc10d as dist

        dist.init_process_group()
        self.dist = dist
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def calls(self, out: Array, x: Array) -> dict[str, Call]:
        """Bind the public calls to plain arrays."""
        return c10d_calls(self.dist, self.rank, out, x)

    def close(self) -> None:
        """Leave the group."""
        self.dist.destroy_process_group()


class Gloo:
    """torch.distributed over gloo; the tensors lie over the arrays' memory."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self.torch, self.dist = torch, dist
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def tensors(self, arrays: Sequence[Array]) -> list[Any]:
        """Return a tensor over the memory of each array."""
        return [self.torch.from_numpy(x) for x in arrays]

    def calls(self, out: Array, x: Array) -> dict[str, Call]:
        """Bind the public calls to tensors."""
        return c10d_calls(self.dist, self.rank, *self.tensors([out, x]))

    def close(self) -> None:
        """Leave the group, and the process: its results are on disk."""
        self.dist.destroy_process_group()
        # After messages among four ranks torch 2.13 waits for ever in the interpreter's last steps.
        os._exit(0)


class Mpi:
    """MPI by mpi4py's fast calls; buffers are described once, which spares it looking each time."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self.mpi, self.comm = MPI, MPI.COMM_WORLD
        self.rank, self.size = self.comm.rank, self.comm.size

    def calls(self, out: Array, x: Array) -> dict[str, Call]:
        """Bind the calls of COMM_WORLD to described buffers."""
        comm, peer = self.comm, self.rank ^ 1
        into, source = [out, self.mpi.FLOAT], [x, self.mpi.FLOAT]
        send, recv = partial(comm.Send, source, peer), partial(comm.Recv, into, peer)
        return {
            "all_reduce": partial(comm.Allreduce, self.mpi.IN_PLACE, into),
            "all_gather": partial(comm.Allgather, source, into),
            "reduce_scatter": partial(comm.Reduce_scatter_block, source, into),
            "broadcast": partial(comm.Bcast, into, 0),
            "all_to_all": partial(comm.Alltoall, source, into),
            "ping_pong": there_and_back(send, recv, self.rank < peer),
            "exchange": partial(comm.Sendrecv, source, peer, 0, into, peer, 0),
            "barrier": comm.Barrier,
        }

    def close(self) -> None:
        """MPI ends by itself."""


def c10d_calls(dist: Any, rank: int, out: Any, x: Any) -> dict[str, Call]:
    """Bind the calls that torch.distributed and nc10d spell alike."""
    peer = rank ^ 1
    send, recv = partial(dist.send, x, peer), partial(dist.recv, out, peer)
    return {
        "all_reduce": partial(dist.all_reduce, out),
        "all_gather": partial(dist.all_gather_into_tensor, out, x),
        "reduce_scatter": partial(dist.reduce_scatter_tensor, out, x),
        "broadcast": partial(dist.broadcast, out, 0),
        "all_to_all": partial(dist.all_to_all_single, out, x),
        "ping_pong": there_and_back(send, recv, rank < peer),
        "exchange": both_ways(partial(dist.isend, x, peer), recv),
        "barrier": dist.barrier,
    }


def there_and_back(send: Call, recv: Call, first: bool) -> Call:
    """Return a round trip: who is `first` sends, and the other answers."""
    one, other = (send, recv) if first else (recv, send)

    def trip() -> None:
        one()
        other()

    return trip


def both_ways(isend: Callable[[], Any], recv: Call) -> Call:
    """Return an exchange: both send before either receives."""

    def exchange() -> None:
        work = isend()
        recv()
        work.wait()

    return exchange


LIBRARIES: dict[str, Callable[[], Library]] = {
    "nc10d": Nc10d,
    "gloo": Gloo,
    "mpich": Mpi,
    "openmpi": Mpi,
}
