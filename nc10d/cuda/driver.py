"""CUDA's driver API by cuda.bindings, loaded at first use: calls, devices and events.

Contract: `call` raises CudaError with the driver's own description. A device is a small number
(`ordinal`); its context is the primary context, which all frameworks share. A thread may have no
current context: a call for which cuda.h lists CUDA_ERROR_INVALID_CONTEXT is made in `on_device`,
also if a handle already names the device. NC10D_CUDA_LIBRARY names another libcuda.so.1 than the
system's.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator
from typing import Any

from nc10d.base.run_to_end import import_to_end, off_main
from nc10d.errors import CudaError, UnsupportedPlatform

_EXTRA = 'pip install ".[cu12]" in a checkout of nc10d (or cu13, for a driver of CUDA 13)'
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
SUCCESS, NOT_READY, _INVALID_CONTEXT = 0, 600, 201
"""The driver API's results (cuda.h): CUDA_SUCCESS, and CUDA_ERROR_ with these names."""


_of_parent: list[object] = []
"""The driver of the process that forked this process, if that one had used CUDA."""


@functools.cache
@off_main
def driver() -> Any:
    """Return the module cuda.bindings.driver, initialised; UnsupportedPlatform if it can't be."""
    if _of_parent:
        raise UnsupportedPlatform(
            f"CUDA can't be used in process {os.getpid()}, which was forked from one that had used "
            "CUDA: start processes by spawn, or fork first"
        )
    library = os.environ.get("NC10D_CUDA_LIBRARY")
    if library:
        # cuda.bindings opens libcuda.so.1: the loader returns the library already loaded so.
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    try:
        driver = import_to_end("cuda.bindings.driver")
    except ImportError as error:
        raise UnsupportedPlatform(f"CUDA needs the package cuda-bindings: {_EXTRA}") from error
    # The driver reads once how many hardware queues a device has: streams that share a queue wait
    # for each other (CUDA's guide, environment variables; 8 by default, 32 at most).
    os.environ.setdefault(QUEUES, "32")
    try:
        (code,) = driver.cuInit(0)
    except RuntimeError as error:  # raised if the library can't be loaded
        raise UnsupportedPlatform(f"no CUDA driver on this machine: {error}") from error
    if code != SUCCESS:
        raise UnsupportedPlatform(f"CUDA can't be used on this machine: cuInit: {code.name}")
    return driver


def inherited() -> bool:
    """Return whether the driver is the parent's: this process can neither use nor free anything."""
    return bool(_of_parent)


def _disown() -> None:
    if driver.cache_info().currsize:
        _of_parent.append(driver())
        driver.cache_clear()


os.register_at_fork(after_in_child=_disown)


def call(name: str, *arguments: Any) -> Any:
    """Call a driver function; return the result, a tuple with several results, or None."""
    code, *results = getattr(driver(), name)(*arguments)
    if code != SUCCESS:
        raise CudaError(f"{name}: {describe(int(code))}", code=int(code))
    return results[0] if len(results) == 1 else tuple(results) or None


def describe(code: int) -> str:
    """Return the driver's name and description for an error code."""
    binding = driver()
    kind = binding.CUresult
    try:
        result = kind(code)
    except ValueError:
        return f"CUDA error {code}"
    answer, text = binding.cuGetErrorString(result)
    words = text.decode() if answer == SUCCESS and text else "no description"
    return f"{result.name} ({words})"


@functools.cache
def address(name: str) -> int:
    """Return the address of a driver function, for compiled code that calls it."""
    driver()  # loads the library, NC10D_CUDA_LIBRARY first
    library = ctypes.CDLL("libcuda.so.1")
    found = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
    assert found
    return found


def available() -> bool:
    """Return whether this process can use a CUDA device."""
    try:
        return device_count() > 0
    except (UnsupportedPlatform, CudaError):
        return False


def device_count() -> int:
    """Return the number of CUDA devices that this process sees."""
    return int(call("cuDeviceGetCount"))


