"""NCCL's memory for other libraries' arrays: their allocators ask ncclMemAlloc (2.19).

    cupy.cuda.set_allocator(cupy.cuda.MemoryPool(nccl.cupy_allocator(group)).malloc)
    numba.cuda.set_memory_manager(nccl.numba_memory_manager(group))

Every piece is registered with the group's communicator, and freed as `registered_memory` tells:
after the work that is queued on the device's default stream. Pieces are 2 MiB or larger on a GPU,
so small arrays need a pool above, such as CuPy's; Numba has none. torch's pool is
`nc10d.torch.nccl_pool`.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import cfunc, types

from nc10d.backend.nccl.bindings.library import library
from nc10d.backend.nccl.bindings.native import call1, call2
from nc10d.backend.nccl.registered_memory import GroupOfBackends, registered_bytes
from nc10d.base.run_to_end import import_to_end
from nc10d.cuda.driver import call


def cupy_allocator(group: GroupOfBackends) -> Callable[[int], Any]:
    """Return an allocator for `cupy.cuda.MemoryPool`; blocks until all ranks have called.

    The returned function serves the group's device only, and waits for no other rank. TypeError for
    a group whose device arrays do not go by NCCL; ImportError without CuPy.
    """
    cupy = import_to_end("cupy")
    allocate, device = registered_bytes(group)

    def memory_of(nbytes: int) -> Any:
        owner = allocate(nbytes)
        memory = cupy.cuda.UnownedMemory(owner.address, nbytes, owner, device)
        return cupy.cuda.MemoryPointer(memory, 0)

    return memory_of


def numba_memory_manager(group: GroupOfBackends) -> type[Any]:
    """Return a class for `numba.cuda.set_memory_manager`; blocks until all ranks have called.

    Numba takes the class before its first use of the device. TypeError for a group whose device
    arrays do not go by NCCL; ImportError without Numba's CUDA target.
    """
    cuda = import_to_end("numba.cuda")
    allocate, device = registered_bytes(group)

    class NcclMemoryManager(cuda.GetIpcHandleMixin, cuda.HostOnlyCUDAMemoryManager):  # type: ignore[misc, name-defined]
        """Numba's plug-in for device memory (EMM, interface 1)."""

        interface_version = 1

        def initialize(self) -> None:
            """Do nothing: NCCL is ready."""

        def memalloc(self, size: int) -> Any:
            """Return a pointer that owns a new piece."""
            if cuda.current_context().device.id != device:
                raise ValueError(f"NCCL's memory of {group!r} is on cuda:{device}")
            kept = [allocate(size)]
            at = ctypes.c_void_p(kept[0].address)
            here = weakref.proxy(self.context)
            return cuda.MemoryPointer(here, at, size, finalizer=kept.clear)

        def get_memory_info(self) -> Any:
            """Return the device's free and total bytes."""
            free, total = call("cuMemGetInfo")
            return cuda.MemoryInfo(free=int(free), total=int(total))

    return NcclMemoryManager


class AllocatorFunctions(NamedTuple):
    """C functions as torch's pluggable allocators have them; keep them as long as the pool.

    allocate: void *(ssize_t size, int device, stream); free: void (void *, size_t, int, stream).
    They hold no GIL, as torch's allocator may be entered with or without it.
    """

    allocate: Any
    free: Any


@functools.cache
def allocator_functions() -> AllocatorFunctions:
    """Compile NCCL's allocator in torch's form; out of memory the function returns NULL."""
    mem_alloc, mem_free = library().address("ncclMemAlloc"), library().address("ncclMemFree")

    @cfunc(types.int64(types.int64, types.int32, types.int64))
    def allocate(size, _device, _stream):  # type: ignore[no-untyped-def]
        words = np.zeros(3, np.int64)  # the two arguments, and the place of the answer
        words[0], words[1] = words.ctypes.data + 16, size
        return words[2] if call2(mem_alloc, words.ctypes.data) == 0 else 0

    freeing = types.void(types.int64, types.int64, types.int32, types.int64)

    @cfunc(freeing)
    def free(address, _size, _device, _stream):  # type: ignore[no-untyped-def]
        words = np.zeros(1, np.int64)
        words[0] = address
        call1(mem_free, words.ctypes.data)

    return AllocatorFunctions(allocate, free)
