"""A group's prepared calls: looked up by operation, and the latest of each kind.

| key | value |
|---|---|
| kind, extra, dtype, sizes | a PreparedCollective or PreparedMessage |
| the arrays in a batch of all_reduces, by identity | a PreparedProgram on just these arrays |
| dtypes, sizes and reductions of such a batch | the program, for other arrays with the same shape |

A batch keeps no reference to its arrays. At the next launch, the address table serves any ndarrays
with exactly these addresses, dtypes, element counts and flags. (An array may be resized in place,
and its identity may become another array's.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nc10d.arrays import intervals
from nc10d.arrays.arguments import LARGEST_TAG
from nc10d.arrays.dtypes import element_of, reduced_element
from nc10d.backend.cpu.engine.channel import Channel, Words
from nc10d.backend.cpu.lowering.prepared import (
    Prepared,
    PreparedMessage,
    PreparedProgram,
    arrays_in,
)
from nc10d.backend.cpu.native import prepared_calls
from nc10d.backend.cpu.program.linker import Linked
from nc10d.backend.prepared_protocol import Arguments
from nc10d.ops import AllReduce, AllReduces, Array, Op, Recv, ReduceOp, RepeatedOps, Send
from nc10d.ops.facts import FACTS, Parts, facts_of

MOST_CALLS, MOST_BATCHES = 4096, 256
"""Calls of a kind, and batches: a cache that has grown to its limit is emptied."""
_NDARRAY = id(np.ndarray)

Found = tuple[Prepared, Arguments, Arguments]
"""A prepared call, and the arguments x and y for `run`."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """A batch of all_reduces, and the program, whose table describes the arrays (see _read)."""

    reductions: list[ReduceOp]
    program: PreparedProgram


@dataclass(frozen=True, slots=True)
class _KeptBatch:
    """A look-up's result, kept in a plan's operations: batch, cache and arrays."""

    owner: PreparedCache
    batch: _Batch
    arrays: list[Array]


class PreparedCache:
    """A group's prepared calls; `channel` is the collectives' channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._calls: dict[type[Op], dict[tuple[object, ...], Prepared]] = {
            kind: {} for kind in FACTS
        }
        self._batches: dict[tuple[int, ...], _Batch] = {}
        self._programs: dict[tuple[object, ...], Linked] = {}
        self.latest: dict[type[Op], dict[object, Prepared]] = {kind: {} for kind in FACTS}
        """By operation kind and `extra`: the call that was found last. No bulky message."""
        # Apart from `latest`: hooks always have arrays with the same sizes, and a program may make
        # calls with other sizes in between.
        self.hooked: dict[tuple[type[Op], object], Prepared] = {}
        """By the same: the call that runs between hooks."""

    def find(self, ops: Sequence[Op]) -> Found | None:
        """Return the prepared call for these operations, or None."""
        if len(ops) == 1:
            return self._find_call(ops[0])
        batch = self._find_batch(ops)
        return None if batch is None else (batch.program, ops, None)

    def find_hooked(
        self, kind: type[Op], extra: object, x: Arguments, y: Arguments
    ) -> Prepared | None:
        """Return the call for operations between hooks; see PreparingBackend."""
        found = self._find_call(FACTS[kind].make(extra, x[0] if type(y) is int else x, y))
        if found is None:
            return None
        found[0].make_hooked()
        self.hooked[kind, extra] = found[0]
        return found[0]

    def find_messages(self, ops: Sequence[Op]) -> list[tuple[PreparedMessage, Array, int]] | None:
        """Return prepared messages for all of `ops`, if their order does not matter; else None."""
        found: list[tuple[PreparedMessage, Array, int]] = []
        read: set[intervals.Interval] = set()
        written: list[intervals.Interval] = []
        for op in ops:
            call = self._find_call(op)
            if call is None:
                return None
            message, x, tag = call
            if not isinstance(message, PreparedMessage) or not x.flags.carray:
                return None
            found.append((message, x, tag))
            first = prepared_calls.address(x)
            span = first, first + x.nbytes
            read.add(span) if message.inbox is None else written.append(span)
        return found if intervals.disjoint([*read, *written]) else None

    def knows(self, op: Send | Recv) -> bool:
        """Return whether a message on an ndarray is prepared, for this very dtype object."""
        found = self._calls[type(op)].get((op.peer, op.x.dtype, op.x.size))
        return isinstance(found, PreparedMessage) and found.dtype is op.x.dtype

    def remember(self, op: Op, prepared: Prepared) -> None:
        """Add the call for an operation that has passed all checks."""
        parts = parts_of(op)
        if parts is None:
            return
        arrays = [x for x in arrays_in(*parts[1:]) if type(x) is not int]  # an int is a tag
        if not all(x.flags.carray for x in arrays):  # contiguous, aligned and writable
            return
        if _sees_rows(op, arrays[0]):
            return
        calls = self._calls[type(op)]
        if len(calls) >= MOST_CALLS:
            calls.clear()
            self.latest[type(op)].clear()
        calls[_key(op, *parts)] = prepared
        if not prepared.bulky:
            self.latest[type(op)][parts[0]] = prepared

    def _find_call(self, op: Op) -> Found | None:
        parts = parts_of(op)
        if parts is None:
            return None
        try:
            found = self._calls[type(op)].get(_key(op, *parts))
        except TypeError:  # an argument is no key: the checks say what is wrong
            return None
        if found is None:
            return None
        extra, x, y = parts
        if not found.bulky:
            self.latest[type(op)][extra] = found
        return found, x, y

    # -- batches of all_reduces ------------------------------------------------------------------

    def remember_batch(self, ops: Sequence[Op], linked: Linked) -> None:
        """Add a batch's program, if that is all_reduces on plain arrays that lie apart."""
        uniform = _all_reduces(ops)
        if uniform is None or any(_sees_rows(op, x) for op, x in zip(ops, uniform[0], strict=True)):
            return
        table = _read(uniform[0])
        if uniform is not None and table is not None:
            if len(self._programs) >= MOST_BATCHES:
                self._programs.clear()
            self._programs[_shape(*uniform, table)] = linked

    def _find_batch(self, ops: Sequence[Op]) -> _Batch | None:
        kept = ops.prepared if type(ops) is RepeatedOps else None
        if type(kept) is _KeptBatch and kept.owner is self and _same(kept.arrays, kept.batch):
            return kept.batch
        uniform = _all_reduces(ops)
        found = None if uniform is None else self._lookup(*uniform)
        if found is not None and uniform is not None and type(ops) is RepeatedOps:
            ops.prepared = _KeptBatch(self, found, uniform[0])
        return found

    def _lookup(self, arrays: list[Array], reductions: list[ReduceOp]) -> _Batch | None:
        key = tuple(map(id, arrays))
        found = self._batches.get(key)
        if found is not None and _same(arrays, found) and found.reductions == reductions:
            return found
        table = _read(arrays) if self._programs else None
        if table is None:
            return None
        shape = _shape(arrays, reductions, table)
        linked = self._programs.get(shape)
        if linked is None:
            return None
        if len(self._batches) >= MOST_BATCHES:
            self._batches.clear()
        # The operations keep the arrays alive while they are in flight. The table has the dtypes by
        # address, and the table's key keeps the dtypes alive.
        program = PreparedProgram(self._channel, linked, table[0], shape)
        batch = self._batches[key] = _Batch(reductions, program)
        return batch


