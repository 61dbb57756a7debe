"""MPI's collectives on contiguous memory, by mpi4py."""

from __future__ import annotations

from nc10d.arrays.dtypes import order_matters
from nc10d.backend.mpi.buffers import in_chunks, memory, whole
from nc10d.backend.mpi.datatypes import MpiReduction, carrier, reduction
from nc10d.backend.mpi.library import MPI, Comm, Request
from nc10d.backend.polled.flat_buffers import Chunks, FlatBuffer, is_chunk_of
from nc10d.backend.polled.polled_collectives import CollectiveLibrary
from nc10d.ops import ReduceOp


class MpiCalls(CollectiveLibrary):
    """A communicator as a CollectiveLibrary, whose methods have the documentation.

    With `any_order`, MPI's own algorithms may choose the order of sums.
    """

    def __init__(self, comm: Comm, any_order: bool) -> None:
        self.rank: int = comm.rank
        self.size: int = comm.size
        self._comm = comm
        self._any_order = any_order

    def reduction(
        self, op: ReduceOp, x: FlatBuffer, scattered: bool = False
    ) -> MpiReduction | None:
        """Return MPI's reduction; for device arrays there is no alternative."""
        ordered = order_matters(op, x.dtype, self.size) and (op.by_rank or not self._any_order)
        if x.device == "cpu" and (ordered or scattered):
            return None
        return reduction(op.pairwise.name, x.dtype)

    def all_reduce(self, x: FlatBuffer, how: MpiReduction) -> Request:
        """Post MPI_Iallreduce."""
        return self._comm.Iallreduce(MPI.IN_PLACE, _operand(x, how), how.op)

    def reduce(self, x: FlatBuffer, how: MpiReduction, root: int) -> Request:
        """Post MPI_Ireduce."""
        operand = _operand(x, how)
        sent, got = (MPI.IN_PLACE, operand) if self.rank == root else (operand, None)
        return self._comm.Ireduce(sent, got, how.op, root)

    def reduce_scatter(self, out: FlatBuffer, inp: Chunks, how: MpiReduction) -> Request:
        """Post MPI_Ireduce_scatter."""
        x, counts = inp
        wide = [how.width * n for n in counts]
        return self._comm.Ireduce_scatter(_operand(x, how), _operand(out, how), wide, how.op)

    def scan(self, x: FlatBuffer, how: MpiReduction, exclusive: bool) -> Request:
        """Post MPI_Iscan or MPI_Iexscan."""
        post = self._comm.Iexscan if exclusive else self._comm.Iscan
        return post(MPI.IN_PLACE, _operand(x, how), how.op)

    def broadcast(self, x: FlatBuffer, root: int) -> Request:
        """Post MPI_Ibcast."""
        return self._comm.Ibcast(whole(x), root)

    def all_gather(self, out: Chunks, inp: FlatBuffer) -> Request:
        """Post MPI_Iallgatherv."""
        return self._comm.Iallgatherv(self._piece(inp, out), in_chunks(out))

    def all_to_all(self, out: Chunks, inp: Chunks, even: bool) -> Request:
        """Post MPI_Ialltoall or MPI_Ialltoallv."""
        if even:
            return self._comm.Ialltoall(_each(inp), _each(out))
        return self._comm.Ialltoallv(in_chunks(inp), in_chunks(out))

    def gather(self, out: Chunks | None, inp: FlatBuffer, root: int, even: bool) -> Request:
        """Post MPI_Igatherv."""
        return self._comm.Igatherv(self._piece(inp, out), out and in_chunks(out), root)

    def scatter(self, out: FlatBuffer, inp: Chunks | None, root: int, even: bool) -> Request:
        """Post MPI_Iscatterv."""
        return self._comm.Iscatterv(inp and in_chunks(inp), self._piece(out, inp), root)

    def _piece(self, piece: FlatBuffer, chunks: Chunks | None) -> object:
        """Describe `piece` for MPI: IN_PLACE for this rank's chunk of the other array."""
        return MPI.IN_PLACE if is_chunk_of(piece, chunks, self.rank) else whole(piece)


def _operand(x: FlatBuffer, how: MpiReduction) -> list[object]:
    return [memory(x), x.count * how.width, how.datatype]


def _each(chunks: Chunks) -> list[object]:
    """Return mpi4py's description of chunks of the same size."""
    x, counts = chunks
    return [memory(x), counts[0], carrier(x.dtype)]
