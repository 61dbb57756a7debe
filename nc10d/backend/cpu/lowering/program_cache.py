"""Programs that are known already: by their key, and, for plain arrays, by dtype and size.

The quick way serves what training loops do: one or two plain, contiguous, writable NumPy arrays.
It may skip every check because the same operation, dtype and sizes have passed them before; what
depends on the very arrays (type, layout, overlap) compiled code looks at again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nc10d.arrays import intervals
from nc10d.arrays.dtypes import DType
from nc10d.backend.cpu.algorithms.group_shape import GroupShape
from nc10d.backend.cpu.engine.channel import Channel, Words
from nc10d.backend.cpu.lowering.lower import LoweredOp
from nc10d.backend.cpu.lowering.prepared import _PARTS, NewBatch, PreparedBatch, PreparedCollective
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native import prepared_calls as plain
from nc10d.backend.cpu.program.linker import Linked, Scratch, link
from nc10d.backend.cpu.program.program import Kernel
from nc10d.kernels.reduce import both_address, divide_address, kernel_address, scale_address
from nc10d.ops import (
    AllReduce,
    AllToAll,
    Kept,
    Op,
    RedOp,
)

LIMIT = 4096
_DTYPES = {dtype.label: dtype for dtype in DType}


class ProgramCache:
    """The programs of one group."""

    def __init__(self, layout: GroupShape, channel: Channel) -> None:
        self._layout, self._channel = layout, channel
        self._scratch = Scratch()
        self._linked: dict[tuple[Any, ...], Linked] = {}
        self._known: dict[tuple[Any, ...], PreparedCollective] = {}
        self.latest: dict[type[Any], dict[Any, PreparedCollective]] = {kind: {} for kind in _PARTS}
        """By type of operation and what it has besides arrays: what was found for it last."""

    def find(self, op: Op) -> tuple[PreparedCollective, Any, Any] | None:
        """Return what is known of an operation (then it is the latest), and its arrays."""
        parts = _parts(op)
        if parts is None:
            return None
        extra, x, y = parts
        found = self._known.get(_key(op, extra, x, y))
        if found is None:
            return None
        self.latest[type(op)][extra] = found
        return found, x, y

    def remember(self, op: Op, linked: Linked) -> None:
        """Let `find` know a program whose operation has passed all checks."""
        parts = _parts(op)
        if parts is None:
            return
        extra, x, y = parts
        if x.flags.carray and y.flags.carray:
            if len(self._known) >= LIMIT:
                self._known.clear()
                for by_extra in self.latest.values():
                    by_extra.clear()
            known = PreparedCollective(self._channel, linked, type(op), extra, x, y)
            self._known[_key(op, extra, x, y)] = self.latest[type(op)][extra] = known

    def linked(self, request: LoweredOp) -> Linked:
        """Return the program of a request, built and linked if it is new; may compile kernels."""
        found = self._linked.get(request.key)
        if found is None:
            if len(self._linked) >= LIMIT:
                self._linked.clear()
            program = request.build()
            mates = self._layout.near.size
            found = link(program, mates, at.C_TABLES, _kernel_address, self._scratch.room)
            self._linked[request.key] = found
        return found


def _kernel_address(kernel: Kernel) -> int:
    dtype = _DTYPES[kernel.dtype]
    if kernel.kind == "DIVIDE":
        return divide_address(dtype)
    if kernel.kind == "SCALE":
        return scale_address(dtype)
    if kernel.kind.startswith("BOTH_"):
        return both_address(RedOp[kernel.kind.removeprefix("BOTH_")], dtype)
    return kernel_address(RedOp[kernel.kind], dtype)


def _parts(op: Op) -> tuple[Any, Any, Any] | None:
    """Return what _PARTS says, if the arrays are ndarrays."""
    both = _PARTS.get(type(op))
    if both is None:
        return None
    extra, x, y = both[0](op)
    return (extra, x, y) if type(x) is np.ndarray and type(y) is np.ndarray else None


def _key(op: Op, extra: Any, x: Any, y: Any) -> tuple[Any, ...]:
    if type(op) is AllToAll:  # cut along dimension 0
        return AllToAll, x.dtype, x.shape, y.shape
    return type(op), extra, x.dtype, x.size, y.size


LIMIT = 256
_NDARRAY = id(np.ndarray)


@dataclass(frozen=True, slots=True)
class KeptBatch:
    """What operations that are kept know of themselves: their batch, and whose it is."""

    owner: BatchCache
    batch: PreparedBatch
    arrays: list[Any]


class BatchCache:
    """The batches that a group has launched."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], PreparedBatch] = {}
        self._shapes: dict[tuple[Any, ...], Linked] = {}

    def find(self, ops: Sequence[Op]) -> PreparedBatch | NewBatch | None:
        """Look a batch up; None if it is not all_reduces of plain arrays apart from each other."""
        if type(ops) is not Kept:
            return self._find(ops, [op.x for op in ops if type(op) is AllReduce])
        noted = ops.known
        if type(noted) is KeptBatch and noted.owner is self and _same(noted.arrays, noted.batch):
            return noted.batch
        arrays = [op.x for op in ops if type(op) is AllReduce]
        found = self._find(ops, arrays)
        if isinstance(found, PreparedBatch):
            ops.known = KeptBatch(self, found, arrays)
        return found

    def _find(self, ops: Sequence[Op], arrays: list[Any]) -> PreparedBatch | NewBatch | None:
        if len(arrays) != len(ops):
            return None
        key = tuple(map(id, arrays))
        known = self._known.get(key)
        if known is not None and _same(arrays, known):
            reductions = [op.op for op in ops]  # type: ignore[union-attr]
            if known.reductions == reductions:
                return known
        return self._read(key, arrays, ops)

    def _read(
        self, key: tuple[int, ...], arrays: list[Any], ops: Sequence[Op]
    ) -> PreparedBatch | NewBatch | None:
        count = len(arrays)
        table: Words = np.empty((3, count), np.int64)
        address: int = plain.address(table)
        if plain.read_arrays(arrays, count, _NDARRAY, address) >= 0:
            return None
        reductions = [op.op for op in ops]  # type: ignore[union-attr]
        # Dtypes by address: sound because the shape keeps them alive.
        dtypes = [x.dtype for x in arrays]
        shape = (*table[1:].ravel().tolist(), *reductions)
        fresh = NewBatch(key, reductions, table, address, (shape, *dtypes))
        sizes = table[2] * np.array([dtype.itemsize for dtype in dtypes])
        if not intervals.all_apart(table[0], sizes):  # one handshake for all needs them apart
            return None
        linked = self._shapes.get(fresh.shape)
        return fresh if linked is None else self.remember(fresh, linked)

    def remember(self, fresh: NewBatch, linked: Linked) -> PreparedBatch:
        """Keep a batch with its program."""
        if len(self._known) >= LIMIT:
            self._known.clear()
        if len(self._shapes) >= LIMIT:
            self._shapes.clear()
        self._shapes[fresh.shape] = linked
        known = PreparedBatch(fresh.reductions, fresh.table, fresh.address, linked, fresh.shape)
        self._known[fresh.key] = known
        return known


def _same(arrays: list[Any], known: PreparedBatch) -> bool:
    """Say whether arrays are as a batch's were."""
    return bool(plain.same_arrays(arrays, len(arrays), _NDARRAY, known.address))
