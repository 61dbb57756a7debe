"""An operation's arrays as mpi4py takes them.

Device arrays are taken as they are. A CUDA-aware MPI reads and writes device memory by address.
Such an MPI knows no streams: kernels that compute an array must have ended before the call
(`synchronize` first). Arrays must be contiguous, and not in lists. Reductions are limited to MPI's
own, in MPI's own order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nc10d.backend.mpi.datatypes import carrier, native
from nc10d.backend.mpi.library import MPI, cuda_aware
from nc10d.backend.polled.device_arrays import device_arrays, flat_on_device
from nc10d.backend.polled.flat_buffers import Chunks, FlatBuffer
from nc10d.errors import UnsupportedPlatform
from nc10d.ops import Op, ReduceOp
from nc10d.ops.facts import name_of


def memory(x: FlatBuffer) -> Any:
    """Return the bytes as mpi4py takes them."""
    return MPI.buffer.fromaddress(x.address, x.nbytes)


def whole(x: FlatBuffer) -> list[object]:
    """Return mpi4py's description of all elements."""
    return [memory(x), x.count, carrier(x.dtype)]


def in_chunks(chunks: Chunks) -> list[object]:
    """Return mpi4py's description of consecutive chunks."""
    x, counts = chunks
    return [memory(x), (counts, None), carrier(x.dtype)]


def check_devices(batch: Sequence[Op]) -> None:
    """Raise UnsupportedPlatform or TypeError where an operation's device arrays are not for MPI."""
    for op, array, device in device_arrays(batch):
        name = name_of(op)
        if not cuda_aware():
            raise UnsupportedPlatform(
                f"{name}: this MPI is not CUDA-aware, so it can't take arrays on {device}: copy "
                "them to the host, or use an MPI that was built with CUDA"
            )
        dtype = flat_on_device("mpi", op, array, device).dtype
        how: ReduceOp | None = getattr(op, "op", None)
        if how is None:
            continue
        plain = not (how.kind.prepares or how.kind.finishes)
        if not plain or native(how.pairwise, dtype) is None:
            raise TypeError(f"{name}: mpi has no {how.name} of {dtype.label} on {device}")
