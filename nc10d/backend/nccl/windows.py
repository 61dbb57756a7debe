"""One-sided communication: memory of every rank, into which each rank of the group writes.

    window = nc10d.nccl.window(1024, np.float32)      # all ranks call
    window.put(window.array[:8], peer=1, at=512)      # rank 0
    window.wait_signal(0)                             # rank 1: window.array[512:520] is there

The calls are NCCL's ncclPutSignal, ncclSignal and ncclWaitSignal (2.29.2). They are queued on the
current stream of the window's array and return at once: the stream waits for a signal, the host
does not. They have their own communicator, so that a stream that waits for a signal holds up no
collective; NCCL runs a rank's calls in their order, on whichever streams, so a put behind a wait
comes later. There is no Work, and no timeout: a group that fails ends the waiting.
"""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from nc10d.arrays.buffer import as_buffer
from nc10d.arrays.dtypes import dtype_of
from nc10d.backend.nccl.backend import NcclBackend
from nc10d.backend.nccl.bindings.header_table import FUNCTIONS
from nc10d.backend.nccl.bindings.library import WaitSignalDesc
from nc10d.backend.nccl.comm.comm_streams import WINDOWS
from nc10d.backend.nccl.comm.communicator import Communicator, Registration, mem_alloc, mem_free
from nc10d.backend.nccl.launch.datatypes import BYTES
from nc10d.base.deadline import Deadline
from nc10d.cuda.driver import call
from nc10d.cuda.memory import DeviceArray, fill
from nc10d.cuda.streams import LEGACY, stream_of
from nc10d.errors import DistError
from nc10d.ops import Array

_NO_FLAGS = (0, 0, 0)  # signal index, context and flags, which NCCL reserves


class Window:
    """A flat array of every rank, open to puts from all. Any thread may call."""

    def __init__(
        self, backend: NcclBackend, count: int, dtype: npt.DTypeLike, timeout: float
    ) -> None:
        """Make the array of zeros on the group's device; blocks until all ranks have called.

        Count and dtype must be the same on all ranks. UnsupportedPlatform for NCCL before 2.29.2,
        and where the devices can't reach each other's memory.
        """
        kind = dtype_of(np.dtype(dtype))
        backend.library.require(FUNCTIONS["ncclPutSignal"].since, "one-sided communication")
        deadline = Deadline.after(timeout)
        self._backend = backend
        self._timeout = timeout
        self._comm = backend.started.formed(WINDOWS, deadline)
        self._registration = _windowed(backend, self._comm, count * kind.itemsize, deadline)
        address = self._registration[0]
        self.array = DeviceArray(address, (count,), kind, backend.device, self)
        fill(self.array, 0)
        with self._comm.enter():
            call("cuStreamSynchronize", stream_of(self.array))
        backend.started.meet("a window of zeros", deadline)  # before a peer writes there

    def put(self, source: Array, peer: int, at: int = 0) -> None:
        """Queue a write of `source` into rank `peer`'s array from element `at` on, and a signal.

        `source` is a contiguous part of this rank's own array, such as `window.array[3:7]`; NCCL
        takes no other memory. This part may be written again behind the put, on the same stream.
        """
        x, mine = as_buffer(source), self.array.buffer
        self._check_peer(peer)
        inside = mine.address <= x.address and x.address + x.nbytes <= mine.address + mine.nbytes
        if not (x.contiguous and inside):
            raise ValueError("put: the source must be a contiguous part of the window's own array")
        if x.dtype is not mine.dtype or not 0 <= at <= mine.count - x.count:
            there = f"{x.count} elements of {x.dtype.label} from {at} on"
            raise ValueError(f"put: {there} are not in {mine.count} of {mine.dtype.label}")
        if x.count:
            offset = at * mine.dtype.itemsize
            place = x.address, x.nbytes, BYTES, peer, self._registration[1].handle, offset
            self._queue("ncclPutSignal", *place, *_NO_FLAGS)

    def signal(self, peer: int) -> None:
        """Queue a signal to rank `peer`, which comes there after all earlier puts."""
        self._check_peer(peer)
        self._queue("ncclSignal", peer, *_NO_FLAGS)

    def wait_signal(self, *peers: int, count: int = 1) -> None:
        """Make the current stream wait for `count` signals from each of `peers`.

        What they have put before is then in the array. Every put and every signal from a peer
        counts once, for whichever window of the group.
        """
        for peer in peers:
            self._check_peer(peer)
        if not peers or count < 1:
            raise ValueError(f"wait_signal: expected peers and a positive count, got {count}")
        wanted = (WaitSignalDesc * len(peers))(*(WaitSignalDesc(count, peer) for peer in peers))
        self._queue("ncclWaitSignal", len(peers), ctypes.byref(wanted))

    def close(self) -> None:
        """Free the array once all ranks have called and their queued work is done; idempotent."""
        # Without this call the memory stays until the process ends: peers may write at any time.
        address, registration = self._registration
        if registration.handle is None:
            return
        with self._comm.enter():
            call("cuCtxSynchronize")
            self._backend.started.meet("closing a window", Deadline.after(self._timeout))
            registration.close()
            mem_free(self._comm.library, address)

    def __repr__(self) -> str:
        return f"<Window of {self.array!r}>"

    def _check_peer(self, peer: int) -> None:
        if not 0 <= peer < self._backend.size:
            raise ValueError(f"expected a rank of {self._backend.size}, got {peer}")

    def _queue(self, name: str, *arguments: object) -> None:
        """Queue a call, which may be part of a captured graph; a failure ends the group."""
        comm, backend = self._comm, self._backend
        if self._registration[1].handle is None:
            raise ValueError(f"{name}: the window has been closed")
        backend.started.check()
        try:
            with comm.lock, comm.enter():
                stream = stream_of(self.array) or LEGACY
                comm.library.call(name, *arguments, comm.handle, stream)
                comm.settle(Deadline.after(self._timeout), name)
        except DistError as error:
            backend.fail(error)
            raise


def _windowed(
    backend: NcclBackend, comm: Communicator, nbytes: int, deadline: Deadline
) -> tuple[int, Registration]:
    with comm.enter():
        address = mem_alloc(comm.library, max(nbytes, 1))
        try:
            backend.started.meet("a window", deadline)
            return address, comm.window(address, nbytes or 1, deadline)
        except DistError:
            mem_free(comm.library, address)
            raise
