"""Sums over a fixed binary tree of leaves: the same bits on any number of ranks.

An all_reduce adds up what each rank has summed before, so its rounding depends on the number of
ranks. Here the numbered leaves are the operands, and the tree is fixed (`nc10d.ops.leaf_tree`):
rank r holds a range of leaves, adds up the largest subtrees inside, and the ranks combine the
rest in the tree's order. Floats of 8 and 16 bits are added in float32, and rounded once, at the
root.

The caller computes the leaves: a kernel whose own bits depend on the size of its batch, or on the
number of threads, gives other leaves.

Sources: EasyScale (SC 2023; virtual workers as leaves of a fixed tree), Stelz 2022 (KaMPIng).

How the ranks combine, by the number of subtrees and of bytes:

| case | how |
|---|---|
| no order changes a bit: two subtrees, or ints | an all_reduce |
| few bytes | an all_reduce by BOR, with a place for each subtree; each rank combines all |
| else, window by window | an all_to_all; each rank combines its chunk; an all_gather |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nc10d.api import registered
from nc10d.arrays.arguments import (
    array,
    check_count,
    check_disjoint,
    check_reducible,
    check_same_type,
)
from nc10d.arrays.buffer import as_buffer
from nc10d.arrays.dtypes import DType, element_of, order_matters, scalar
from nc10d.backend.polled.flat_buffers import kernel
from nc10d.group.world import Group, NonMember, group_or_default, warn_non_member
from nc10d.kernels.reduce import divide_address, kernel_address
from nc10d.kernels.simd import WIDEN
from nc10d.ops import AVG, BOR, SUM, Array, ReduceOp
from nc10d.ops.leaf_tree import join, leaf_plan
from nc10d.reducer.packing import cast

if TYPE_CHECKING:
    from nc10d.group.process_group import ProcessGroup

Flat = np.ndarray[Any, np.dtype[Any]]
_FEW_BYTES = 256 << 10
"""So many bytes of all ranks' subtrees, or fewer, go to every rank."""
_WINDOW_BYTES = 1 << 20
_CALL = "all_reduce_leaves"


