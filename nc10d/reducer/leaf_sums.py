"""Sums over a fixed binary tree of leaves: the same bits on any number of ranks.

An all_reduce adds up what each rank has summed before, so its rounding depends on the number of
ranks. Here the numbered leaves are the operands, and the tree is fixed (`nc10d.ops.leaf_tree`):
rank r holds a range of leaves, adds up the largest subtrees inside, and the ranks combine the
rest in the tree's order. Floats of 8 and 16 bits are added in float32, and rounded once, at the
root.

Sources: EasyScale (SC 2023; virtual workers as leaves of a fixed tree), Stelz 2022 (KaMPIng).

How the ranks combine, by the number of subtrees and of bytes:

| case | how |
|---|---|
| no order changes a bit: two subtrees, or ints | an all_reduce |
| few bytes | an all_reduce by BOR, with a row for each subtree; each rank combines all |
| else, window by window | an all_to_all; each rank combines its chunk; an all_gather |
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from nc10d.api import registered
from nc10d.arrays.arguments import (
    array,
    check_count,
    check_disjoint,
    check_reducible,
    check_same_type,
    is_list,
)
from nc10d.arrays.dtypes import DType, element_of, order_matters, scalar
from nc10d.backend.polled.flat_buffers import kernel
from nc10d.group.process_group import ProcessGroup
from nc10d.group.world import Group, NonMember, group_or_default, warn_non_member
from nc10d.kernels.reduce import address
from nc10d.kernels.simd import WIDEN
from nc10d.ops import AVG, BOR, SUM, Array, ReduceOp
from nc10d.ops.leaf_tree import join, leaf_tree
from nc10d.reducer.packing import cast

Flat = np.ndarray[Any, np.dtype[Any]]
_FEW_BYTES = 256 << 10
"""So many bytes of all ranks' subtrees, or fewer, go to every rank."""
_WINDOW_BYTES = 1 << 20
_CALL = "all_reduce_leaves"
_memory: WeakKeyDictionary[ProcessGroup, dict[str, Flat]] = WeakKeyDictionary()
"""By group: bytes for each purpose. All sums of a group share them, since each blocks."""


def all_reduce_leaves(
    out: Array, mine: Sequence[Array], leaves: int = 8, group: Group = None, op: ReduceOp = SUM
) -> None:
    """Write the sum, or average, of numbered arrays to `out` on every rank: `leaves` in all.

    `mine` are this rank's leaves, those in `leaf_range(leaves)`, with the dtype and the number of
    elements of `out`, which may be a rank's only leaf itself. The tree of additions is fixed by
    `leaves`, a power of two: the result has the same bits on 1 to `leaves` ranks, on any hosts and
    backends, if the leaves have. Floats of 8 and 16 bits are added in float32 and rounded once. AVG
    divides the sum by `leaves`.

        dist.all_reduce_leaves(out, [gradient(i) for i in dist.leaf_range(8)], leaves=8)

    Blocks until all ranks have called. ValueError or TypeError, on this rank and before anything is
    sent, for arguments that do not fit, another number of arrays, and arrays on devices. ValueError
    inside a coalescing block. CollectiveMismatch if ranks give different `leaves`, `op` or sizes.
    """
    chosen = group_or_default(group)
    if isinstance(chosen, NonMember):
        warn_non_member(_CALL, 3)
        return
    chosen.refuse_in_batch(_CALL)
    held = leaf_tree(leaves, chosen.rank, chosen.size).mine
    if not is_list(mine) or len(mine) != len(held):
        wanted = f"{len(held)} arrays, leaves {held.start} to {held.stop - 1} of {leaves}"
        found = len(mine) if is_list(mine) else type(mine).__name__
        raise ValueError(f"{_CALL}: mine must be a list of {wanted}, got {found}")
    whole, operands = (out, mine) if _are_plain(out, mine, op) else _checked(out, mine, op)
    flat, *operands = (x.ravel() for x in (whole, *operands))
    sums = leaf_sum(chosen.rank, chosen.size, leaves, op, scalar(element_of(flat.dtype)))
    counter, count = HeldSums(chosen, sums), len(flat) or 1
    step = sums.window if leaves > chosen.size else count  # a single leaf is not added up here
    for window in (slice(low, low + step) for low in range(0, count, step)):
        for x in operands:
            counter.add(x[window])
        counter.reduce(flat[window])
    if not whole.flags.c_contiguous:
        whole[...] = flat.reshape(whole.shape)


def leaf_range(leaves: int, group: Group = None) -> range:
    """Return the numbers of the leaves that this rank holds; none for a non-member.

    Shares are in order and as even as possible; the lower ranks have one more. ValueError unless
    `leaves` is a power of two, and at least the number of ranks.
    """
    chosen = group_or_default(group)
    if isinstance(chosen, NonMember):
        return range(0)
    return leaf_tree(leaves, chosen.rank, chosen.size).mine


