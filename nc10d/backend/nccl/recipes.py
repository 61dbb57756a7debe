"""Launches that are known: found again by the identity of their arrays.

A recipe is found only while each array is the very object that it was made for, at the same address
and of the same size and type (an array that can't change is not looked at again). It holds arrays
weakly: what nobody else needs is freed, and its recipe is never found again, whose ids others have.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from nc10d.backend.nccl.lanes import Lane
from nc10d.backend.nccl.programs import Program
from nc10d.buffer import as_buffer
from nc10d.cuda.memory import DeviceArray
from nc10d.ops import (
    AllGather,
    AllReduce,
    AllReduces,
    Barrier,
    Broadcast,
    Op,
    Recv,
    Reduce,
    ReduceScatter,
    Send,
)

MOST = 64
Key = tuple[Any, ...]

# What makes two operations the same; lists of arrays are not kept.
_SIGNATURES: dict[type[Any], Callable[[Any], Key]] = {
    AllReduce: lambda op: (AllReduce, id(op.x), op.op),
    Reduce: lambda op: (Reduce, id(op.x), op.op, op.root),
    Broadcast: lambda op: (Broadcast, id(op.x), op.root),
    AllGather: lambda op: (AllGather, id(op.out), id(op.inp)),
    ReduceScatter: lambda op: (ReduceScatter, id(op.out), id(op.inp), op.op),
    Send: lambda op: (Send, id(op.x), op.peer, op.tag),
    Recv: lambda op: (Recv, id(op.x), op.peer, op.tag),
}


class Recipe:
    """How a launch is run: its lanes, and the table of calls once they are formed.

    `receives` says whether there are receives in it, whose senders are the launch's result;
    `blocks` whether there is a barrier, for which the host waits too.
    """

    __slots__ = ("_gone", "_refs", "_spots", "blocks", "lanes", "program", "receives")

    def __init__(self, lanes: tuple[Lane, ...], ops: Sequence[Op]) -> None:
        alike = type(ops) is AllReduces
        self.lanes = lanes
        self.receives = not alike and any(type(op) is Recv for op in ops)
        self.blocks = not alike and any(type(op) is Barrier for op in ops)
        self.program: Program | None = None
        self._gone: list[object] = []
        self._refs: Sequence[Callable[[], Any]] = ()
        self._spots: list[tuple[Callable[[], Any], Spot]] = []

    def remember(self, arrays: Sequence[Any]) -> None:
        """Hold the arrays weakly; TypeError if they can't be."""
        gone = self._gone.append  # called with the reference when an array is freed
        self._refs = refs = [weakref.ref(x, gone) for x in arrays]
        if set(map(type, arrays)) != {DeviceArray}:
            self._spots = [
                (ref, _spot(x))
                for ref, x in zip(refs, arrays, strict=True)
                if type(x) is not DeviceArray
            ]

    def fits(self) -> bool:
        """Say whether all arrays are alive, and what they were."""
        return not self._gone and (not self._spots or self._in_place())

    def _in_place(self) -> bool:
        return all(_spot(ref()) == spot for ref, spot in self._spots)

    @property
    def ready(self) -> Program | None:
        """The program, if it can be run now, behind nothing that waits for a lane."""
        for lane in self.lanes:
            if lane.comm is None or lane.queue:
                return None
        return self.program


Spot = tuple[Any, ...]


def _spot(x: Any) -> Spot:
    """Return all that a program knows of an array which may change."""
    found = as_buffer(x)
    return found.address, found.count, found.dtype, found.contiguous, found.writable


class Recipes:
    """The latest recipes; used under the lock of the launches."""

    def __init__(self) -> None:
        self._known: dict[Key, Recipe] = {}

    def find(self, key: Key | None) -> Recipe | None:
        """Return the recipe of a key if it still fits."""
        found = None if key is None else self._known.get(key)
        if found is None or key is None:
            return None
        if found.fits():
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
    if isinstance(ops, AllReduces):
        return ops.op, *map(id, ops.arrays)
    key = tuple(map(_signature, ops))
    return None if None in key else key


def _signature(op: Op) -> Key | None:
    sign = _SIGNATURES.get(type(op))
    if sign is None or isinstance(getattr(op, "out", None), (list, tuple)):
        return None
    return None if isinstance(getattr(op, "inp", None), (list, tuple)) else sign(op)


def arrays_of(ops: Sequence[Op]) -> Sequence[Any]:
    """Return the arrays of operations that have no lists: (output, input) or the only one."""
    if isinstance(ops, AllReduces):
        return ops.arrays
    found: list[Any] = []
    for op in ops:
        if type(op) is AllGather or type(op) is ReduceScatter:
            found += (op.out, op.inp)
        else:
            found.append(op.x)  # type: ignore[union-attr]
    return found
