"""Launches that are known: found again by the identity of their arrays.

A recipe is found only while each array is the very object that it was made for, at the same address
and of the same size and type (an array that can't change is not looked at again). It holds arrays
weakly: what nobody else needs is freed, and its recipe is never found again, whose ids others have.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

from nc10d.arrays.access import arrays_of, first_array
from nc10d.arrays.buffer import as_buffer
from nc10d.backend.nccl.bindings import native
from nc10d.backend.nccl.comm.comm_streams import CommStream
from nc10d.backend.nccl.launch.launch_table import LaunchTable
from nc10d.cuda.memory import DeviceArray
from nc10d.cuda.streams import home_of
from nc10d.kernels.cache import entry_point
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

_same = entry_point(native.nc10d_nccl_same_objects)
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


class CachedLaunch:
    """How a launch is run: its lanes, and the table of calls once they are formed.

    `receives` says whether there are receives in it, whose senders are the launch's result;
    `blocks` whether there is a barrier, for which the host waits too. `home` is the stream that is
    current for its first array where nobody chooses one; None: that has to be asked.
    """

    __slots__ = (
        *("_freed", "_ids", "_refs", "_descriptions"),
        *("blocks", "default_stream", "comm_streams", "table", "receives"),
    )

    def __init__(self, comm_streams: tuple[CommStream, ...], ops: Sequence[Op]) -> None:
        uniform = type(ops) is AllReduces
        self.comm_streams = comm_streams
        self.default_stream = home_of(first_array(ops))
        self.receives = not uniform and any(type(op) is Recv for op in ops)
        self.blocks = not uniform and any(type(op) is Barrier for op in ops)
        self.table: LaunchTable | None = None
        self._freed: list[object] = []
        self._ids = array("q")
        self._refs: Sequence[Callable[[], Any]] = ()
        self._descriptions: list[tuple[Callable[[], Any], Description]] = []

    def remember(self, arrays: Sequence[Any]) -> None:
        """Hold the arrays weakly; TypeError if they can't be."""
        gone = self._freed.append  # called with the reference when an array is freed
        self._refs = refs = list(map(weakref.ref, arrays, repeat(gone)))
        self._ids = array("q", map(id, arrays))
        if set(map(type, arrays)) != {DeviceArray}:
            self._descriptions = [
                (ref, _description(x))
                for ref, x in zip(refs, arrays, strict=True)
                if type(x) is not DeviceArray
            ]

    def is_valid(self) -> bool:
        """Say whether all arrays are alive, and what they were."""
        return not self._freed and (not self._descriptions or self._unchanged())

    def is_for(self, arrays: Sequence[Any]) -> bool:
        """Say whether these are the very arrays, all of which are alive."""
        if type(arrays) is not list:
            return list(map(id, arrays)) == self._ids.tolist()
        ids, count = self._ids.buffer_info()
        return bool(_same(id(arrays), ids, count))

    def _unchanged(self) -> bool:
        return all(_description(ref()) == spot for ref, spot in self._descriptions)


Description = tuple[Any, ...]


def _description(x: Any) -> Description:
    """Return all that a program knows of an array which may change."""
    found = as_buffer(x)
    return found.address, found.shape, found.strides, found.dtype, found.writable


class LaunchCache:
    """The latest recipes; used under the lock of the launches."""

    def __init__(self) -> None:
        self._known: dict[Key, CachedLaunch] = {}

    def find(self, key: Key | None, ops: Sequence[Op]) -> CachedLaunch | None:
        """Return the recipe of operations with a key if it still fits."""
        found = None if key is None else self._known.get(key)
        if found is None or key is None:
            return None
        if found.is_valid() and (type(ops) is not AllReduces or found.is_for(ops.arrays)):
            return found
        del self._known[key]
        return None

    def keep(self, key: Key | None, ops: Sequence[Op], cached: CachedLaunch) -> None:
        """Keep a recipe that is complete, in place of the oldest."""
        if key is None or cached.table is None:
            return
        try:
            cached.remember(_all_arrays(ops))
        except TypeError:  # arrays that can't be referred to weakly
            return
        if len(self._known) >= MOST:
            del self._known[next(iter(self._known))]
        self._known[key] = cached


def key_of(ops: Sequence[Op]) -> Key | None:
    """Return what a launch is known by; None for one that is not kept.

    A block of all_reduces is looked for by its ends, and then looked at in full.
    """
    if isinstance(ops, AllReduces):
        arrays = ops.arrays
        return ops.op, len(arrays), id(arrays[0]), id(arrays[-1])
    key = tuple(map(_signature, ops))
    return None if None in key else key


def _signature(op: Op) -> Key | None:
    sign = _SIGNATURES.get(type(op))
    if sign is None or isinstance(getattr(op, "out", None), (list, tuple)):
        return None
    return None if isinstance(getattr(op, "inp", None), (list, tuple)) else sign(op)


def _all_arrays(ops: Sequence[Op]) -> Sequence[Any]:
    return ops.arrays if isinstance(ops, AllReduces) else [x for op in ops for x in arrays_of(op)]