def _are_plain(out: Array, mine: Sequence[Array], op: ReduceOp) -> bool:
    """Return whether all arrays are certainly valid; others take the long checks."""
    if type(out) is not np.ndarray or out.dtype.kind not in "fiu" or op not in (SUM, AVG):
        return False
    for x in (out, *mine):
        alike = type(x) is np.ndarray and x.dtype is out.dtype and x.shape == out.shape
        if not (alike and x.flags.carray):
            return False
    in_place = len(mine) == 1 and mine[0] is out
    return in_place or not any(np.may_share_memory(x, out) for x in mine)


def _checked(out: Array, mine: Sequence[Array], op: ReduceOp) -> tuple[Flat, list[Flat]]:
    """Return valid arrays as ndarrays."""
    result = array(_CALL, "out", out, written=True)
    check_reducible(result, op)
    if op.pairwise is not SUM.pairwise or op.kind.prepares:
        raise ValueError(f"{_CALL}: op must be SUM or AVG, got {op.name}")
    operands = [array(_CALL, f"mine[{i}]", x, written=False) for i, x in enumerate(mine)]
    if result.buffer.device != "cpu":
        raise TypeError(f"{_CALL}: out is on {result.buffer.device}: leaves are added on the CPU")
    check_same_type([result, *operands])
    for each in operands:
        check_count(each, result.buffer.count, "as many as out")
    if len(mine) > 1 or mine[0] is not out:
        check_disjoint([result, *operands])
    return result.buffer.as_numpy(), [x.buffer.as_numpy() for x in operands]