def all_reduce_leaves(
    out: Array, mine: Sequence[Array], leaves: int = 8, group: Group = None, op: ReduceOp = SUM
) -> None:
    """Write the sum, or average, of numbered arrays to `out` on every rank: `leaves` in all.

    `mine` are this rank's leaves, those in `leaf_range(leaves)`, with the dtype and the number of
    elements of `out`, which may be a rank's only leaf itself. The tree of additions is fixed by
    `leaves`, a power of two: the result has the same bits on 1 to `leaves` ranks, on any hosts and
    backends. Floats of 8 and 16 bits are added in float32 and rounded once. AVG divides the sum by
    `leaves`. Leaves whose own bits depend on the ranks, as by kernels that add up a batch of
    another size, are not cured.

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
    plan = leaf_plan(leaves, chosen.rank, chosen.size)
    if not isinstance(mine, (list, tuple)) or len(mine) != len(plan.mine):
        found = len(mine) if isinstance(mine, (list, tuple)) else type(mine).__name__
        numbers = f"leaves {plan.mine.start} to {plan.mine.stop - 1} of {leaves}"
        raise ValueError(
            f"{_CALL}: mine must be a list of {len(plan.mine)} arrays, {numbers}: {found}"
        )
    flat, operands = _plain(out, mine, op) or _checked(out, mine, op)
    key = leaves, op, flat.dtype
    sums = chosen.leaf_sums.get(key)
    if sums is None:
        made = LeafSum(chosen, leaves, op, scalar(element_of(flat.dtype)))
        sums = chosen.leaf_sums.setdefault(key, made)
    if leaves == chosen.size:
        sums.reduce(chosen, operands, flat)
    else:
        held = HeldSums(sums)
        for low in range(0, len(flat) or 1, sums.window):
            window = slice(low, low + sums.window)
            for x in operands:
                held.add(x[window])
            held.reduce(chosen, flat[window])
    if flat.base is None and flat is not out:  # a copy of an array with gaps
        target = as_buffer(out).as_numpy()
        target[...] = flat.reshape(target.shape)


def leaf_range(leaves: int, group: Group = None) -> range:
    """Return the numbers of the leaves that this rank holds; none for a non-member.

    Shares are in order and as even as possible; the lower ranks have one more. ValueError unless
    `leaves` is a power of two, and at least the number of ranks.
    """
    chosen = group_or_default(group)
    if isinstance(chosen, NonMember):
        return range(0)
    return leaf_plan(leaves, chosen.rank, chosen.size).mine


def _plain(out: Array, mine: Sequence[Array], op: ReduceOp) -> tuple[Flat, list[Flat]] | None:
    """Return flat views if all arrays are plain and valid; None for others, which are checked."""
    if not (op is SUM or op is AVG) or type(out) is not np.ndarray or out.dtype.kind not in "fiu":
        return None
    for x in mine:
        alike = type(x) is np.ndarray and x.dtype is out.dtype and x.shape == out.shape
        if not (alike and x.flags.carray and (x is out or not np.may_share_memory(x, out))):
            return None
    if not out.flags.carray or (len(mine) > 1 and any(x is out for x in mine)):
        return None
    return out.reshape(-1), [x.reshape(-1) for x in mine]


def _checked(out: Array, mine: Sequence[Array], op: ReduceOp) -> tuple[Flat, list[Flat]]:
    result = array(_CALL, "out", out, written=True)
    check_reducible(result, op)
    if op.kind not in (SUM.kind, AVG.kind):
        raise ValueError(f"{_CALL}: op must be SUM or AVG, got {op.name}")
    operands = [array(_CALL, f"mine[{i}]", x, written=False) for i, x in enumerate(mine)]
    if result.buffer.device != "cpu":
        raise TypeError(f"{_CALL}: out is on {result.buffer.device}: leaves are added on the CPU")
    check_same_type([result, *operands])
    for each in operands:
        check_count(each, result.buffer.count, "as many as out")
    if len(mine) > 1 or mine[0] is not out:
        check_disjoint([result, *operands])
    whole = result.buffer.as_numpy()
    flat = whole.reshape(-1) if result.buffer.contiguous else np.empty(whole.size, whole.dtype)
    return flat, [np.ascontiguousarray(x.buffer.as_numpy()).reshape(-1) for x in operands]


class LeafSum:
    """Sums arrays of `dtype` over a tree, as a rank of `group`; ranks compare `purpose`.

    Subtrees are added in the type `total`, and sent in the type `wire`: the leaves' own, if a
    subtree is a single leaf on every rank.
    """

    def __init__(
        self, group: ProcessGroup, leaves: int, op: ReduceOp, dtype: DType, purpose: str = ""
    ) -> None:
        self._size = int(group.size)
        self.plan = plan = leaf_plan(leaves, group.rank, group.size)
        self.dtype, self.total = dtype, DType.FLOAT32 if dtype in WIDEN else dtype
        self.wire = dtype if plan.total == leaves else self.total
        self._add = kernel(kernel_address("SUM", self.total))
        divides = op.kind.finishes and leaves > 1
        self._divide = kernel(divide_address(self.total)) if divides else None
        text = f"{purpose or _CALL} with {leaves} leaves, {op.name}"
        self._any_order = not order_matters(SUM, self.total, plan.total)
        self._summing, self._gathering = SUM.meant_for(text), BOR.meant_for(text)
        self._memory: dict[str, Flat] = {}
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
            many = self.plan.total * count * self.wire.itemsize > _FEW_BYTES
            whole = count - count % self._size if many else 0
            # The first call compares the ranks' purpose, also where it has no elements.
            self._exchange_few(group, [x[whole:] for x in parts], out[whole:], count)
            for low in range(0, whole, self.window):
                high = min(whole, low + self.window)
                self._exchange(group, [x[low:high] for x in parts], out[low:high])

    def _reduce_natively(self, group: ProcessGroup, parts: Sequence[Flat], out: Flat) -> None:
        # An average of narrow floats is rounded once, so their sum stays in float32.
        narrow = self.wire is not self.total and self._divide is None
        direct = narrow or self.total is self.dtype
        x = out if direct else self._scratch(group, "sum", self.total, len(out))
        last = parts[-1]  # may be `out` itself
        if x.dtype != last.dtype:
            cast(last, x)
        elif x.ctypes.data != last.ctypes.data:
            x[...] = last
        for part in parts[:-1]:  # several subtrees are ints, in any order
            self.add(x, x, part)
        group.all_reduce(x, self._summing)
        if x is not out or self._divide is not None:
            self._finish(x, out)

    def _exchange_few(
        self, group: ProcessGroup, parts: Sequence[Flat], out: Flat, count: int
    ) -> None:
        # A BOR with zeros gathers subtrees of any number a rank, and compares purpose and count.
        how = self._gathering
        if count != len(out):
            how = how.meant_for(f"{how.purpose}, {count} elements")
        rows = np.zeros((self.plan.total, len(out)), self.wire.numpy)
        first = sum(map(len, self.plan.parts[: self.plan.rank]))
        rows[first : first + len(parts)] = parts
        group.all_reduce(rows.view(np.uint8), how)
        if len(out):
            self._combine(group, rows, range(len(rows)), out)

    def _exchange(self, group: ProcessGroup, parts: Sequence[Flat], out: Flat) -> None:
        size, most, chunk = self._size, self.plan.most, len(out) // self._size
        sent = parts[0]
        if most > 1:
            sent = self._scratch(group, "sent", self.wire, size * most * chunk)
            by_rank = sent.reshape(size, most, chunk)
            for place, part in enumerate(parts):
                by_rank[:, place] = part.reshape(size, chunk)
        received = self._scratch(group, "received", self.wire, size * most * chunk)
        group.all_to_all_single(received, sent)
        own = out[self.plan.rank * chunk :][:chunk]
        places = [r * most + i for r, each in enumerate(self.plan.parts) for i in range(len(each))]
        self._combine(group, received.reshape(-1, chunk), places, own)
        group.all_gather_into_tensor(out, own)

    def _combine(self, group: ProcessGroup, rows: Flat, places: Sequence[int], out: Flat) -> None:
        """out := the root; `places` are the rows of the subtrees, which are overwritten."""
        if self.wire is not self.total:
            narrow, rows = rows, self._scratch(group, "wide", self.total, rows.size)
            cast(narrow.reshape(-1), rows)
            rows = rows.reshape(narrow.shape)
        first, step, nbytes = rows.ctypes.data, rows.strides[0], rows[0].nbytes
        at = [first + place * step for place in places]
        for left, right in self.plan.pairs[:-1]:
            self._add(at[left], at[left], at[right], nbytes)
        target = out if self.total is self.dtype else rows[places[0]]
        self._add(target.ctypes.data, at[0], at[self.plan.pairs[-1][1]], nbytes)
        self._finish(target, out)

    def _finish(self, root: Flat, out: Flat) -> None:
        """out := the root, divided and rounded."""
        if self._divide is not None:
            to = out if self.total is self.dtype else root
            self._divide(to.ctypes.data, root.ctypes.data, self.plan.leaves, to.nbytes)
            root = to
        if root.dtype != out.dtype:
            cast(root, out)
        elif root is not out:
            out[...] = root

    def _scratch(self, group: ProcessGroup, name: str, dtype: DType, count: int) -> Flat:
        """Return memory for a purpose, which the next call for the same purpose overwrites."""
        nbytes = count * dtype.itemsize
        found = self._memory.get(name)
        if found is None or len(found) < nbytes:
            found = self._memory[name] = registered.empty(nbytes, np.uint8, group)
        return found[:nbytes].view(dtype.numpy)


class HeldSums:
    """The sums of the subtrees that this rank's leaves have formed so far, as a binary counter."""

    def __init__(self, sums: LeafSum) -> None:
        self._sums = sums
        self._nodes: list[range] = []
        self._held: list[tuple[Flat, Flat | None]] = []
        """By subtree: its sum, and this object's own memory below; None: the leaf's is the sum."""
        self._free: list[Flat] = []

    def add(self, leaf: Flat, keep: bool = False) -> None:
        """Take the next leaf; with `keep`, its memory may change after the call."""
        sums, count = self._sums, len(leaf)
        number = self._nodes[-1].stop if self._nodes else sums.plan.mine.start
        pairs = join(self._nodes, range(number, number + 1))
        x, memory = leaf, None
        if sums.wire is not sums.dtype or (keep and not pairs):
            memory = self._take(count)
            x = memory[:count]
            cast(leaf, x)
        for _ in range(pairs):
            left, below = self._held.pop()
            to = below if below is not None else memory if memory is not None else self._take(count)
            sums.add(to[:count], left, x)
            if memory is not None and memory is not to:
                self._free.append(memory)
            x, memory = to[:count], to
        self._held.append((x, memory))

    def reduce(self, group: ProcessGroup, out: Flat) -> None:
        """Combine the sums of all ranks into `out`, and begin again. Blocks."""
        self._sums.reduce(group, [x for x, _ in self._held], out)
        self._free += [memory for _, memory in self._held if memory is not None]
        self._nodes, self._held = [], []

    def _take(self, count: int) -> Flat:
        # No later array is longer: windows of an array, or the passes of a bucket.
        return self._free.pop() if self._free else np.empty(count, self._sums.wire.numpy)
