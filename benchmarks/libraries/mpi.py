"""MPICH and Open MPI, by mpi4py's fast calls on COMM_WORLD."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from benchmarks.libraries.base import (
    Array,
    Call,
    Library,
    ObjectCall,
    as_object,
    there_and_back,
    uneven,
)
from benchmarks.libraries.c10d import WINDOW


class Mpi(Library):
    """MPI; each buffer is described once, so that mpi4py need not inspect it on every call."""

    def start(self) -> None:
        """Join the job that mpiexec has started: importing MPI initializes it."""
        from mpi4py import MPI

        self.mpi, self.comm = MPI, MPI.COMM_WORLD
        self.rank, self.size = self.comm.rank, self.comm.size

    def bind(self, out: Array, x: Array) -> dict[str, Call]:
        """Bind the calls of COMM_WORLD to described buffers."""
        comm, peer = self.comm, self.rank ^ 1
        into, source = [out, self.mpi.FLOAT], [x, self.mpi.FLOAT]
        root = self.rank == 0
        given, total = (self.mpi.IN_PLACE, into) if root else (into, None)
        send, recv = partial(comm.Send, source, peer), partial(comm.Recv, into, peer)
        return {
            "all_reduce": partial(comm.Allreduce, self.mpi.IN_PLACE, into),
            "all_gather": partial(comm.Allgather, source, into),
            "reduce_scatter": partial(comm.Reduce_scatter_block, source, into),
            "broadcast": partial(comm.Bcast, into, 0),
            "reduce": partial(comm.Reduce, given, total, self.mpi.SUM, 0),
            "scan": partial(comm.Scan, self.mpi.IN_PLACE, into),
            "exscan": partial(comm.Exscan, self.mpi.IN_PLACE, into),
            "gather": partial(comm.Gather, source, into if root else None, 0),
            "scatter": partial(comm.Scatter, source if root else None, into, 0),
            "all_to_all": partial(comm.Alltoall, source, into),
            "ping_pong": there_and_back(send, recv, self.rank < peer),
            "exchange": partial(comm.Sendrecv, source, peer, 0, into, peer, 0),
            "barrier": comm.Barrier,
            **self._with_counts(out, x),
            **self._uneven(out, x),
            **self._objects(out, x),
        }

    def _with_counts(self, out: Array, x: Array) -> dict[str, Call]:
        """Bind the calls with a count for each rank, MPI's lists, and a window."""
        comm, kind, size = self.comm, self.mpi.FLOAT, self.comm.size
        into, source = [out, kind], [x, kind]
        all_into, all_from = [out, [out.size // size] * size], [x, [x.size // size] * size]
        first = self.rank == 0
        return {
            "all_gather_list": partial(comm.Allgatherv, source, all_into),
            "gather_list": partial(comm.Gatherv, source, all_into if first else None),
            "scatter_list": partial(comm.Scatterv, all_from if first else None, into),
            "reduce_scatter_list": partial(comm.Reduce_scatter, source, into),
            "all_to_all_list": partial(comm.Alltoallv, all_from, all_into),
            "window": partial(self._window, out),
            "message_window": partial(self._message_window, out, x),
        }

    def _uneven(self, out: Array, x: Array) -> dict[str, Call]:
        """Bind the calls with counts that differ by rank."""
        comm, kind, size = self.comm, self.mpi.FLOAT, self.comm.size
        into, source, first = [out, kind], [x, kind], self.comm.rank == 0
        sizes = uneven(x.size, size)
        gathered, given = [out, uneven(out.size, size)], [x, sizes]
        received = [out, [out.size // size] * size]
        return {
            "all_gather_uneven": partial(comm.Allgatherv, source, gathered),
            "gather_uneven": partial(comm.Gatherv, source, gathered if first else None),
            "scatter_uneven": partial(comm.Scatterv, given if first else None, into),
            "reduce_scatter_uneven": partial(comm.Reduce_scatter, source, into, sizes),
            "all_to_all_uneven": partial(comm.Alltoallv, given, received),
        }

    def _objects(self, out: Array, x: Array) -> dict[str, Call]:
        """Bind mpi4py's lower-case calls, which pickle."""
        comm, peer = self.comm, self.rank ^ 1
        parts = [*map(as_object, np.split(x, self.size))] if x.size % self.size == 0 else None

        def ping_pong(value: Any) -> list[Any]:
            found: list[Any] = []
            send = partial(comm.send, value, peer)
            there_and_back(send, lambda: found.append(comm.recv(None, peer)), self.rank < peer)()
            return found

        return {
            "all_gather_object": ObjectCall(out, as_object(x), comm.allgather),
            "gather_object": ObjectCall(out, as_object(x), comm.gather),
            "broadcast_object": ObjectCall(out, as_object(x), lambda x: [comm.bcast(x)]),
            "scatter_object": ObjectCall(out, parts, lambda x: [comm.scatter(x)]),
            "ping_pong_object": ObjectCall(out, as_object(x), ping_pong),
        }

    def _window(self, out: Array) -> None:
        pieces = np.split(out, min(WINDOW, out.size))
        self.mpi.Request.Waitall(
            [self.comm.Iallreduce(self.mpi.IN_PLACE, piece) for piece in pieces]
        )

    def _message_window(self, out: Array, x: Array) -> None:
        comm, peer, kind, count = self.comm, self.rank ^ 1, self.mpi.FLOAT, min(WINDOW, out.size)
        calls = [comm.Irecv([piece, kind], peer) for piece in np.split(out, count)]
        calls += [comm.Isend([piece, kind], peer) for piece in np.split(x, count)]
        self.mpi.Request.Waitall(calls)

    def close(self) -> None:
        """Do nothing: MPI finalizes at exit."""