def require_device() -> None:
    """Raise UnsupportedPlatform, with the reason, unless this process can use a CUDA device."""
    try:
        count = device_count()
    except (CudaError, UnsupportedPlatform) as error:
        raise UnsupportedPlatform(f"it needs a GPU, and none can be used ({error})") from error
    if not count:
        message = "it needs a GPU, and the driver shows none to this process (CUDA_VISIBLE_DEVICES)"
        raise UnsupportedPlatform(message)


@functools.cache
def context(device: int) -> Any:
    """Return a device's primary context, which is kept until the process ends."""
    return call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", device))


@contextlib.contextmanager
def on_device(device: int) -> Iterator[None]:
    """Make a device this thread's current one."""
    call("cuCtxPushCurrent", context(device))
    try:
        yield
    finally:
        call("cuCtxPopCurrent")


def current_device() -> int:
    """Return this thread's current device; by default LOCAL_RANK modulo the device count."""
    if int(call("cuCtxGetCurrent")):
        return int(call("cuCtxGetDevice"))
    return int(os.environ.get("LOCAL_RANK", "0")) % max(device_count(), 1)


def device_at(pointer: int) -> int:
    """Return the device to which an address in device memory belongs."""
    attribute = driver().CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    try:
        return int(call("cuPointerGetAttribute", attribute, pointer))
    except CudaError as error:
        if error.code != _INVALID_CONTEXT:
            raise
    with on_device(current_device()):  # any context will do; most threads have one
        return int(call("cuPointerGetAttribute", attribute, pointer))


def ordinal(device: object) -> int:
    """Return a device's number: an int, "cuda:1", or an object with `index`, `id` or both.

    "cuda", and None as an index, are the current device. ValueError for other kinds of device.
    """
    if isinstance(device, int):
        return device
    if isinstance(device, str):
        kind, _, number = device.partition(":")
        if kind != "cuda" or not (number.isdigit() or not number):
            raise ValueError(f'expected a device like "cuda:0", got {device!r}')
        return int(number) if number else current_device()
    if getattr(device, "type", "cuda") != "cuda":  # torch.device
        raise ValueError(f"expected a CUDA device, got {device!r}")
    for name in ("index", "device_id", "id"):
        value = getattr(device, name, None)
        if isinstance(value, int):
            return value
    if hasattr(device, "index"):
        return current_device()
    raise TypeError(f"expected a CUDA device, got {device!r}")


def synchronize(device: int | None = None) -> None:
    """Block until everything queued on a device (default: the current) is done."""
    with on_device(current_device() if device is None else device):
        call("cuCtxSynchronize")


class EventPool:
    """A device's events, by handle, and the free ones, because creating events is slow."""

    # An event is a point in a stream. Those with timing are kept separately. The caller that takes
    # an event returns it once nothing waits for the event any more, and never while a captured
    # graph includes it. Thread-safe, because a list's `pop` and `append` are atomic.

    def __init__(self, device: int) -> None:
        self.device = device
        self._free: dict[bool, list[int]] = {False: [], True: []}

    def take(self, timing: bool = False) -> int:
        """Return the handle of an unused event."""
        try:
            return self._free[timing].pop()
        except IndexError:
            return self._make(timing)

    def give(self, event: int, timing: bool = False) -> None:
        """Take an event back."""
        self._free[timing].append(event)

    def synchronize(self, event: int) -> None:
        """Block until the stream has passed an event."""
        with on_device(self.device):
            call("cuEventSynchronize", event)

    def seconds_between(self, start: int, end: int) -> float:
        """Return the seconds between two timing events; both must be done."""
        with on_device(self.device):
            return float(call("cuEventElapsedTime", start, end)) / 1000.0

    def _make(self, timing: bool) -> int:
        flags = driver().CUevent_flags
        flag = flags.CU_EVENT_DEFAULT if timing else flags.CU_EVENT_DISABLE_TIMING
        with on_device(self.device):
            return int(call("cuEventCreate", flag))


@functools.cache
def event_pool(device: int) -> EventPool:
    """Return a device's pool."""
    return EventPool(device)


def event_done(event: int) -> bool:
    """Return whether the stream has passed an event; CudaError if the device has failed."""
    (code,) = driver().cuEventQuery(event)
    if code == SUCCESS:
        return True
    if code == NOT_READY:
        return False
    raise CudaError(f"cuEventQuery: {describe(int(code))}", code=int(code))
