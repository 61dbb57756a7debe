"""The CUDA graphs with a group's launches: how many are alive, and what they use.

NCCL keeps a communicator until the last graph with its operations is gone (its init.cc counts
them). A user object of CUDA's, which ends with the graph, tells when that is.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from nc10d.backend.nccl.bindings.native import nc10d_nccl_graph_gone
from nc10d.cuda.driver import EventPool, call, driver


class _Captured(NamedTuple):
    """A captured launch: its graph's number and word, its event, and what its calls use."""

    graph: int
    gone: ctypes.c_int64
    event: int
    used: object


class CapturedGraphs:
    """A group's captured launches; used under the launches' lock, but for `alive`."""

    def __init__(self, pool: EventPool) -> None:
        self._pool = pool
        self._launches: list[_Captured] = []

    def keep(self, stream: int, event: int, used: object) -> None:
        """Keep what a launch uses, which a stream has just captured, as long as the graph."""
        self.drop_ended()
        _, number, graph, *_ = call("cuStreamGetCaptureInfo", stream)
        word = ctypes.c_int64(0)
        # The driver writes there at the graph's end, which may be that of the process.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(word))
        flags = driver().CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
        ended = driver().CUhostFn(nc10d_nccl_graph_gone.address)
        kept = call("cuUserObjectCreate", ctypes.addressof(word), ended, 1, flags)
        moved = driver().CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE
        call("cuGraphRetainUserObject", graph, kept, 1, moved)
        self._launches.append(_Captured(int(number), word, event, used))

    @property
    def alive(self) -> int:
        """How many graphs are alive; any thread may ask."""
        return len({each.graph for each in self._launches if not each.gone.value})

    def drop_ended(self) -> None:
        """Drop what was used by graphs that are gone."""
        for each in [each for each in self._launches if each.gone.value]:
            self._pool.give(each.event)
            self._launches.remove(each)
