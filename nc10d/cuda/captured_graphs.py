"""What launches in CUDA graphs use is kept until the graph is gone.

A user object of CUDA's, which ends with the graph and its instances, tells when that is: a thread
of the driver's posts a semaphore (sem_post of libc, which needs no GIL). What was kept for a graph
is released by `sweep`, and when another graph begins.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

from nc10d.cuda.driver import call, driver, on_device

_libc = ctypes.CDLL(None)
_SEMAPHORE = 64  # bytes, at least sizeof(sem_t)


class CapturedGraph:
    """A graph with captured launches, and what they use."""

    def __init__(self) -> None:
        self._ended = ctypes.create_string_buffer(_SEMAPHORE)
        _libc.sem_init(self._ended, 0, 0)
        # The driver posts it at the graph's end, which may be that of the process.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._ended))
        self.semaphore = ctypes.addressof(self._ended)
        self.releases: list[Callable[[], object]] = []

    @property
    def gone(self) -> bool:
        """Whether the graph is gone."""
        value = ctypes.c_int()
        _libc.sem_getvalue(self._ended, ctypes.byref(value))
        return value.value > 0


_graphs: dict[int, CapturedGraph] = {}  # by the driver's number, which no other graph gets
_lock = threading.Lock()


def keep(stream: int, device: int, release: Callable[[], object]) -> CapturedGraph:
    """Keep `release`, and what it refers to, as long as the graph that a stream captures.

    It is called after the graph's end, by any thread.
    """
    with on_device(device):  # `stream` may be the per-thread default stream
        _, number, handle, *_ = call("cuStreamGetCaptureInfo", stream)
        with _lock:
            graph = _graphs.get(int(number))
            if graph is not None:
                graph.releases.append(release)
                return graph
            graph = _graphs[int(number)] = _begun(handle)
            graph.releases.append(release)
    sweep()
    return graph


def _begun(handle: object) -> CapturedGraph:
    graph = CapturedGraph()
    post = driver().CUhostFn(ctypes.cast(_libc.sem_post, ctypes.c_void_p).value)
    flags = driver().CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
    moved = driver().CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE
    counted = call("cuUserObjectCreate", graph.semaphore, post, 1, flags)
    call("cuGraphRetainUserObject", handle, counted, 1, moved)
    return graph


def sweep() -> bool:
    """Release what graphs have used that are gone; return whether others exist. For any thread."""
    with _lock:
        gone = [number for number, graph in _graphs.items() if graph.gone]
        releases = [release for number in gone for release in _graphs.pop(number).releases]
        left = bool(_graphs)
    for release in releases:
        release()
    return left
