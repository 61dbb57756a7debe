"""What a rank tells of its launches, for the errors of those who survive it.

Contract: a Note is a record that the group's other backend shows to all ranks of the host
(`Others.note`), or where there is none, one that nobody reads. A launch on the group's own
communicator writes there, from the compiled loop, its number and its words.
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
    """Words at an `address`, as long as this object lives."""

    __slots__ = ("_bytes", "address")

    def __init__(self, words: str) -> None:
        self._bytes = array("B", words.encode()[: TEXT_BYTES - 1].ljust(TEXT_BYTES, b"\0"))
        self.address = self._bytes.buffer_info()[0]


class LaunchRecord:
    """The record at `address`, or one of its own; `write` does what a row of a program does."""

    def __init__(self, address: int = 0) -> None:
        self._own = array("B", bytes(RECORD_BYTES))
        self.address = address or self._own.buffer_info()[0]

    def write(self, text: LaunchText) -> None:
        """Count a launch and tell what it is."""
        _write(self.address, text.address)


def text_of_launch(ops: Sequence[Op]) -> str:
    """Return a launch as the errors of all backends show a call."""
    if isinstance(ops, AllReduces):  # without an operation made of each
        x = as_buffer(ops.arrays[0])
        told = f"all_reduce(dtype={x.dtype.label}, count={x.count}, op={ops.op.name})"
    else:
        told = _words(ops[0])
    return told if len(ops) == 1 else f"coalesced({told} and {len(ops) - 1} more)"


def _words(op: Op) -> str:
    parts = []
    x = first_array((op,))
    if x is not None:
        found = as_buffer(x)
        parts = [f"dtype={found.dtype.label}", f"count={found.count}"]
    how, root = getattr(op, "op", None), getattr(op, "root", None)
    parts += [f"op={how.name}"] if how is not None else []
    parts += [f"root={root}"] if root is not None else []
    return f"{OP_NAMES[type(op)]}({', '.join(parts)})"
