"""The staged backend behind arrays in host memory, for the suite that checks all backends.

A launch copies its NumPy arrays to device memory, with all bytes around and between their elements.
The operations run on these copies; then all bytes are copied back. `wait()` queues the copy back on
the current stream, so the copy has only the results that `wait()` orders before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from copied_back import CopiedBack

from nc10d import cuda
from nc10d.arrays.buffer import Buffer, as_buffer, register
from nc10d.arrays.interop import map_arrays
from nc10d.backend.protocol import Backend, BackendSetup
from nc10d.backend.staged.backend import make as make_staged
from nc10d.base.deadline import Deadline
from nc10d.base.promise import PENDING
from nc10d.cuda.streams import LEGACY, register_stream
from nc10d.ops import Op
from nc10d.store.base import Store
from nc10d.work import Work

Array = np.ndarray[Any, np.dtype[Any]]


class Mirror:
    """A device array at the same offset in device memory as a host array in its owner's memory."""

    def __init__(self, x: Array, room: cuda.DeviceArray, offset: int) -> None:
        host = as_buffer(x)
        self.room = room
        self.buffer = Buffer(
            room.address + offset,
            host.count,
            host.dtype,
            "cuda",
            room,
            host.writable,
            host.contiguous,
            host.shape,
            host.strides,
        )


register(Mirror, lambda x: x.buffer, lambda _: "cuda")
register_stream(Mirror, lambda _: LEGACY)


class Rooms:
    """Device copies of the memory that owns a launch's arrays; shared memory is copied once."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._rooms: dict[int, tuple[Array, cuda.DeviceArray]] = {}

    def mirror(self, x: Array) -> Any:
        whole = _bytes(x)
        if id(whole.base) not in self._rooms:
            self._rooms[id(whole.base)] = whole, cuda.to_device(whole, self._device)
        offset = x.ctypes.data - whole.ctypes.data
        return Mirror(x, self._rooms[id(whole.base)][1], offset)

    def bring_back(self) -> None:
        for whole, room in self._rooms.values():
            if whole.flags.writeable:
                whole[...] = room.to_host()


def _bytes(x: Array) -> Array:
    """Return all bytes of the array that owns the memory of `x`, with that array as their base."""
    while isinstance(x.base, np.ndarray):
        x = x.base
    found: Array = np.ndarray(x.nbytes, np.uint8, x)
    return found


class Mirrored(Backend):
    """Copies arrays to a device, launches, copies back. Rank r uses device r modulo their count."""

    name = "mirrored"
    device_type = "cpu"

    def __init__(self, inner: Backend, device: int) -> None:
        self.inner, self.device = inner, device
        self.rank, self.size = inner.rank, inner.size

    def launch(self, ops: Sequence[Op], timeout: float, async_op: bool) -> Work | None:
        with cuda.on_device(self.device):
            rooms = Rooms(self.device)
            mirrored = [map_arrays(op, rooms.mirror) for op in ops]
            work = self.inner.launch(mirrored, timeout, async_op)
            if work is None:
                rooms.bring_back()
                return None
        return BroughtBack(ops, work, rooms.bring_back, self.device)

    def split(
        self, ranks: Sequence[int], name: str, store: Store, deadline: Deadline, options: Any = None
    ) -> Mirrored:
        return Mirrored(self.inner.split(ranks, name, store, deadline, options), self.device)

    def abort(self, reason: BaseException) -> None:
        self.inner.abort(reason)

    def close(self) -> None:
        self.inner.close()


def make(setup: BackendSetup) -> Mirrored:
    return Mirrored(make_staged(setup), setup.rank % cuda.device_count())


class BroughtBack(CopiedBack):
    """Its `wait()` copies back behind the device's `wait()`, on the current stream."""

    __slots__ = ()

    def wait(self, timeout: Any = None) -> bool:
        if timeout is not None or self._state != PENDING:
            return super().wait(timeout)
        with cuda.on_device(self.device):
            self.inner.wait()
            self.bring_back()
            self.inner.wait(30.0)  # `wait()` without a timeout returns earlier
            self._finish(None, self.inner._result)
        return True
