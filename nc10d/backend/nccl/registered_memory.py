"""Device memory that is registered with a group's communicator, for arrays that are used often.

    Reducer(parameters, group, allocate=registered_zeros(group))

NCCL reads and writes such memory in place, if the machine can (ncclMemAlloc and ncclCommRegister,
NCCL 2.19). Symmetric memory is a window of all ranks, for which NCCL has quicker kernels (2.27).
Memory is freed when no array refers to it any more, and the device's default stream and all
operations that were pending then have ended. Unmapping memory does not wait for the device, so a
thread waits first.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import weakref
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from nc10d.arrays.dtypes import dtype_of
from nc10d.backend.nccl.backend import NcclBackend
from nc10d.backend.nccl.bindings.header_table import FUNCTIONS
from nc10d.backend.nccl.comm.communicator import Communicator, Registration, mem_alloc, mem_free
from nc10d.backend.nccl.works import ended_later
from nc10d.backend.protocol import Backend
from nc10d.base.deadline import Deadline
from nc10d.base.signal_errors import Thread
from nc10d.cuda.driver import call, event_done, event_pool
from nc10d.cuda.memory import DeviceArray, fill
from nc10d.cuda.streams import LEGACY, is_captured, relax_capture_mode
from nc10d.errors import DistError

_WINDOW = "ncclCommWindowRegister"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.05  # seconds between polls of an event


class GroupOfBackends(Protocol):
    """The group behind registered memory, with a timeout in seconds, and a backend per device."""

    @property
    def timeout(self) -> float:
        """The timeout for the group's operations, in seconds."""

    def backend(self, device: str) -> Backend:
        """Return a device's backend."""


def registered_zeros(group: GroupOfBackends) -> Callable[[int, npt.DTypeLike], DeviceArray]:
    """Return a function from count and dtype to a flat array of zeros in registered memory.

    All ranks call this, which blocks until they have met, on the group's device (the current
    device, if none yet). A rank may call the returned function alone, which waits for no other
    rank. TypeError for a group whose device arrays do not go by NCCL, UnsupportedPlatform for NCCL
    before 2.19.
    """
    return _arrays(*registered_bytes(group))


def symmetric_zeros(group: GroupOfBackends) -> Callable[[int, npt.DTypeLike], DeviceArray]:
    """Return a function from count and dtype to a flat array of zeros in symmetric memory.

    As `registered_zeros`, but all ranks make every call to the returned function, in the same order
    and with the same count and dtype; a call blocks until they have met. UnsupportedPlatform for
    NCCL before 2.27, and where the devices can't reach each other's memory.
    """
    backend = nccl_backend(group)
    backend.library.require(FUNCTIONS[_WINDOW].since, _WINDOW)
    comm = backend.communicator(Deadline.after(group.timeout))

    def register(address: int, nbytes: int) -> Registration:
        deadline = Deadline.after(group.timeout)
        backend.started.meet("symmetric memory", deadline)
        return comm.window(address, nbytes, deadline)

    return _arrays(_allocator(backend, comm, register), backend.device)


def nccl_backend(group: GroupOfBackends) -> NcclBackend:
    """Return the group's backend for device arrays; TypeError unless that is NCCL's."""
    backend = group.backend("cuda")
    if not isinstance(backend, NcclBackend):
        raise TypeError(f"{group!r} has {backend.name!r} for device arrays, which is not NCCL")
    return backend


def registered_bytes(group: GroupOfBackends) -> tuple[Callable[[int], Owner], int]:
    """Return a function from a number of bytes to registered memory, and the memory's device.

    As `registered_zeros`, for other libraries' allocators; the memory's contents are undefined.
    """
    backend = nccl_backend(group)
    comm = backend.communicator(Deadline.after(group.timeout))
    return _allocator(backend, comm, _registering(comm, group)), backend.device


def _registering(comm: Communicator, group: GroupOfBackends) -> Callable[[int, int], Registration]:
    def register(address: int, nbytes: int) -> Registration:
        with comm.lock:
            comm.settle(Deadline.after(group.timeout), "registering memory")
            return comm.register(address, nbytes)

    return register


