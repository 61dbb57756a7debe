"""Device memory that is registered with a group's communicator, for arrays that come again.

    Reducer(parameters, group, allocate=registered_zeros(group))

NCCL reads and writes such memory where it lies, in the ways that a machine has for that
(ncclMemAlloc and ncclCommRegister, NCCL 2.19). It goes back when no array refers to it any more and
the device is past what was queued on it: unmapping it waits for nothing, so a thread waits before.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from nc10d.arrays.dtypes import dtype_of
from nc10d.backend.nccl.backend import NcclBackend
from nc10d.backend.nccl.comm.communicator import Communicator, Registration, mem_alloc, mem_free
from nc10d.base.deadline import Deadline
from nc10d.cuda.driver import call
from nc10d.cuda.events import event_pool, is_over
from nc10d.cuda.memory import DeviceArray, fill
from nc10d.cuda.streams import LEGACY, spoil_no_capture
from nc10d.errors import DistError

if TYPE_CHECKING:
    from nc10d.group.process_group import ProcessGroup

_FIRST_LOOK, _LONGEST_LOOK = 0.0005, 0.05  # seconds between looks at an event
_never = threading.Event()


def registered_zeros(group: ProcessGroup) -> Callable[[int, Any], DeviceArray]:
    """Return what makes flat arrays of zeros from a count and a dtype, in registered memory.

    All ranks call this alike; it blocks until they have met, on the group's device (the current
    one, if it has none yet). What it returns is for each rank alone, and waits for no other.
    TypeError for a group whose device arrays do not go by NCCL, UnsupportedPlatform for NCCL before
    2.19.
    """
    backend = group.backend("cuda")
    if not isinstance(backend, NcclBackend):
        raise TypeError(f"registered device memory is NCCL's, {group!r} has {backend.name!r}")
    comm = backend.communicator(Deadline.after(group.timeout))
    dropped = _dropped()

    def make(count: int, dtype: Any) -> DeviceArray:
        kind = dtype_of(np.dtype(dtype))
        with comm.lock, comm.enter():
            comm.settle(Deadline.after(group.timeout), "registering memory")
            owner = _registered(comm, backend.device, max(count * kind.itemsize, 1), dropped)
        made = DeviceArray(owner.address, (count,), kind, backend.device, owner)
        fill(made, 0)
        return made

    return make


class _Piece(NamedTuple):
    """A piece of memory and its registration."""

    comm: Communicator
    device: int
    address: int
    registration: Registration


class _Owner:
    """What arrays on a piece of memory refer to."""

    __slots__ = ("__weakref__", "address")

    def __init__(self, piece: _Piece, dropped: queue.SimpleQueue[_Piece]) -> None:
        self.address = piece.address
        # A queue that finalizers may use; whatever may block is not for the thread they run in.
        weakref.finalize(self, dropped.put, piece).atexit = False


def _registered(
    comm: Communicator, device: int, nbytes: int, dropped: queue.SimpleQueue[_Piece]
) -> _Owner:
    address = mem_alloc(comm.library, nbytes)
    try:
        registration = comm.register(address, nbytes)
    except DistError:
        mem_free(comm.library, address)
        raise
    return _Owner(_Piece(comm, device, address, registration), dropped)


@functools.cache
def _dropped() -> queue.SimpleQueue[_Piece]:
    """Return the queue by which this process's thread gets what no array refers to."""
    pieces: queue.SimpleQueue[_Piece] = queue.SimpleQueue()
    thread = threading.Thread(target=_give_all_back, args=(pieces,), name="nc10d-nccl-free")
    thread.daemon = True
    thread.start()
    return pieces


def _give_all_back(pieces: queue.SimpleQueue[_Piece]) -> None:
    spoil_no_capture()
    while True:
        piece = pieces.get()
        # A device or a driver that has failed keeps its memory, until the process ends.
        with contextlib.suppress(DistError), piece.comm.enter():
            _wait_for_default_stream(piece.device)
            _give_back(piece)
        del piece  # before it waits for the next one


def _wait_for_default_stream(device: int) -> None:
    """Wait for what is queued on the current device; copies let its default stream wait for them.

    Operations of the group have kept their arrays until they were over.
    """
    pool = event_pool(device)
    event, pause = pool.take(), _FIRST_LOOK
    call("cuEventRecord", event, LEGACY)
    while not is_over(event):
        _never.wait(pause)  # CUDA wakes nobody
        pause = min(2 * pause, _LONGEST_LOOK)
    pool.give(event)


def _give_back(piece: _Piece) -> None:
    # A communicator that can't deregister has failed or ended, and reads nothing by it any more.
    with contextlib.suppress(DistError):
        piece.registration.close()
    mem_free(piece.comm.library, piece.address)
