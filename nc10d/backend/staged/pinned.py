"""A pool of pinned host memory: allocation is slow, and freeing waits for the device.

So a piece is never freed before the process ends. The piece returns to the device's pool when the
last array on it is garbage. After a failure that may be late, because an inner backend may still
write to the piece.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import defaultdict
from typing import Any

import numpy as np

from nc10d.arrays.buffer import Buffer
from nc10d.arrays.dtypes import DType
from nc10d.cuda.driver import call, on_device

_PAGE, _LARGE_PAGE = 4096, 2 << 20
_PORTABLE = 1  # CU_MEMHOSTALLOC_PORTABLE (cuda.h): pinned for every context


class Pinned:
    """`nbytes` bytes of pinned memory at `address`, until nothing refers to this object."""

    __slots__ = ("__weakref__", "address", "nbytes")

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes

    def as_bytes(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Return an array on this memory that keeps the memory alive."""
        shape, strides = (self.nbytes,), (1,)
        whole = Buffer(
            self.address, self.nbytes, DType.UINT8, "cpu", self, True, True, shape, strides
        )
        return whole.as_numpy()


class PinnedPool:
    """One device's free pieces of pinned memory, by size. Any thread may call."""

    def __init__(self, device: int) -> None:
        self.made = 0
        self._device = device
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._lock = threading.RLock()  # a finalizer may return a piece inside `take`

    def take(self, nbytes: int) -> Pinned:
        """Return a piece of at least `nbytes`; CudaError if the host lacks memory."""
        size = _size_class(nbytes)
        with self._lock:
            free = self._free[size]
            address = free.pop() if free else self._make(size)
        piece = Pinned(address, size)
        weakref.finalize(piece, self._take_back, address, size).atexit = False
        return piece

    def _make(self, size: int) -> int:
        self.made += 1
        with on_device(self._device):
            return int(call("cuMemHostAlloc", size, _PORTABLE))

    def _take_back(self, address: int, size: int) -> None:
        with self._lock:
            self._free[size].append(address)


@functools.cache
def pinned_pool(device: int) -> PinnedPool:
    """Return a device's pool."""
    return PinnedPool(device)


def _size_class(nbytes: int) -> int:
    """Round up to a power of two, from 2 MiB on to whole large pages: few sizes, little waste."""
    if nbytes > _LARGE_PAGE:
        return -(-nbytes // _LARGE_PAGE) * _LARGE_PAGE
    return max(_PAGE, 1 << (nbytes - 1).bit_length())
