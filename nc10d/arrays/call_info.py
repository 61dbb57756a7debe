"""A call as ranks compare it and as errors show it: the same facts on every backend. Pure.

| operation | facts that all ranks must give alike |
|---|---|
| all_reduce, reduce, reduce_scatter | dtype, count, reduction with its factor and purpose, root |
| broadcast | dtype, count, root |
| all_gather | dtype, count |
| all_to_all | dtype; count, unless lists or splits give each rank sizes of its own |
| gather, scatter | dtype, root |
| gather_single, scatter_single | dtype, count, root |

The count is that of the whole array: of all_gather's output, reduce_scatter's input. Where its
chunks differ, all of them count. Sizes that only a sender and its receiver know are compared by the
backend that moves the data. Messages have texts, and are not compared: each rank has its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from nc10d import ops
from nc10d.arrays.buffer import Buffer, as_buffer

_CUT = b"..."


@dataclass(frozen=True, slots=True)
class CallInfo:
    """What ranks compare of a call; `count` is -1 where ranks may have different ones."""

    op: str
    dtype: str = "-"
    count: int = 0
    reduce: str = "-"
    root: int = -1
    detail: str = ""

    def fingerprint(self) -> int:
        """Return 62 bits that differ, in practice always, when calls differ."""
        parts = self.op, self.dtype, self.count, self.reduce, self.root, self.detail
        digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 2

    def describe(self) -> str:
        """Return the call as an error message shows it."""
        parts = [self.op]
        if self.dtype != "-":
            parts.append(f"dtype={self.dtype}")
            if self.count >= 0:
                parts.append(f"count={self.count}")
        if self.reduce != "-":
            parts.append(f"op={self.reduce}")
        if self.root >= 0:
            parts.append(f"root={self.root}")
        if self.detail:
            parts.append(self.detail)
        return f"{parts[0]}({', '.join(parts[1:])})"

    def text_bytes(self, nbytes: int) -> bytes:
        """Return `describe()` as so many bytes: padded with zeros, or cut at its end."""
        text = self.describe().encode()
        if len(text) > nbytes:
            text = text[: nbytes - len(_CUT)] + _CUT
        return text.ljust(nbytes, b"\0")


def call_of(op: ops.Op, lists_differ: bool = False) -> CallInfo:
    """Return the facts of an operation that has been validated.

    With `lists_differ`, a list of arrays is another call than one array of the same chunks.
    """
    if isinstance(op, ops.AllGather):
        return _of_chunks(op, op.out, lists_differ)
    if isinstance(op, ops.ReduceScatter):
        return replace(_of_chunks(op, op.inp, lists_differ), reduce=_reduction(op.op))
    return _CALLS[type(op)](op)


def block_of(calls: Sequence[CallInfo]) -> CallInfo:
    """Return the calls of a block as a single call; a call alone stays as it is."""
    if len(calls) == 1:
        return calls[0]
    total = sum(max(0, call.count) for call in calls)
    sizes = f"{len(calls)} calls, count={total}"
    return CallInfo("coalesced", detail=f"{sizes}: {', '.join(_runs(calls))}")


def beyond_text(mine: str, theirs: str) -> str:
    """Return what an error adds where the texts of two different calls are cut too early."""
    return "; they differ behind the end of the text" if mine and mine == theirs else ""


def _runs(calls: Sequence[CallInfo]) -> Iterator[str]:
    """Yield the texts of calls; calls in a row that are alike but for their counts have one."""
    for alike, run in groupby(calls, lambda call: replace(call, count=min(0, call.count))):
        # The same count in a row: "3 x 1024".
        many = [(count, len([*same])) for count, same in groupby(call.count for call in run)]
        counts = [f"{n} x {count}" if n > 1 else f"{count}" for count, n in many]
        if len(many) == 1 and many[0][1] == 1:
            yield replace(alike, count=many[0][0]).describe()
        elif alike.dtype == "-" or alike.count < 0:
            yield f"{many[0][1]} x {alike.describe()}"
        else:
            yield f"{replace(alike, count=-1).describe()} of {', '.join(counts)}"


def _reduction(op: ops.ReduceOp) -> str:
    return op.name if op.factor is None else f"{op.name}({op.factor})"


def _reduce(op: ops.AllReduce | ops.Reduce) -> CallInfo:
    root = op.root if isinstance(op, ops.Reduce) else -1
    return replace(_of(op, as_buffer(op.x), root=root), reduce=_reduction(op.op))


def _broadcast(op: ops.Broadcast) -> CallInfo:
    return _of(op, as_buffer(op.x), root=op.root)


def _of_chunks(op: ops.Op, arrays: Any, lists_differ: bool) -> CallInfo:
    if not isinstance(arrays, (list, tuple)):
        return _of(op, as_buffer(arrays))
    buffers = list(map(as_buffer, arrays))
    counts = [buffer.count for buffer in buffers]
    even = "in a list" if lists_differ else ""
    detail = even if len(set(counts)) == 1 else f"counts={counts}"
    return replace(_of(op, buffers[0]), count=sum(counts), detail=detail)


def _all_to_all(op: ops.AllToAll) -> CallInfo:
    sizes_differ = has_own_sizes(op)
    call = _of(op, as_buffer(op.inp[0] if isinstance(op.inp, (list, tuple)) else op.inp))
    return replace(call, count=-1, detail="of different sizes") if sizes_differ else call


def _at_root(op: ops.Gather | ops.Scatter) -> CallInfo:
    call = _of(op, as_buffer(op.inp if isinstance(op, ops.Gather) else op.out), root=op.root)
    return replace(call, op=f"{call.op}_single") if op.even else replace(call, count=-1)


def has_own_sizes(op: ops.Op) -> bool:
    """Return whether each rank has sizes of its own, which only a sender and its receiver know."""
    if isinstance(op, ops.AllToAll):
        splits = (op.in_splits, op.out_splits)
        return isinstance(op.inp, (list, tuple)) or splits != (None, None)
    return isinstance(op, (ops.Gather, ops.Scatter))


def _message(op: ops.Send | ops.Recv) -> CallInfo:
    whom = f"dst={op.peer}" if isinstance(op, ops.Send) else f"src={_from(op.peer)}"
    return replace(_of(op, as_buffer(op.x)), detail=f"{whom}, tag={op.tag}")


def _from(peer: int | None) -> int | str:
    return "any" if peer is None else peer


def _of(op: ops.Op, buffer: Buffer, root: int = -1) -> CallInfo:
    return CallInfo(ops.OP_NAMES[type(op)], buffer.dtype.label, buffer.count, root=root)


_CALLS: dict[type[Any], Callable[[Any], CallInfo]] = {
    ops.AllReduce: _reduce,
    ops.Reduce: _reduce,
    ops.Broadcast: _broadcast,
    ops.AllToAll: _all_to_all,
    ops.Gather: _at_root,
    ops.Scatter: _at_root,
    ops.Send: _message,
    ops.Recv: _message,
    ops.Barrier: lambda op: CallInfo(ops.OP_NAMES[type(op)]),
}
