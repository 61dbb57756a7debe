"""Streams, whoever made them, and which one is current for whom.

The current stream is the one on which a thread's next work with an array is queued: that of the
innermost `with cuda.stream(...)`, else that of the array's own framework (CuPy's and torch's
current stream, else the one that `__cuda_array_interface__` names), else the legacy default
stream. A collective begins behind what is queued there, and `wait()` puts it in front of what is
queued there next.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from nc10d.cuda.driver import call, context, current_device, driver, on_device
from nc10d.cuda.events import event_pool

LEGACY, PER_THREAD = 1, 2
"""CU_STREAM_LEGACY and CU_STREAM_PER_THREAD (cuda.h): the two default streams by number."""


class _Chosen(threading.local):
    handle: int | None = None


_chosen = _Chosen()
_finders: dict[type, Callable[[Any], int]] = {}
_homes: dict[type, int] = {}


class Stream:
    """A stream of one's own on one device, which runs beside the default stream.

    `high` asks for the device's highest priority. It is destroyed with the object; what is queued
    on it runs to its end all the same.
    """

    def __init__(self, device: int | None = None, high: bool = False) -> None:
        self.device = current_device() if device is None else device
        with on_device(self.device):
            lowest, highest = call("cuCtxGetStreamPriorityRange")
            flag = driver().CUstream_flags.CU_STREAM_NON_BLOCKING
            made = call("cuStreamCreateWithPriority", flag, highest if high else lowest)
        self.handle = int(made)
        self._end = weakref.finalize(self, _destroy, self.device, made)
        self._end.atexit = False

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the protocol's version and the handle (cuda.core's stream protocol)."""
        return 0, self.handle

    def synchronize(self) -> None:
        """Block until everything queued on the stream is done."""
        call("cuStreamSynchronize", self.handle)


def _destroy(device: int, made: Any) -> None:
    call("cuCtxPushCurrent", context(device))
    call("cuStreamDestroy", made)
    call("cuCtxPopCurrent")


class StreamKey(NamedTuple):
    """A stream by its handle; `device` says which device's, if it is a default stream."""

    stream: int
    device: int


def follow(later: StreamKey, earlier: StreamKey) -> None:
    """Let a stream go on behind what is queued on another one, perhaps another device's, now."""
    if later.stream == earlier.stream and (later == earlier or later.stream > PER_THREAD):
        return
    home = _device_of(earlier)
    pool = event_pool(home)
    event = pool.take()
    with on_device(home):  # an event is recorded on streams of its own device alone
        call("cuEventRecord", event, earlier.stream)
    with on_device(later.device):
        call("cuStreamWaitEvent", later.stream, event, 0)
    pool.give(event)  # the wait is for what was recorded when it was queued


def _device_of(place: StreamKey) -> int:
    """Return whose a stream is: it may have been chosen for arrays of other devices."""
    if place.stream <= PER_THREAD:
        return place.device
    call("cuCtxPushCurrent", call("cuStreamGetCtx", place.stream))
    try:
        return int(call("cuCtxGetDevice"))
    finally:
        call("cuCtxPopCurrent")


def spoil_no_capture() -> None:
    """Let what this thread asks of the driver not break a graph that another thread captures."""
    mode = driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    call("cuThreadExchangeStreamCaptureMode", mode)


def is_captured(stream: int) -> bool:
    """Say whether what is queued on a stream becomes part of a graph."""
    status: Any = call("cuStreamIsCapturing", stream)
    return bool(status != driver().CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)


def stream_handle(stream: Any) -> int:
    """Return the handle of anybody's stream; TypeError for what is none.

    An int is a handle; objects speak `__cuda_stream__`, or are CuPy's (`ptr`), torch's
    (`cuda_stream`) or Numba's (`handle`).
    """
    if isinstance(stream, int):
        return stream
    speaks = getattr(stream, "__cuda_stream__", None)
    if speaks is not None:
        return int(speaks()[1])
    for name in ("cuda_stream", "ptr", "handle"):
        handle = getattr(stream, name, None)
        handle = getattr(handle, "value", handle)  # Numba's is a ctypes pointer
        if handle is not None:
            return int(handle)
    raise TypeError(f"expected a CUDA stream or its handle, got {stream!r}")


@contextlib.contextmanager
def stream(which: Any) -> Iterator[int]:
    """Make a stream this thread's current one for nc10d, whatever frameworks say; yields it."""
    before = _chosen.handle
    _chosen.handle = handle = stream_handle(which)
    try:
        yield handle
    finally:
        _chosen.handle = before


def stream_of(x: Any) -> int:
    """Return the handle of this thread's current stream for an array (None: for no array)."""
    chosen = _chosen.handle
    if chosen is not None:
        return chosen
    find = _finders.get(type(x))
    return (find or _finder_for(x))(x)


def stream_or(home: int) -> int:
    """Return the handle of the stream that this thread has chosen, else `home`."""
    chosen = _chosen.handle
    return home if chosen is None else chosen


def home_of(x: Any) -> int | None:
    """Return the stream that is current for all arrays like `x` unless another is chosen, if any.

    None for arrays whose library has a current stream of its own.
    """
    return _homes.get(type(x))


def register_stream(kind: type, find: Callable[[Any], int] | int) -> None:
    """Ask `find(x)` for the current stream of arrays of exactly the type `kind`, or say which."""
    if isinstance(find, int):
        _homes[kind] = find
        _finders[kind] = lambda _: find
    else:
        _finders[kind] = find


def _finder_for(x: Any) -> Callable[[Any], int]:
    """Choose who knows the current stream of arrays like `x`, and remember the choice."""
    root = type(x).__module__.partition(".")[0]
    find = {"cupy": _of_cupy, "torch": _of_torch}.get(root, _of_interface)
    if root in sys.modules:
        _finders[type(x)] = find
    return find


def _of_cupy(_: Any) -> int:
    return int(sys.modules["cupy"].cuda.get_current_stream().ptr)


def _of_torch(x: Any) -> int:
    return int(sys.modules["torch"].cuda.current_stream(x.device).cuda_stream)


def _of_interface(x: Any) -> int:
    """Read the stream of `__cuda_array_interface__` version 3: None is no stream to wait for."""
    interface = getattr(x, "__cuda_array_interface__", None) or {}
    named = interface.get("stream")
    return LEGACY if named is None else int(named)