class LeafSum:
    """Sums arrays of `dtype` over a tree, as rank `rank` of `size`; ranks compare `purpose`.

    Subtrees are added in the type `total`, and sent in the type `wire`: the leaves' own, if a
    subtree is a single leaf on every rank.
    """

    def __init__(
        self, rank: int, size: int, leaves: int, op: ReduceOp, dtype: DType, purpose: str = _CALL
    ) -> None:
        self.tree = tree = leaf_tree(leaves, rank, size)
        self._rank, self._size = int(rank), int(size)
        self.dtype, self.total = dtype, DType.FLOAT32 if dtype in WIDEN else dtype
        self.wire = dtype if tree.count == leaves else self.total
        self._add = kernel(address(op.pairwise.name, self.total))
        finishes = op.kind.finishes if leaves > 1 else ""
        self._divide = kernel(address(finishes, self.total)) if finishes else None
        text = f"{purpose} with {leaves} leaves, {op.name}"
        counts = [len(each) for each in tree.subtrees]
        self._splits = (counts, [counts[rank]] * size) if len({*counts}) > 1 else ()
        self._any_order = not order_matters(op, self.total, tree.count)
        self._summing, self._gathering = SUM.meant_for(text), BOR.meant_for(text)
        self.window = max(1, _WINDOW_BYTES // self.total.itemsize // self._size) * self._size
        """The most elements that are best summed at once."""

    def add(self, dst: Flat, a: Flat, b: Flat) -> None:
        """dst := a + b, of the type `total`; dst may be a or b."""
        self._add(dst.ctypes.data, a.ctypes.data, b.ctypes.data, dst.nbytes)

    def reduce(self, group: ProcessGroup, parts: Sequence[Flat], out: Flat) -> None:
        """Combine this rank's subtrees `parts` with the other ranks' into `out`. Blocks."""
        count = len(out)
        if self._size == 1:
            self._finish(parts[0], out)
        elif self._any_order:
            self._reduce_natively(group, parts, out)
        else:
            many = self.tree.count * count * self.wire.itemsize > _FEW_BYTES
            whole = count - count % self._size if many else 0
            # The first call compares the ranks' purpose, also where it has no elements.
            self._exchange_few(group, [x[whole:] for x in parts], out[whole:], count)
            for low in range(0, whole, self.window):
                window = slice(low, min(whole, low + self.window))
                self._exchange(group, [x[window] for x in parts], out[window])

    def _reduce_natively(self, group: ProcessGroup, parts: Sequence[Flat], out: Flat) -> None:
        # An average of narrow floats is rounded once, so their sum stays in float32.
        dtype = self.wire if self._divide is None else self.total
        x = out if dtype is self.dtype else _scratch(group, "sum", dtype, len(out))
        _convert(parts[-1], x)  # the last may lie in `out`
        for part in parts[:-1]:  # several subtrees are ints, in any order
            self.add(x, x, part)
        group.all_reduce(x, self._summing)
        self._finish(x, out)

    def _exchange_few(
        self, group: ProcessGroup, parts: Sequence[Flat], out: Flat, count: int
    ) -> None:
        # A BOR with zeros gathers subtrees of any number a rank, and compares purpose and count.
        how = self._gathering
        if count != len(out):
            how = how.meant_for(f"{how.purpose}, {count} elements")
        rows = np.zeros((self.tree.count, len(out)), self.wire.numpy)
        first = sum(map(len, self.tree.subtrees[: self._rank]))
        rows[first : first + len(parts)] = parts
        group.all_reduce(rows.view(np.uint8), how)
        if len(out):
            self._combine(group, rows, out)

    def _exchange(self, group: ProcessGroup, parts: Sequence[Flat], out: Flat) -> None:
        many, chunk = len(parts), len(out) // self._size
        sent = parts[0].reshape(self._size, chunk)
        if many > 1:
            sent = _scratch(group, "sent", self.wire, many * len(out)).reshape(-1, chunk)
            for i, part in enumerate(parts):
                sent[i::many] = part.reshape(self._size, chunk)
        rows = _scratch(group, "received", self.wire, self.tree.count * chunk).reshape(-1, chunk)
        group.all_to_all_single(rows, sent, *self._splits)
        own = out[self._rank * chunk :][:chunk]
        self._combine(group, rows, own)
        group.all_gather_into_tensor(out, own)

    def _combine(self, group: ProcessGroup, rows: Flat, out: Flat) -> None:
        """out := the root; the rows, all ranks' subtrees, are overwritten."""
        if self.wire is not self.total:
            narrow, rows = rows, _scratch(group, "wide", self.total, rows.size).reshape(rows.shape)
            cast(narrow, rows)
        first, nbytes = rows.ctypes.data, rows[0].nbytes
        at = [first + i * nbytes for i in range(len(rows))]
        for left, right in self.tree.pairs[:-1]:
            self._add(at[left], at[left], at[right], nbytes)
        root = out if self.total is self.dtype else rows[0]
        self._add(root.ctypes.data, at[0], at[self.tree.pairs[-1][1]], nbytes)
        self._finish(root, out)

    def _finish(self, root: Flat, out: Flat) -> None:
        """out := the root, divided and rounded."""
        if self._divide is not None:
            to = out if self.total is self.dtype else root
            self._divide(to.ctypes.data, root.ctypes.data, self.tree.leaves, to.nbytes)
            root = to
        _convert(root, out)


leaf_sum = lru_cache(LeafSum)
"""The LeafSum for these arguments."""


class HeldSums:
    """The sums of the subtrees that this rank's leaves have formed so far, as a binary counter."""

    def __init__(self, group: ProcessGroup, sums: LeafSum) -> None:
        self._group, self._sums = group, sums
        self._nodes: list[range] = []
        self._held: list[Flat] = []
        self._memory: dict[int, Flat] = {}
        """By index in `_held`: memory for a sum, where that is not a leaf itself."""

    def add(self, leaf: Flat, keep: bool = False) -> None:
        """Take the next leaf; with `keep`, its memory may change after the call."""
        sums, count = self._sums, len(leaf)
        number = self._nodes[-1].stop if self._nodes else sums.tree.mine.start
        pairs = join(self._nodes, range(number, number + 1))
        x = leaf
        if sums.wire is not sums.dtype or (keep and not pairs):
            x = _scratch(self._group, "leaf", sums.wire, count) if pairs else self._own(count)
            _convert(leaf, x)
        for _ in range(pairs):
            left = self._held.pop()
            total = self._own(count)
            sums.add(total, left, x)
            x = total
        self._held.append(x)

    def reduce(self, out: Flat) -> None:
        """Combine the sums of all ranks into `out`, and begin again. Blocks."""
        self._sums.reduce(self._group, self._held, out)
        self._nodes, self._held = [], []

    def _own(self, count: int) -> Flat:
        """Return this object's memory for the next element in `_held`."""
        # No later array is longer: windows of an array, or the passes of a bucket.
        index = len(self._held)
        if index not in self._memory:
            self._memory[index] = np.empty(count, self._sums.wire.numpy)
        return self._memory[index][:count]


def _convert(source: Flat, target: Flat) -> None:
    """Write the elements in another dtype, if that differs; `target` may be `source`."""
    if source.dtype != target.dtype:
        cast(source, target)
    elif source is not target and source.ctypes.data != target.ctypes.data:
        target[...] = source


def _scratch(group: ProcessGroup, purpose: str, dtype: DType, count: int) -> Flat:
    """Return memory that the next call for the same purpose overwrites."""
    memory, nbytes = _memory.setdefault(group, {}), count * dtype.itemsize
    found = memory.get(purpose)
    if found is None or len(found) < nbytes:
        found = memory[purpose] = registered.empty(nbytes, np.uint8, group)
    return found[:nbytes].view(dtype.numpy)
