"""One piece of memory per rank that all ranks of the host map: a sealed, sparse memfd.

It has no name in any file system, so nothing is left when every process has died. What is handed
out is really allocated first: a full memory file system is an error here, not a SIGBUS later.

What other processes may write can be taken back from them: its pages are replaced by private ones,
at the same address and with the same contents. Whatever is written to the old ones goes nowhere.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import threading
from bisect import insort
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

PAGE = 4096
SPAN = (1 << 34) + (37 << 21)
"""Address space of an arena; only what is handed out takes memory. Arenas are mapped one behind the
other and filled alike: were this a power of two, the addresses of peers' arrays would have their
lower 34 bits in common, and some CPUs (AMD's) take lines of such addresses for each other in their
first cache: a kernel that goes through two of them at once takes up to four times as long.
"""

PUNCH_HOLE = 0x01 | 0x02  # of fallocate(2): give memory back, and keep the size
MOVE_HERE = 0x01 | 0x02  # of mremap(2): to the address given, whatever is there
FAILED = ctypes.c_void_p(-1).value

Bytes = npt.NDArray[np.uint8]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mremap.argtypes = [ctypes.c_void_p, *[ctypes.c_size_t] * 2, ctypes.c_int, ctypes.c_void_p]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


class ArenaMapping:
    """Shared memory as this process sees it: `base` is its address, `data` its bytes."""

    def __init__(self, fd: int) -> None:
        self._map = mmap.mmap(fd, os.fstat(fd).st_size, flags=mmap.MAP_SHARED)
        self.data: Bytes = np.frombuffer(self._map, np.uint8)
        self.base: int = self.data.ctypes.data

    def discard(self, offset: int, nbytes: int) -> None:
        """Drop this process's pages of a piece."""
        self._map.madvise(mmap.MADV_DONTNEED, offset, nbytes)

    def words(self, offset: int, count: int) -> npt.NDArray[np.int64]:
        """Return `count` int64 from `offset` on."""
        return self.data[offset : offset + 8 * count].view(np.int64)


class Arena:
    """My own memory: hands out page-aligned, zeroed pieces."""

    def __init__(self, span: int = SPAN) -> None:
        self.fd = os.memfd_create("nc10d", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, span)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        self.mapping = ArenaMapping(self.fd)
        # A signal handler, or the end of a group in the garbage collector, may stop a channel, and
        # so retire memory, in a thread that is in the middle of allocating.
        self._lock = threading.RLock()
        self._holes: list[tuple[int, int]] = [(0, span)]
        self._floor = 0
        self._given: dict[int, int] = {}
        # Loans end in the garbage collector, which may run anywhere: even where the lock is held.
        self.returned: deque[int] = deque()

    def allocate(self, nbytes: int) -> int:
        """Return the offset of `nbytes` zeroed bytes; MemoryError if there is no room."""
        need = max(1, -(-nbytes // PAGE)) * PAGE
        with contextlib.suppress(IndexError):
            while True:
                self.free(self.returned.popleft())
        with self._lock:
            offset = self._take(need)
            try:
                os.posix_fallocate(self.fd, offset, need)
            except OSError as error:
                self._give(offset, need)
                raise MemoryError(f"no shared memory for {need} bytes: {error}") from error
            self._given[offset] = need
        self.mapping.data[offset : offset + need] = 0
        return offset

    def lend(self, nbytes: int) -> Bytes:
        """Return memory as an array; it comes back when nothing refers to it any more."""
        return np.asarray(_Loan(self, self.allocate(nbytes), nbytes))

    def free(self, offset: int) -> None:
        """Take back what `allocate` returned."""
        with self._lock:
            self._give(offset, self._given.pop(offset))

    def retire(self) -> int:
        """Hand out nothing any more that lies before here; return where that is.

        What has been handed out may be used on. It goes back to the system when it is freed.
        """
        with self._lock:
            self._floor = max([self._floor, *(o + n for o, n in self._given.items())])
            self._holes = [(o, n) for o, n in self._holes if o >= self._floor]
            return self._floor

    def take_back(self, offset: int, nbytes: int) -> None:
        """Make whole pages private, with what they hold: nobody else can write there any more.

        They must be `retire`d. MemoryError if there is no memory for the copy.
        """
        place = self.mapping.base + offset
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        fresh = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        if fresh == FAILED:
            raise MemoryError(f"no {nbytes} bytes to take an array back from late peers")
        ctypes.memmove(fresh, place, nbytes)
        if _libc.mremap(fresh, nbytes, nbytes, MOVE_HERE, place) == FAILED:
            raise MemoryError(f"mremap of {nbytes} bytes: {os.strerror(ctypes.get_errno())}")
        _libc.fallocate(self.fd, PUNCH_HOLE, offset, nbytes)

    def used(self) -> int:
        """Return the bytes handed out."""
        with self._lock:
            return sum(self._given.values())

    def close(self) -> None:
        """Close the descriptor; idempotent. Mappings, mine and others', keep the memory."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def _take(self, need: int) -> int:
        for hole in self._holes:
            offset, size = hole
            if size >= need:
                with contextlib.suppress(ValueError):  # retired just now: nobody else takes it
                    self._holes.remove(hole)
                if size > need:
                    insort(self._holes, (offset + need, size - need))
                return offset
        raise MemoryError(f"the arena has no {need} bytes in one piece left")

    def _give(self, offset: int, size: int) -> None:
        if offset < self._floor:
            _libc.fallocate(self.fd, PUNCH_HOLE, offset, size)
            self.mapping.discard(offset, size)
            return
        merged: list[tuple[int, int]] = []
        for hole in sorted([*self._holes, (offset, size)]):
            if merged and merged[-1][0] + merged[-1][1] == hole[0]:
                merged[-1] = (merged[-1][0], merged[-1][1] + hole[1])
            else:
                merged.append(hole)
        self._holes = merged


class _Loan:
    """A piece of an arena as NumPy asks for it: the base of every array that lies in it."""

    def __init__(self, arena: Arena, offset: int, nbytes: int) -> None:
        self._arena = arena
        self._offset = offset
        self.__array_interface__: dict[str, Any] = {
            "version": 3,
            "typestr": "|u1",
            "data": (arena.mapping.base + offset, False),
            "shape": (nbytes,),
        }

    def __del__(self) -> None:
        self._arena.returned.append(self._offset)
