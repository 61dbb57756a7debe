"""MPICH and Open MPI, by mpi4py's fast calls on COMM_WORLD."""

from __future__ import annotations

from functools import partial

import numpy as np

from benchmarks.libraries.base import Array, Call, Library, there_and_back
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
            "gather": partial(comm.Gather, source, into if root else None, 0),
            "scatter": partial(comm.Scatter, source if root else None, into, 0),
            "all_to_all": partial(comm.Alltoall, source, into),
            "ping_pong": there_and_back(send, recv, self.rank < peer),
            "exchange": partial(comm.Sendrecv, source, peer, 0, into, peer, 0),
            "barrier": comm.Barrier,
            **self._with_counts(out, x),
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
        }

    def _window(self, out: Array) -> None:
        pieces = np.split(out, min(WINDOW, out.size))
        self.mpi.Request.Waitall(
            [self.comm.Iallreduce(self.mpi.IN_PLACE, piece) for piece in pieces]
        )

    def close(self) -> None:
        """Do nothing: MPI finalizes at exit."""
