"""The cache of launches, which are found again by their arrays' identity.

A cached launch is found only while each array is the same object, at the same address, with the
same size and type (an array that can't change is not compared again). References to arrays are
weak, so that the cache does not keep arrays alive. After an array is freed, another object may get
its id; the cached launch is not found any more.
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

from nc10d import ops
from nc10d.arrays.access import arrays_of, first_array
from nc10d.arrays.buffer import as_buffer
from nc10d.arrays.fields import Fields
from nc10d.backend.nccl.bindings import native
from nc10d.backend.nccl.comm.comm_streams import CommStream
from nc10d.backend.nccl.launch.launch_table import LaunchTable
from nc10d.cuda.memory import DeviceArray
from nc10d.cuda.streams import default_stream_of, freed_in_stream_order
from nc10d.kernels.cache import entry_point
from nc10d.ops.facts import facts_of, name_of

_same = entry_point(native.nc10d_nccl_same_objects)
MOST = 64
Key = tuple[Any, ...]


class CachedLaunch:
    """A launch's communicators, and the table of calls once they are formed."""

    # `counts` are the calls of the launch that each communicator gets: one for all collectives, and
    # one for each message. `receives` is true if the launch has receives, whose senders are the
    # result; `blocks` if there is a barrier, for which the host waits too. `messages` are peer and
    # tag of the sends, and of the receives; None without any. `default_stream` is the current
    # stream for the first array unless the user chooses a stream; None: to be looked up. `in_order`
    # is true if all arrays are freed in the order of that stream. `room_nbytes` is the room that
    # folds need.

    __slots__ = (
        *("__weakref__", "_freed", "_ids", "_refs", "_descriptions"),
        *("blocks", "comm_streams", "counts", "default_stream", "in_order", "label", "messages"),
        *("receives", "room_nbytes", "table"),
    )

    def __init__(
        self,
        comm_streams: tuple[CommStream, ...],
        batch: Sequence[ops.Op],
        counts: tuple[int, ...] = (1,),
    ) -> None:
        uniform = type(batch) is ops.AllReduces
        self.comm_streams, self.counts = comm_streams, counts
        self.label = name_of(batch[0]) if len(batch) == 1 else f"a batch of {len(batch)}"
        self.default_stream = default_stream_of(first_array(batch))
        self.in_order = freed_in_stream_order(set(map(type, _arrays(batch))))
        self.receives = not uniform and any(type(op) is ops.Recv for op in batch)
        self.blocks = not uniform and any(type(op) is ops.Barrier for op in batch)
        sends = () if uniform else [(op.peer, op.tag) for op in batch if type(op) is ops.Send]
        takes = () if uniform else [_sender(op) for op in batch if type(op) is ops.Recv]
        self.messages = (sends, takes) if sends or takes else None
        self.table: LaunchTable | None = None
        self.room_nbytes = 0
        self._freed: list[object] = []
        self._ids = array("q")
        self._refs: Sequence[Callable[[], object]] = ()
        self._descriptions: list[tuple[Callable[[], object], Description]] = []

    def remember(self, arrays: Sequence[object]) -> None:
        """Refer to the arrays weakly; TypeError for an array without weak references."""
        gone = self._freed.append  # called when an array is freed
        self._refs = refs = list(map(weakref.ref, arrays, repeat(gone)))
        self._ids = array("q", map(id, arrays))
        if set(map(type, arrays)) != {DeviceArray}:
            self._descriptions = [
                (ref, _description(x))
                for ref, x in zip(refs, arrays, strict=True)
                if type(x) is not DeviceArray
            ]

    def invalidate(self) -> None:
        """Let the launch be made anew: its table has an operator that is gone."""
        self._freed.append(None)

    def is_valid(self) -> bool:
        """Return whether all arrays are alive and unchanged, and the table can be run."""
        return not self._freed and (not self._descriptions or self._unchanged())

    def is_for(self, arrays: Sequence[object]) -> bool:
        """Return whether these are the same objects; all are alive."""
        if type(arrays) is not list:
            return list(map(id, arrays)) == self._ids.tolist()
        ids, count = self._ids.buffer_info()
        return bool(_same(id(arrays), ids, count))

    def _unchanged(self) -> bool:
        return all(_description(ref()) == spot for ref, spot in self._descriptions)


def _sender(op: ops.Recv) -> tuple[int, int]:
    assert op.peer is not None, "a receive from any rank has found its sender, or was refused"
    return op.peer, op.tag


Description = tuple[Any, ...]


def _description(x: object) -> Description:
    """Return the array properties on which a launch table depends."""
    found = as_buffer(x)
    return found.address, found.shape, found.strides, found.dtype, found.writable


class LaunchCache:
    """The latest cached launches; used under the launches' lock."""

    def __init__(self) -> None:
        self._known: dict[Key, CachedLaunch] = {}

    def find(self, key: Key | None, batch: Sequence[ops.Op]) -> CachedLaunch | None:
        """Return the cached launch for operations with a key, if still valid."""
        found = None if key is None else self._known.get(key)
        if found is None or key is None:
            return None
        if found.is_valid() and (type(batch) is not ops.AllReduces or found.is_for(batch.arrays)):
            return found
        del self._known[key]
        return None

    def keep(self, key: Key | None, batch: Sequence[ops.Op], cached: CachedLaunch) -> None:
        """Keep a cached launch that has its table, in place of the oldest."""
        if key is None or cached.table is None:
            return
        try:
            cached.remember(_arrays(batch))
        except TypeError:  # an array without weak references
            return
        if len(self._known) >= MOST:
            del self._known[next(iter(self._known))]
        self._known[key] = cached


def _arrays(batch: Sequence[ops.Op]) -> Sequence[object]:
    if isinstance(batch, ops.AllReduces):
        return batch.arrays
    return [x for op in batch for x in arrays_of(op)]


def key_of(batch: Sequence[ops.Op]) -> Key | None:
    """Return a launch's key, None if launches like it are not cached."""
    # The key for a block of all_reduces has the first and last array only; `find` compares all.
    if isinstance(batch, ops.AllReduces):
        arrays = batch.arrays
        return batch.op, len(arrays), id(arrays[0]), id(arrays[-1])
    key = tuple(map(_signature, batch))
    return None if None in key else key


def _signature(op: ops.Op) -> Key | None:
    """Return an operation's key; None for lists of arrays, which are not cached."""
    extra, x, y = facts_of(op).split(op)
    if type(x) is tuple or type(y) is tuple:
        return None
    return type(op), extra, _identity(x), y if type(y) is int else _identity(y)


def _identity(x: object) -> object:
    # Fields are made anew for each call; their arrays are the caller's.
    return tuple(map(id, x.arrays)) if type(x) is Fields else id(x)
