"""What launches in CUDA graphs use is kept until the graph is gone.

A user object of CUDA's, which ends with the graph and its instances, tells when that is: a thread
of the driver's posts a semaphore (sem_post of libc, which needs no GIL). What was kept for a graph
is released at the next `keep`, or `sweep`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NamedTuple

from nc10d.cuda.driver import call, driver, on_device

_libc = ctypes.CDLL(None)
_SEMAPHORE = 64  # bytes, at least sizeof(sem_t)


class Captured(NamedTuple):
    """A captured launch: its graph's number and semaphore."""

    graph: int
    ended: ctypes.Array[ctypes.c_char]

    @property
    def gone(self) -> bool:
        """Whether the graph is gone."""
        value = ctypes.c_int()
        _libc.sem_getvalue(self.ended, ctypes.byref(value))
        return value.value > 0


_captured: dict[int, tuple[Captured, Callable[[], object]]] = {}


def keep(stream: int, device: int, release: Callable[[], object]) -> Captured:
    """Keep `release`, and what it refers to, as long as the graph that a stream captures.

    It is called after the graph's end, by any thread.
    """
    sweep()
    ended = ctypes.create_string_buffer(_SEMAPHORE)
    _libc.sem_init(ended, 0, 0)
    # The driver posts it at the graph's end, which may be that of the process.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(ended))
    post = driver().CUhostFn(ctypes.cast(_libc.sem_post, ctypes.c_void_p).value)
    flags = driver().CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
    moved = driver().CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE
    with on_device(device):  # `stream` may be the per-thread default stream
        _, number, graph, *_ = call("cuStreamGetCaptureInfo", stream)
        counted = call("cuUserObjectCreate", ctypes.addressof(ended), post, 1, flags)
        call("cuGraphRetainUserObject", graph, counted, 1, moved)
    made = Captured(int(number), ended)
    _captured[ctypes.addressof(ended)] = made, release
    return made


def sweep() -> None:
    """Release what graphs have used that are gone; any thread may call."""
    for key in [key for key, (each, _) in list(_captured.items()) if each.gone]:
        found = _captured.pop(key, None)  # another thread may have released it
        if found is not None:
            found[1]()
