"""Check that all ranks made the same call, before anything is sent.

A text describes a launch's collectives, and 62 bits of its hash go into a small all_reduce, which
shows every rank whether all have the same bits. It ends when all ranks have arrived, so it is the
barrier too. Errors show the same text. The all_reduce also carries whether this rank's arrays make
the operations of a batch depend on each other: if so on any rank, all ranks run them in order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from nc10d import ops
from nc10d.arrays.buffer import as_buffer
from nc10d.backend.mpi.library import MPI, Request
from nc10d.backend.mpi.mpi_collectives import exchanges_sizes
from nc10d.base.text import ranks_text
from nc10d.errors import CollectiveMismatch

TEXT_BYTES = 240
"""Bytes of a call's description that ranks exchange when their calls differ."""


def describe(calls: Sequence[ops.Op]) -> str:
    """Return the text of calls: everything that must be equal on all ranks, and no more."""
    return "; ".join(map(_describe, calls))


def _describe(op: ops.Op) -> str:
    name = ops.OP_NAMES[type(op)]
    if isinstance(op, (ops.Barrier, ops.Send, ops.Recv)):
        return name
    reduces = isinstance(op, (ops.AllReduce, ops.Reduce, ops.ReduceScatter))
    operator = f", op={_reduction(op)}" if reduces else ""
    root = getattr(op, "root", None)
    root_text = "" if root is None else f", root={root}"
    return f"{name}(dtype={_dtype(op)}, {_sizes(op)}{operator}{root_text})"


def _reduction(op: Any) -> str:
    factor: float | None = op.op.factor
    return str(op.op.name) if factor is None else f"{op.op.name}({factor})"


def _dtype(op: Any) -> str:
    array = op.x if hasattr(op, "x") else op.out if isinstance(op, ops.Scatter) else op.inp
    first = array[0] if isinstance(array, (list, tuple)) else array
    return as_buffer(first).dtype.label


def _sizes(op: Any) -> str:
    if exchanges_sizes(op):
        return "announced sizes"
    if isinstance(op, (ops.AllGather, ops.ReduceScatter)):
        whole = op.out if isinstance(op, ops.AllGather) else op.inp
        if isinstance(whole, (list, tuple)):
            counts = [as_buffer(x).count for x in whole]
            even = len(set(counts)) == 1
            return f"count={sum(counts)}" if even else f"counts={counts}"
        return f"count={as_buffer(whole).count}"
    return f"count={as_buffer(op.inp if isinstance(op, ops.AllToAll) else op.x).count}"


class CallCheck:
    """The check of one launch: do all ranks make this call, and may its operations overlap?"""

    __slots__ = ("_least", "text")

    def __init__(self, text: str, conflict: bool) -> None:
        self.text = text
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        word = int.from_bytes(digest, "little") >> 2
        self._least = np.array([word, -word, -int(conflict)], np.int64)

    def ask(self, comm: Any) -> Request:
        """Start the check: MIN of a number and of its negative are opposite only if all agree."""
        return comm.Iallreduce(MPI.IN_PLACE, self._least, MPI.MIN)

    @property
    def agrees(self) -> bool:
        """Whether all calls were the same."""
        return bool(self._least[0] == -self._least[1])

    @property
    def is_sequential(self) -> bool:
        """Whether some rank has operations that must run in order."""
        return bool(self._least[2] < 0)


def exchanged_texts(text: str, size: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return a description as bytes to send, and memory for the descriptions of all ranks."""
    cut = text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")
    return np.frombuffer(cut, np.uint8), np.empty((size, TEXT_BYTES), np.uint8)


def mismatch(rows: np.ndarray[Any, Any], seq: int, group: str) -> CollectiveMismatch:
    """Return the error that shows each rank's call; the same on every rank."""
    texts = [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in rows]
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks.setdefault(text, []).append(rank)
    calls = ", ".join(f"{text} on {ranks_text(some)}" for text, some in list(ranks.items())[:4])
    message = f"group {group!r}: the ranks made different calls at #{seq}: {calls}"
    odd = min(ranks.values(), key=lambda some: (len(some), -some[0]))[0]
    name = texts[odd].partition("(")[0]
    return CollectiveMismatch(message, rank=odd, group=group, op=name, seq=seq)