def _allocator(
    backend: NcclBackend, comm: Communicator, register: Callable[[int, int], Registration]
) -> Callable[[int], Owner]:
    dropped, device = _dropped(), backend.device

    def allocate(nbytes: int) -> Owner:
        with comm.enter():
            return _registered(comm, device, max(nbytes, 1), register, dropped)

    return allocate


def _arrays(
    allocate: Callable[[int], Owner], device: int
) -> Callable[[int, npt.DTypeLike], DeviceArray]:
    def make(count: int, dtype: npt.DTypeLike) -> DeviceArray:
        kind = dtype_of(np.dtype(dtype))
        owner = allocate(count * kind.itemsize)
        made = DeviceArray(owner.address, (count,), kind, device, owner)
        fill(made, 0)
        return made

    return make


class _Piece(NamedTuple):
    """A piece of memory and its registration."""

    comm: Communicator
    device: int
    address: int
    registration: Registration


class Owner:
    """The owner of a piece of memory, to which arrays on it refer."""

    __slots__ = ("__weakref__", "address")

    def __init__(self, piece: _Piece, dropped: queue.SimpleQueue[_Piece]) -> None:
        self.address = piece.address
        # Finalizers run in any thread and must not block, so they only put into a queue.
        weakref.finalize(self, dropped.put, piece).atexit = False


def _registered(
    comm: Communicator,
    device: int,
    nbytes: int,
    register: Callable[[int, int], Registration],
    dropped: queue.SimpleQueue[_Piece],
) -> Owner:
    address = mem_alloc(comm.library, nbytes)
    try:
        registration = register(address, nbytes)
    except BaseException:
        mem_free(comm.library, address)
        raise
    return Owner(_Piece(comm, device, address, registration), dropped)


@functools.cache
def _dropped() -> queue.SimpleQueue[_Piece]:
    """Return the queue of unreferenced pieces; starts the thread that frees them."""
    pieces: queue.SimpleQueue[_Piece] = queue.SimpleQueue()
    name = "nc10d-nccl-free"
    Thread(target=_give_all_back, args=(pieces,), name=name, daemon=True).start()
    return pieces


def _give_all_back(pieces: queue.SimpleQueue[_Piece]) -> None:
    relax_capture_mode()
    waiting: list[tuple[_Piece, Iterator[None]]] = []
    pause = _FIRST_PAUSE
    while True:
        try:
            piece = pieces.get(timeout=pause if waiting else None)  # CUDA can't wake a thread
        except queue.Empty:
            pause = min(2 * pause, _LONGEST_PAUSE)
        else:
            waiting.append((piece, _steps(piece)))
            pause = _FIRST_PAUSE
            del piece  # no reference while this waits for the next piece
        waiting = [(piece, steps) for piece, steps in waiting if _go_on(piece, steps)]


def _go_on(piece: _Piece, steps: Iterator[None]) -> bool:
    """Go on to free a piece; return whether that has to wait."""
    # A failed device or driver keeps memory until the process ends.
    with contextlib.suppress(DistError, StopIteration), piece.comm.enter():
        next(steps)
        return True
    return False


def _steps(piece: _Piece) -> Iterator[None]:
    """Free a piece, and yield while operations, or copies on the default stream, may use it."""
    over = ended_later(piece.device)  # operations keep no array whose stream waits
    while not over():
        yield
    pool = event_pool(piece.device)
    event = pool.take()
    while is_captured(LEGACY, piece.device):  # the event would break a graph
        yield
    call("cuEventRecord", event, LEGACY)
    while not event_done(event):
        yield
    pool.give(event)
    _give_back(piece)


def _give_back(piece: _Piece) -> None:
    # A communicator that can't deregister has failed or ended, and does not use the memory.
    with contextlib.suppress(DistError):
        piece.registration.close()
    mem_free(piece.comm.library, piece.address)
