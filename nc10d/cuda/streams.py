"""Any library's streams, and the stream that is current for a thread and an array.

The thread's next work with an array is queued on the array's current stream. This is the innermost
`with cuda.stream(...)`, else the stream of the array's own framework (CuPy's and torch's current
stream, else the stream that `__cuda_array_interface__` names), else the legacy default stream. A
collective runs after the work already queued there. `wait()` makes work that is queued there later
run after the collective.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple, TypeVar

from nc10d.cuda.driver import (
    call,
    context,
    current_device,
    driver,
    event_pool,
    inherited,
    on_device,
)
from nc10d.errors import CudaError

T = TypeVar("T")
LEGACY, PER_THREAD = 1, 2
"""CU_STREAM_LEGACY and CU_STREAM_PER_THREAD (cuda.h): the two default streams by number."""
_CAPTURE_IMPLICIT = 906
"""CUDA_ERROR_STREAM_CAPTURE_IMPLICIT (cuda.h)."""
_here = contextlib.nullcontext()


class _Chosen(threading.local):
    handle: int | None = None


_chosen = _Chosen()
_finders: dict[type, Callable[[Any], int]] = {}
_default_streams: dict[type, int] = {}


class Stream:
    """A new stream on a device, which does not synchronise with the default stream."""

    # `high` requests the device's highest priority. The stream is destroyed with the object; work
    # that is already queued there still completes.

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
        with on_device(self.device):
            call("cuStreamSynchronize", self.handle)


def _destroy(device: int, made: object) -> None:
    if inherited():
        return
    with on_device(device):
        call("cuStreamDestroy", made)


class StreamKey(NamedTuple):
    """A stream by its handle; `device` is needed to identify a default stream."""

    stream: int
    device: int


def order_after(later: StreamKey, earlier: StreamKey) -> None:
    """Make stream `later` wait for the work now queued on `earlier`, on any device."""
    if later.stream == earlier.stream and (later == earlier or later.stream > PER_THREAD):
        return
    home = _device_of(earlier)
    pool = event_pool(home)
    event = pool.take()
    with on_device(home):  # an event can be recorded only on streams of its own device
        call("cuEventRecord", event, earlier.stream)
    with on_device(later.device):
        call("cuStreamWaitEvent", later.stream, event, 0)
    pool.give(event)  # the queued wait keeps the recorded state, so the event is free


def _device_of(key: StreamKey) -> int:
    """Return a stream's device: the stream may be current for arrays of other devices."""
    if key.stream <= PER_THREAD:
        return key.device
    with on_device(key.device):
        found = call("cuStreamGetCtx", key.stream)
    if int(found) == int(context(key.device)):
        return key.device
    call("cuCtxPushCurrent", found)
    try:
        return int(call("cuCtxGetDevice"))
    finally:
        call("cuCtxPopCurrent")


def relax_capture_mode() -> Any:
    """Keep this thread's driver calls from invalidating a graph; return the mode before."""
    mode = driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    return call("cuThreadExchangeStreamCaptureMode", mode)


@contextlib.contextmanager
def relaxed_capture_mode() -> Iterator[None]:
    """Keep this thread's driver calls in the block from invalidating a graph."""
    before = relax_capture_mode()
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", before)


def is_captured(stream: int, device: int) -> bool:
    """Return whether work queued on a stream becomes part of a graph, or would break it."""
    # The legacy stream can't be captured, and takes no work while a blocking stream is captured. To
    # ask for that leaves the capture valid (cuda.h, cuStreamIsCapturing).
    try:
        with on_device(device) if stream <= PER_THREAD else _here:
            status: Any = call("cuStreamIsCapturing", stream)
    except CudaError as error:
        if error.code == _CAPTURE_IMPLICIT:
            return True
        raise
    return bool(status != driver().CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)


def stream_handle(stream: object) -> int:
    """Return the handle of any library's stream; TypeError for other objects.

    An int is a handle. Objects have `__cuda_stream__`, or are CuPy's (`ptr`), torch's
    (`cuda_stream`) or Numba's (`handle`).
    """
    if isinstance(stream, int):
        return stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return int(protocol()[1])
    for name in ("cuda_stream", "ptr", "handle"):
        handle = getattr(stream, name, None)
        handle = getattr(handle, "value", handle)  # Numba's is a ctypes pointer
        if handle is not None:
            return int(handle)
    raise TypeError(f"expected a CUDA stream or its handle, got {stream!r}")


@contextlib.contextmanager
def stream(which: Any) -> Iterator[int]:
    """Make a stream this thread's current stream for all arrays; yield the handle."""
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
    return (find or _finder_for(type(x)))(x)


def chosen_stream_or(home: T) -> int | T:
    """Return the handle that `with cuda.stream` set, else `home`."""
    chosen = _chosen.handle
    return home if chosen is None else chosen


def default_stream_of(x: object) -> int | None:
    """Return the fixed stream of arrays like `x`; None if their library has a current one."""
    return _default_streams.get(type(x))


def freed_in_stream_order(kinds: Collection[type]) -> bool:
    """Return whether such arrays share a current stream, in whose order they are freed.

    False where that is not known, as for other libraries than CuPy and torch.
    """
    finders = {_finders.get(kind) or _finder_for(kind) for kind in kinds}
    ordered = finders <= {_of_cupy, _of_torch} or _default_streams.keys() >= set(kinds)
    return len(finders) == 1 and ordered


def register_stream(kind: type, find: Callable[[Any], int] | int) -> None:
    """Register `find(x)`, or a fixed handle, as the current stream of arrays of type `kind`."""
    if isinstance(find, int):
        _default_streams[kind] = find
        _finders[kind] = lambda _: find
    else:
        _finders[kind] = find


def _finder_for(kind: type) -> Callable[[Any], int]:
    """Return the function that finds the current stream of such arrays, and cache it."""
    root = kind.__module__.partition(".")[0]
    find = {"cupy": _of_cupy, "torch": _of_torch}.get(root, _of_interface)
    if root in sys.modules:
        _finders[kind] = find
    return find


def _of_cupy(_: object) -> int:
    return int(sys.modules["cupy"].cuda.get_current_stream().ptr)


def _of_torch(x: Any) -> int:
    torch: Any = sys.modules["torch"]
    # Without the Stream object, which costs as much as a launch. torch's compiler uses it, too.
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    if raw is None:
        return int(torch.cuda.current_stream(x.device).cuda_stream)
    return int(raw(x.device.index))


def _of_interface(x: object) -> int:
    """Read the stream of `__cuda_array_interface__` version 3; LEGACY if it is None."""
    interface = getattr(x, "__cuda_array_interface__", None) or {}
    named = interface.get("stream")
    return LEGACY if named is None else int(named)
