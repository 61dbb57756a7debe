"""Device memory that is registered with a group's communicator, for arrays that come again.

    Reducer(parameters, group, allocate=registered_zeros(group))

NCCL reads and writes such memory where it lies, in the ways that a machine has for that
(ncclMemAlloc and ncclCommRegister, NCCL 2.19). It goes back when no array refers to it any more.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from nc10d.backend.nccl.backend import NcclBackend
from nc10d.backend.nccl.communicator import Communicator, Registration, mem_alloc, mem_free
from nc10d.cuda.memory import DeviceArray, fill
from nc10d.deadline import Deadline
from nc10d.dtypes import dtype_of
from nc10d.errors import CudaError, DistError

if TYPE_CHECKING:
    from nc10d.group import ProcessGroup


def registered_zeros(group: ProcessGroup) -> Callable[[int, Any], DeviceArray]:
    """Return what makes flat arrays of zeros from a count and a dtype, in registered memory.

    All ranks call that alike; it blocks until they have met. TypeError for a group whose device
    arrays do not go by NCCL, UnsupportedPlatform for NCCL before 2.19.
    """
    backend = group.backend("cuda")
    if not isinstance(backend, NcclBackend):
        raise TypeError(f"registered device memory is NCCL's, {group!r} has {backend.name!r}")

    def make(count: int, dtype: Any) -> DeviceArray:
        comm = backend.communicator(Deadline.after(group.timeout))
        kind = dtype_of(np.dtype(dtype))
        with comm.enter():
            owner = _Registered(comm, max(count * kind.itemsize, 1))
        made = DeviceArray(owner.address, (count,), kind, backend.device, owner)
        fill(made, 0)
        return made

    return make


class _Registered:
    """A piece of memory and its registration."""

    __slots__ = ("__weakref__", "address")

    def __init__(self, comm: Communicator, nbytes: int) -> None:
        self.address = mem_alloc(comm.library, nbytes)
        registration = comm.register(self.address, nbytes)
        weakref.finalize(self, _give_back, comm, registration, self.address).atexit = False


def _give_back(comm: Communicator, registration: Registration, address: int) -> None:
    with contextlib.suppress(DistError, CudaError), comm.enter():
        registration.close()
        mem_free(comm.library, address)