def _sees_rows(op: Any, x: Array) -> bool:
    """Return whether rows of numbers stand for records: prepared calls compare no shapes."""
    how: ReduceOp | None = getattr(op, "op", None)
    if how is None or how.pairwise.own is None or type(x) is not np.ndarray:
        return False
    element = element_of(x.dtype)
    return reduced_element(element, how, x.shape[-1] if x.shape else 1) is not element


def parts_of(op: Op) -> Parts | None:
    """Return (extra, x, y), see Parts, if a call with them can be prepared, else None.

    x and y must be ndarrays, tuples of them, or None; or an ndarray and a valid tag.
    """
    both = FACTS.get(type(op))
    if both is None:
        return None
    parts = extra, x, y = both.split(op)
    if type(y) is int:  # validate() reports a tag that is out of range
        # A receive from any source is not prepared.
        tagged = type(x) is np.ndarray and 0 <= y <= LARGEST_TAG and extra is not None
        return parts if tagged else None
    found = arrays_in(x, y)
    return parts if found and all(type(each) is np.ndarray for each in found) else None


def _key(op: Op, extra: object, x: Arguments, y: object) -> tuple[object, ...]:
    if type(y) is int:
        return extra, x.dtype, x.size
    if type(x) is np.ndarray and type(y) is np.ndarray:
        if facts_of(op).is_cut_by_rows:
            return extra, x.dtype, x.shape, y.shape
        return extra, x.dtype, x.size, y.size
    return extra, arrays_in(x, y)[0].dtype, _sizes(x), _sizes(y)


def _sizes(argument: Arguments) -> object:
    if type(argument) is tuple:
        return tuple([each.size for each in argument])
    return None if argument is None else argument.size


def _all_reduces(ops: Sequence[Op]) -> tuple[list[Array], list[ReduceOp]] | None:
    """Return arrays and reductions for a batch of all_reduces, None for any other batch."""
    if type(ops) is AllReduces:  # without making operations
        return list(ops.arrays), [ops.op] * len(ops)
    found = [op for op in ops if type(op) is AllReduce]
    return ([op.x for op in found], [op.op for op in found]) if len(found) == len(ops) else None


def _read(arrays: list[Array]) -> Words | None:
    """Return a table with columns address, dtype, count; None unless arrays are plain and apart."""
    # Apart, because they share a barrier.
    table: Words = np.empty((3, len(arrays)), np.int64)
    if (
        prepared_calls.read_arrays(arrays, len(arrays), _NDARRAY, prepared_calls.address(table))
        >= 0
    ):
        return None
    sizes = table[2] * np.array([x.dtype.itemsize for x in arrays])
    return table if intervals.columns_disjoint(table[0], sizes) else None


def _shape(arrays: list[Array], reductions: list[ReduceOp], table: Words) -> tuple[object, ...]:
    """Return the key for a batch's program: all that the program depends on."""
    # Dtypes stand there by address, too, which is sound because the key keeps them alive.
    return (*table[1:].ravel().tolist(), *reductions, *(x.dtype for x in arrays))


def _same(arrays: list[Array], batch: _Batch) -> bool:
    """Return whether arrays match a batch's table."""
    table = batch.program.table
    return bool(prepared_calls.same_arrays(arrays, len(arrays), _NDARRAY, table))
