"""The arena: one piece of memory per rank, mapped by all local ranks; a sealed, sparse memfd.

An arena has no name in any file system, so nothing is left when every process has died. Pieces are
reserved in the memory file system when they are allocated: if that is full, `allocate` raises, and
no later access gets a SIGBUS.

A piece that other processes may write can be made private: new pages replace the old, at the
same address and with the same contents. Other processes' later writes reach only the file, which no
longer backs this address.

Not done: huge pages. The kernel has them off for shared memory as a rule; made by MADV_COLLAPSE,
they took 0.5 to 9 % off a large all_reduce in most runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import resource
import sys
import threading
from bisect import insort
from collections import deque
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from nc10d.backend.cpu.memory import proc
from nc10d.backend.cpu.native.offsets import PAGE as PAGE
from nc10d.base.signal_errors import from_handler

ALIGNED = 2 << 20
ODD_BYTES = 37 << 21
LEAST_BYTES, MOST_BYTES = 8 << 20, (1 << 34) + ODD_BYTES
"""The bytes by which a large arena's span exceeds whole GiB, and the bounds for all spans. Only
allocated pieces take memory. A process in which 64 ranks are threads maps 64 times 64 arenas.

The sum is no power of two. Arenas are mapped one behind the other and filled alike, so that peers'
arrays would have the lower address bits in common. Some CPUs (AMD's) confuse such lines in their L1
cache, and a kernel that reads two such arrays is several times slower.
"""

PUNCH_HOLE = 0x01 | 0x02  # for fallocate(2): give memory back, and keep the size
MOVE_HERE = 0x01 | 0x02  # for mremap(2): to the address given, whatever is there
FAILED = ctypes.c_void_p(-1).value

Bytes = npt.NDArray[np.uint8]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = _libc.mremap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.mremap.argtypes = [ctypes.c_void_p, *[ctypes.c_size_t] * 2, ctypes.c_int, ctypes.c_void_p]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]


def span_of(ranks: int) -> tuple[int, str]:
    """Return the bytes to reserve for an arena, and the bound that they come from, as text.

    A process maps `ranks` arenas. MemoryError if a limit leaves too little for that.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * PAGE
    found = min(max(memory, 1 << 30), MOST_BYTES), "the memory of this machine"
    space, files = (
        resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE)
    )
    if space != resource.RLIM_INFINITY:
        used = int(proc.read("self/statm").split()[0]) * PAGE
        # Half is left for the program's other memory.
        text = f"the limit on address space, {space} bytes (ulimit -v) for {ranks} ranks' memory"
        found = min(found, (max(0, space - used) // (2 * ranks), text))
    if files != resource.RLIM_INFINITY:
        found = min(found, (files, f"the limit on file sizes, {files} bytes (ulimit -f)"))
    span, bound = found
    if span < LEAST_BYTES:
        raise MemoryError(
            f"a rank shares at least {LEAST_BYTES} bytes of memory with the ranks of its host, and "
            f"{bound} leaves {span}: raise it"
        )
    odd, grain = (ODD_BYTES, 1 << 30) if span > 1 << 31 else (0, ALIGNED)
    return (span - odd) // grain * grain + odd, bound


class ArenaMapping:
    """A rank's arena as this process maps it: `base` is its address here, `data` its bytes."""

    def __init__(self, fd: int) -> None:
        nbytes = os.fstat(fd).st_size
        try:
            self._map = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED)
        except OSError as error:
            raise MemoryError(
                f"no address space for the {nbytes} bytes that a rank of this host shares: "
                f"{error.strerror} (ulimit -v, or the kernel's vm.max_map_count)"
            ) from error
        self.data: Bytes = np.frombuffer(self._map, np.uint8)
        self.base: int = self.data.ctypes.data

    def discard(self, offset: int, nbytes: int) -> None:
        """Drop this process's pages in a piece."""
        self._map.madvise(mmap.MADV_DONTNEED, offset, nbytes)

    def give_back(self, offset: int, nbytes: int) -> None:
        """Return a piece's memory to the system, whichever process uses it."""
        if _libc.madvise(self.base + offset, nbytes, mmap.MADV_REMOVE):  # a part has private pages
            self.discard(offset, nbytes)

    def words(self, offset: int, count: int) -> npt.NDArray[np.int64]:
        """Return `count` int64 from `offset` on."""
        return self.data[offset : offset + 8 * count].view(np.int64)


class Arena:
    """This rank's own arena: allocates page-aligned, zeroed pieces. Any thread may call."""

    def __init__(self, span: int, bound: str = "its maker") -> None:
        """`span` bytes of address space, which come from `bound`, as text."""
        self.bound, self.pid = bound, os.getpid()
        # A signal handler, or a group's end in the garbage collector, may stop a channel, and so
        # retire memory, in a thread that is amid an allocation.
        self._lock = threading.RLock()
        self._holes: list[tuple[int, int]] = [(0, span)]
        self._floor = 0
        self._allocated: dict[int, int] = {}
        # Arrays die in the garbage collector, which may run in a thread that holds the lock: their
        # pieces are collected here, and freed by the next `allocate`.
        self.released: deque[int] = deque()
        self.fd = os.memfd_create("nc10d", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, span)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
            self.mapping = ArenaMapping(self.fd)
        except BaseException:
            self.close()
            raise

    def allocate(self, nbytes: int) -> int:
        """Return the offset of `nbytes` zeroed bytes; MemoryError if there is no room."""
        need = max(1, -(-nbytes // PAGE)) * PAGE
        with contextlib.suppress(IndexError):
            while True:
                self.free(self.released.popleft())
        with self._lock:
            offset = self._take(need)
            try:
                os.posix_fallocate(self.fd, offset, need)
            except BaseException as error:
                self._give(offset, need)
                if not isinstance(error, OSError) or from_handler(error):
                    raise
                raise MemoryError(f"no shared memory for {need} bytes: {error}") from error
            self._allocated[offset] = need
        self.mapping.data[offset : offset + need] = 0
        return offset

    def allocate_array(self, nbytes: int) -> Bytes:
        """Return a piece as an array, and free the piece when no array refers to it any more.

        The memory then goes back to the system, as any large array's.
        """
        return np.asarray(_OwnedPiece(self, self.allocate(nbytes), nbytes))

    def free(self, offset: int) -> None:
        """Free the piece at an offset that `allocate` returned."""
        with self._lock:
            self._give(offset, self._allocated.pop(offset))

    def retire(self) -> int:
        """Allocate nothing any more below the last piece's end; return that offset.

        Pieces in use stay valid. Their memory goes back to the system when they are freed.
        """
        with self._lock:
            self._floor = max([self._floor, *(o + n for o, n in self._allocated.items())])
            self._holes = [(o, n) for o, n in self._holes if o >= self._floor]
            return self._floor

    def make_private(self, offset: int, nbytes: int) -> None:
        """Replace whole pages by private copies: other processes can't write there any more.

        `retire` must have been called before. MemoryError if there is no memory for the copy.
        """
        place = self.mapping.base + offset
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        copy = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        if copy == FAILED:
            raise MemoryError(f"no {nbytes} bytes to take an array back from late peers")
        ctypes.memmove(copy, place, nbytes)
        if _libc.mremap(copy, nbytes, nbytes, MOVE_HERE, place) == FAILED:
            raise MemoryError(f"mremap of {nbytes} bytes: {os.strerror(ctypes.get_errno())}")
        _libc.fallocate(self.fd, PUNCH_HOLE, offset, nbytes)

    def used(self) -> int:
        """Return the bytes that are allocated."""
        with self._lock:
            return sum(self._allocated.values())

    def close(self) -> None:
        """Close the descriptor; idempotent. Mappings, here and in peers, keep the memory."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def _take(self, need: int) -> int:
        for hole in self._holes:
            offset, size = hole
            if size >= need:
                with contextlib.suppress(ValueError):  # a signal handler has just retired it
                    self._holes.remove(hole)
                if size > need:
                    insort(self._holes, (offset + need, size - need))
                return offset
        raise MemoryError(
            f"no room for {need} bytes of shared memory in one piece: this rank has reserved "
            f"{self.mapping.data.size} bytes, by {self.bound}"
        )

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


class _OwnedPiece:
    """An arena's piece as the base object of an array, whose views keep the piece alive."""

    def __init__(self, arena: Arena, offset: int, nbytes: int) -> None:
        self._arena = arena
        self._offset, self._nbytes = offset, nbytes
        self.__array_interface__: dict[str, object] = {
            "version": 3,
            "typestr": "|u1",
            "data": (arena.mapping.base + offset, False),
            "shape": (nbytes,),
        }

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # Needs no lock: nobody takes the piece before the append. A forked child's copy of the
        # array does not own the piece. At the interpreter's end modules may be gone.
        if ending():
            return
        if os.getpid() == self._arena.pid:
            self._arena.mapping.give_back(self._offset, self._nbytes)
        self._arena.released.append(self._offset)
