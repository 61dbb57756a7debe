"""A launch as ranks compare it and errors show it, in the form of the CPU backend's calls. Pure.

Only facts that must be the same on all ranks count. Messages don't: each rank has its own.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from typing import Any

from nc10d import ops
from nc10d.arrays.buffer import Buffer, as_buffer
from nc10d.backend.cpu.native.offsets import TEXT_BYTES
from nc10d.backend.cpu.program.program import CallInfo
from nc10d.base.text import digest


class CallText:
    """A call as compiled code takes it: fingerprint and text, at `address` while it lives."""

    __slots__ = ("_words", "address")

    def __init__(self, call: CallInfo) -> None:
        text = call.describe().encode()[: TEXT_BYTES - 1].ljust(TEXT_BYTES, b"\0")
        self._words = array("q", [call.fingerprint()])
        self._words.frombytes(text)
        self.address = self._words.buffer_info()[0]


@lru_cache(256)
def text_of_all_reduces(dtype: str, op: str, counts: tuple[int, ...]) -> CallText:
    """Return the text of a block of all_reduces by their counts, without its operations."""
    return CallText(_coalesced([(CallInfo("all_reduce", dtype, counts[0], op), counts)]))


def call_of(batch: Sequence[ops.Op]) -> CallInfo:
    """Return a launch as a call: its collectives, or its messages if it has no collective."""
    compared = [op for op in batch if type(op) in _COMPARED]
    calls = [_COMPARED[type(op)](op) for op in compared] or [_message(op) for op in batch]
    runs: list[tuple[CallInfo, Sequence[int]]] = []
    for _, run in groupby(calls, lambda call: replace(call, count=0)):
        alike = list(run)
        runs.append((alike[0], [call.count for call in alike]))
    return _coalesced(runs)


def _coalesced(runs: Sequence[tuple[CallInfo, Sequence[int]]]) -> CallInfo:
    """Return a block as a call; a run is calls that are alike but for their counts."""
    first, total = runs[0][0], sum(len(counts) for _, counts in runs)
    if total == 1:
        return first
    everything = repr([(replace(call, count=0), [*counts]) for call, counts in runs])
    detail = f"{first.describe()} and {total - 1} more"
    return CallInfo("coalesced", count=total, detail=detail, digest=digest(everything))


def _sum(arrays: Any) -> tuple[Buffer, int, str]:
    """Return the first of one or several arrays, all elements, and what differs about a list."""
    if not isinstance(arrays, (list, tuple)):
        x = as_buffer(arrays)
        return x, x.count, ""
    found = list(map(as_buffer, arrays))
    counts = [x.count for x in found]
    even = len(set(counts)) == 1
    # A list is other calls of NCCL than an array.
    return found[0], sum(counts), "in a list" if even else f"counts={counts}"


def _all_reduce(op: ops.AllReduce) -> CallInfo:
    x = as_buffer(op.x)
    return CallInfo("all_reduce", x.dtype.label, x.count, op.op.name)


def _reduce(op: ops.Reduce) -> CallInfo:
    x = as_buffer(op.x)
    return CallInfo("reduce", x.dtype.label, x.count, op.op.name, op.root)


def _broadcast(op: ops.Broadcast) -> CallInfo:
    x = as_buffer(op.x)
    return CallInfo("broadcast", x.dtype.label, x.count, root=op.root)


def _all_gather(op: ops.AllGather) -> CallInfo:
    first, count, detail = _sum(op.out)
    return CallInfo("all_gather", first.dtype.label, count, detail=detail)


def _reduce_scatter(op: ops.ReduceScatter) -> CallInfo:
    first, count, detail = _sum(op.inp)
    return CallInfo("reduce_scatter", first.dtype.label, count, op.op.name, detail=detail)


def _all_to_all(op: ops.AllToAll) -> CallInfo:
    first, count, detail = _sum(op.inp)
    if detail or op.in_splits is not None or op.out_splits is not None:  # each rank has its own
        return CallInfo("all_to_all", first.dtype.label, -1, detail="of different sizes")
    return CallInfo("all_to_all", first.dtype.label, count)


def _gather(op: ops.Gather) -> CallInfo:
    x = as_buffer(op.inp)
    name, count = ("gather_single", x.count) if op.even else ("gather", -1)
    return CallInfo(name, x.dtype.label, count, root=op.root)


def _scatter(op: ops.Scatter) -> CallInfo:
    x = as_buffer(op.out)
    name, count = ("scatter_single", x.count) if op.even else ("scatter", -1)
    return CallInfo(name, x.dtype.label, count, root=op.root)


def _barrier(op: ops.Barrier) -> CallInfo:
    return CallInfo("barrier")


def _message(op: Any) -> CallInfo:
    x, sends = as_buffer(op.x), type(op) is ops.Send
    whom = "any" if op.peer is None else op.peer
    detail = f"{'dst' if sends else 'src'}={whom}, tag={op.tag}"
    return CallInfo("send" if sends else "recv", x.dtype.label, x.count, detail=detail)


_COMPARED: dict[type[Any], Callable[[Any], CallInfo]] = {
    ops.AllReduce: _all_reduce,
    ops.Reduce: _reduce,
    ops.Broadcast: _broadcast,
    ops.AllGather: _all_gather,
    ops.ReduceScatter: _reduce_scatter,
    ops.AllToAll: _all_to_all,
    ops.Gather: _gather,
    ops.Scatter: _scatter,
    ops.Barrier: _barrier,
}
