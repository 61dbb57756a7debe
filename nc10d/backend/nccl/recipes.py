"""Launches that are known: found again by the identity of their arrays.

A recipe is found only while each array is the very object that it was made for, at the same address
and of the same size (an array that can't change is not looked at again). It holds arrays weakly:
what nobody else needs is freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from nc10d.backend.nccl.lanes import Lane
from nc10d.backend.nccl.programs import Program
from nc10d.buffer import as_buffer
from nc10d.cuda.memory import DeviceArray
from nc10d.ops import AllGather, AllReduce, Broadcast, Op, Recv, Reduce, ReduceScatter, Send

MOST = 64
Key = tuple[Any, ...]

# What makes two operations the same; lists of arrays are not kept.
_SIGNATURES: dict[type[Any], Callable[[Any], Key]] = {
    Reduce: lambda op: (Reduce, id(op.x), op.op, op.root),
    Broadcast: lambda op: (Broadcast, id(op.x), op.root),
    AllGather: lambda op: (AllGather, id(op.out), id(op.inp)),
    ReduceScatter: lambda op: (ReduceScatter, id(op.out), id(op.inp), op.op),
    Send: lambda op: (Send, id(op.x), op.peer, op.tag),
    Recv: lambda op: (Recv, id(op.x), op.peer, op.tag),
}


class Recipe:
    """How a launch is run: its lanes, and the table of calls once they are formed.

    `receives` says whether there are receives in it, whose senders are the launch's result.
    """

    __slots__ = ("_arrays", "lanes", "program", "receives", "spots")

    def __init__(self, lanes: tuple[Lane, ...], receives: bool) -> None:
        self.lanes = lanes
        self.receives = receives
        self.program: Program | None = None
        self._arrays: list[Callable[[], Any]] = []
        self.spots: list[tuple[Callable[[], Any], int, int]] = []

    def remember(self, arrays: Sequence[Any]) -> None:
        """Hold the arrays weakly; TypeError if they can't be."""
        self._arrays = [weakref.ref(x) for x in arrays]
        for ref, x in zip(self._arrays, arrays, strict=True):
            if type(x) is not DeviceArray:
                buffer = as_buffer(x)
                self.spots.append((ref, buffer.address, buffer.nbytes))

    def fits(self, arrays: Sequence[Any]) -> bool:
        """Say whether it was made for these very arrays, and they are where they were."""
        for ref, x in zip(self._arrays, arrays, strict=True):
            if ref() is not x:
                return False
        return self.in_place()

    def in_place(self) -> bool:
        """Say whether the arrays that can move are where they were; all of them are alive."""
        for ref, address, nbytes in self.spots:
            buffer = as_buffer(ref())
            if (buffer.address, buffer.nbytes) != (address, nbytes):
                return False
        return True


class Recipes:
    """The latest recipes; used under the lock of the launches."""

    def __init__(self) -> None:
        self._known: dict[Key, Recipe] = {}

    def find(self, key: Key | None, ops: Sequence[Op]) -> Recipe | None:
        """Return the recipe of a key if it still fits."""
        found = None if key is None else self._known.get(key)
        if found is None or key is None:
            return None
        if found.fits(arrays_of(ops)):
            return found
        del self._known[key]
        return None

    def keep(self, key: Key | None, ops: Sequence[Op], recipe: Recipe) -> None:
        """Keep a recipe that is complete, in place of the oldest."""
        if key is None or recipe.program is None:
            return
        try:
            recipe.remember(arrays_of(ops))
        except TypeError:  # arrays that can't be referred to weakly
            return
        if len(self._known) >= MOST:
            del self._known[next(iter(self._known))]
        self._known[key] = recipe


def key_of(ops: Sequence[Op]) -> Key | None:
    """Return what a launch is known by; None for one that is not kept."""
    # Nearly all blocks that come again are all_reduces, so these have a way of their own.
    key = tuple(
        [(AllReduce, id(op.x), op.op) if type(op) is AllReduce else _signature(op) for op in ops]
    )
    return None if None in key else key


def _signature(op: Op) -> Key | None:
    sign = _SIGNATURES.get(type(op))
    if sign is None or isinstance(getattr(op, "out", None), (list, tuple)):
        return None
    return None if isinstance(getattr(op, "inp", None), (list, tuple)) else sign(op)


def arrays_of(ops: Sequence[Op]) -> list[Any]:
    """Return the arrays of operations that have no lists: (output, input) or the only one."""
    found: list[Any] = []
    for op in ops:
        if type(op) is AllGather or type(op) is ReduceScatter:
            found += (op.out, op.inp)
        else:
            found.append(op.x)  # type: ignore[union-attr]
    return found
