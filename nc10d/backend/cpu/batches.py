"""Batches of all_reduces on plain arrays: known again by their arrays, or at least by their shapes.

A block that comes again with the same arrays costs one look at each of them. No reference to them
is kept: the table of addresses serves whatever ndarrays have just these addresses, dtypes, element
counts and flags now, be they the same objects or not (an array can be resized in place, and its
number be another's later).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nc10d import spans
from nc10d.backend.cpu.linking import Linked
from nc10d.backend.cpu.native import arrays as plain
from nc10d.ops import AllReduce, Kept, Op

Words = npt.NDArray[np.int64]
LIMIT = 256
_NDARRAY = id(np.ndarray)


@dataclass(slots=True)
class KnownBatch:
    """A batch that may come again: how its arrays were, and its program.

    `table` has three columns: addresses, dtypes and element counts.
    """

    reductions: list[Any]
    table: Words
    address: int
    linked: Linked
    shape: tuple[Any, ...]


@dataclass(slots=True)
class Fresh:
    """A batch of plain arrays seen for the first time: what to remember once it has a program."""

    key: tuple[int, ...]
    reductions: list[Any]
    table: Words
    address: int
    shape: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Noted:
    """What operations that are kept know of themselves: their batch, and whose it is."""

    owner: Batches
    batch: KnownBatch
    arrays: list[Any]


class Batches:
    """The batches that a group has launched."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], KnownBatch] = {}
        self._shapes: dict[tuple[Any, ...], Linked] = {}

    def find(self, ops: Sequence[Op]) -> KnownBatch | Fresh | None:
        """Look a batch up; None if it is not all_reduces of plain arrays apart from each other."""
        if type(ops) is not Kept:
            return self._find(ops, [op.x for op in ops if type(op) is AllReduce])
        noted = ops.known
        if type(noted) is Noted and noted.owner is self and _same(noted.arrays, noted.batch):
            return noted.batch
        arrays = [op.x for op in ops if type(op) is AllReduce]
        found = self._find(ops, arrays)
        if isinstance(found, KnownBatch):
            ops.known = Noted(self, found, arrays)
        return found

    def _find(self, ops: Sequence[Op], arrays: list[Any]) -> KnownBatch | Fresh | None:
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
    ) -> KnownBatch | Fresh | None:
        count = len(arrays)
        table: Words = np.empty((3, count), np.int64)
        address: int = plain.address(table)
        if plain.read_arrays(arrays, count, _NDARRAY, address) >= 0:
            return None
        reductions = [op.op for op in ops]  # type: ignore[union-attr]
        # Dtypes by address: sound because the shape keeps them alive.
        dtypes = [x.dtype for x in arrays]
        shape = (*table[1:].ravel().tolist(), *reductions)
        fresh = Fresh(key, reductions, table, address, (shape, *dtypes))
        sizes = table[2] * np.array([dtype.itemsize for dtype in dtypes])
        if not spans.all_apart(table[0], sizes):  # one handshake for all needs them apart
            return None
        linked = self._shapes.get(fresh.shape)
        return fresh if linked is None else self.remember(fresh, linked)

    def remember(self, fresh: Fresh, linked: Linked) -> KnownBatch:
        """Keep a batch with its program."""
        if len(self._known) >= LIMIT:
            self._known.clear()
        if len(self._shapes) >= LIMIT:
            self._shapes.clear()
        self._shapes[fresh.shape] = linked
        known = KnownBatch(fresh.reductions, fresh.table, fresh.address, linked, fresh.shape)
        self._known[fresh.key] = known
        return known


def _same(arrays: list[Any], known: KnownBatch) -> bool:
    """Say whether arrays are as a batch's were."""
    return bool(plain.same_arrays(arrays, len(arrays), _NDARRAY, known.address))
