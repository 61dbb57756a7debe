"""The record of a rank's latest launch, which peers read for their errors if the rank dies.

Contract: the record is in memory that the group's failure detector shares with all ranks of the
host (`OtherBackends.record_address`); without a detector it is private. The compiled loop writes
number and text of each launch on the communicator of the collectives.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from nc10d.arrays.access import first_array
from nc10d.arrays.buffer import as_buffer
from nc10d.backend.cpu.native.offsets import RECORD_BYTES, TEXT_BYTES
from nc10d.backend.nccl.bindings.native import nc10d_nccl_record
from nc10d.ops import OP_NAMES, AllReduces, Op

_write = nc10d_nccl_record.ctypes


class LaunchText:
    """Text in memory at `address`, as long as this object lives."""

    __slots__ = ("_bytes", "address")

    def __init__(self, text: str) -> None:
        self._bytes = array("B", text.encode()[: TEXT_BYTES - 1].ljust(TEXT_BYTES, b"\0"))
        self.address = self._bytes.buffer_info()[0]


class LaunchRecord:
    """The record at `address`, by default a private record."""

    def __init__(self, address: int = 0) -> None:
        self._own = array("B", bytes(RECORD_BYTES))
        self.address = address or self._own.buffer_info()[0]

    def write(self, text: LaunchText) -> None:
        """Count a launch and record its text, as the compiled loop does."""
        _write(self.address, text.address)


def text_of_launch(ops: Sequence[Op]) -> str:
    """Return a launch's text, in the form that the errors of all backends have."""
    if isinstance(ops, AllReduces):  # without making its operations
        x = as_buffer(ops.arrays[0])
        first = f"all_reduce(dtype={x.dtype.label}, count={x.count}, op={ops.op.name})"
    else:
        first = _text_of_op(ops[0])
    return first if len(ops) == 1 else f"coalesced({first} and {len(ops) - 1} more)"


def _text_of_op(op: Op) -> str:
    parts = []
    x = first_array((op,))
    if x is not None:
        found = as_buffer(x)
        parts = [f"dtype={found.dtype.label}", f"count={found.count}"]
    how, root = getattr(op, "op", None), getattr(op, "root", None)
    parts += [f"op={how.name}"] if how is not None else []
    parts += [f"root={root}"] if root is not None else []
    return f"{OP_NAMES[type(op)]}({', '.join(parts)})"
