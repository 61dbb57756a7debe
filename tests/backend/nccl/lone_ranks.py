"""Laws of NCCL that a single rank can check on its device, for tests and tools/gpu_check.py.

An all_reduce of a single rank by PREMUL_SUM multiplies its array: this shows where and when it ran.
A stream is blocked by a wait for a word in pinned memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
from device_ranks import communicator, device, full, ones, value

from nc10d import cuda
from nc10d.backend.nccl.pools import allocator_functions
from nc10d.backend.nccl.registered_memory import nccl_backend
from nc10d.base.deadline import Deadline
from nc10d.cuda.driver import call, driver
from nc10d.errors import Aborted
from nc10d.group.process_group import ProcessGroup
from nc10d.ops import SUM, premul_sum

DOUBLE = premul_sum(2.0)


@contextmanager
def held(*streams: int) -> Iterator[None]:
    """Block streams of the current device until the end of the `with` block."""
    address = int(call("cuMemHostAlloc", 4, 0))
    word = ctypes.c_uint32.from_address(address)
    word.value = 0
    for stream in streams:
        call("cuStreamWaitValue32", stream, address, 1, 0)
    try:
        yield
    finally:
        word.value = 1


def a_collective_keeps_its_place_in_a_stream(group: ProcessGroup) -> None:
    """The call runs between earlier and later work of its stream, and does not block the host."""
    x, new, after = full(group, 1.0), full(group, 3.0), full(group, 0.0)
    group.all_reduce(x, DOUBLE)
    # That call is in the order of the current stream alone: it ends before another stream begins.
    cuda.synchronize(device(group))
    mine = cuda.Stream(device(group))
    with cuda.on_device(device(group)), cuda.stream(mine):
        with held(mine.handle):
            call("cuMemcpyDtoDAsync", x.address, new.address, x.nbytes, mine.handle)
            work = group.all_reduce(x, DOUBLE, async_op=True)
            work.wait()
            call("cuMemcpyDtoDAsync", after.address, x.address, x.nbytes, mine.handle)
            assert not work.is_completed()
        mine.synchronize()
    assert work.is_completed()
    assert (value(x), value(after)) == (6.0, 6.0)


def a_graph_repeats_what_it_has_captured(group: ProcessGroup) -> None:
    x, y = ones(group), ones(group)
    group.all_reduce(x, DOUBLE)
    mine = cuda.Stream(device(group))
    relaxed = driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    with cuda.on_device(device(group)), cuda.stream(mine):
        call("cuStreamBeginCapture", mine.handle, relaxed)
        with group.coalescing_manager():
            group.all_reduce(x, DOUBLE)
            group.all_reduce(y, DOUBLE)
        graph = call("cuStreamEndCapture", mine.handle)
        runs = call("cuGraphInstantiate", graph, 0)
        assert (value(x), value(y)) == (2.0, 1.0), "capturing runs nothing"
        for _ in range(3):
            call("cuGraphLaunch", runs, mine.handle)
        mine.synchronize()
    assert (value(x), value(y)) == (16.0, 8.0)


def an_abort_ends_the_group(group: ProcessGroup) -> None:
    """An operation in flight ends, with or without an error; later calls are refused."""
    x = ones(group)
    group.all_reduce(x, DOUBLE)
    mine = cuda.Stream(device(group))
    with cuda.on_device(device(group)), cuda.stream(mine):
        with held(mine.handle):
            work = group.all_reduce(x, DOUBLE, async_op=True)
            group.abort("enough")
            with pytest.raises(Aborted, match="enough"):
                group.all_reduce(x, DOUBLE)
        with suppress(Aborted):
            work.wait_blocking()
    group.close()


def registered_memory_is_reduced_like_other(group: ProcessGroup) -> None:
    """The check goes through NCCL's own calls for registered memory."""
    whole, x, mine = communicator(group, "registered"), ones(group, 4096), cuda.Stream()
    registered = whole.register(x.address, x.nbytes)
    scalar = ctypes.create_string_buffer(np.float32(2.0).tobytes())
    double = whole.premul_sum(2.0, 7, scalar).handle  # ncclFloat32
    with cuda.on_device(device(group)):
        ends = whole.handle, mine.handle
        whole.library.call("ncclAllReduce", x.address, x.address, 4096, 7, double, *ends)
    mine.synchronize()
    registered.close()
    whole.close()
    assert value(x) == 2.0


def arrays_of(make: Callable[[Any], Any], read: Callable[[Any], Any]) -> Callable[..., None]:
    """Return a law: all_reduces of a library's arrays are right, alone and in a block."""

    def law(group: ProcessGroup) -> None:
        arrays = [make(np.full(8, k, np.float32)) for k in range(3)]
        for x in arrays:
            group.all_reduce(x, DOUBLE)
        with group.coalescing_manager():
            for x in arrays:
                group.all_reduce(x, SUM)
        group.all_reduce(arrays[0], SUM, async_op=True).wait_blocking()
        cuda.synchronize()
        assert [set(read(x).tolist()) for x in arrays] == [{0.0}, {2.0}, {4.0}]

    return law


def arrays_of_numba(group: ProcessGroup) -> None:
    from numba import cuda as numba

    arrays_of(numba.to_device, lambda x: x.copy_to_host())(group)


def arrays_of_cupy(group: ProcessGroup) -> None:
    import cupy

    arrays_of(cupy.asarray, cupy.asnumpy)(group)


LIBRARIES = {"numba_cuda": arrays_of_numba, "cupy": arrays_of_cupy}


def free_bytes() -> int:
    with cuda.on_device(0):
        return int(call("cuMemGetInfo")[0])


def pool_of_numba(group: ProcessGroup) -> None:
    """Numba's arrays are in registered memory, which is freed behind their last use."""
    from numba import cuda as numba

    from nc10d import nccl

    numba.set_memory_manager(nccl.numba_memory_manager(group))
    free_before = free_bytes()
    arrays_of(numba.to_device, lambda x: x.copy_to_host())(group)
    x = numba.device_array(1 << 20, np.float32)
    assert free_bytes() <= free_before - x.nbytes
    comm = nccl_backend(group).communicator(Deadline.after(30.0))
    comm.register(x.device_ctypes_pointer.value, x.nbytes).close()  # it is memory of the device
    del x


def pool_of_cupy(group: ProcessGroup) -> None:
    import cupy

    from nc10d import nccl

    pool = cupy.cuda.MemoryPool(nccl.cupy_allocator(group))
    cupy.cuda.set_allocator(pool.malloc)
    arrays_of_cupy(group)
    assert pool.total_bytes() > 0


def pool_of_torch(group: ProcessGroup) -> None:
    import torch

    import nc10d.torch

    pool = nc10d.torch.nccl_pool()
    with torch.cuda.use_mem_pool(pool):
        arrays_of(lambda x: torch.from_numpy(x).cuda(), lambda x: x.cpu())(group)
        x = torch.zeros(1 << 20, device="cuda")
    registered = nc10d.torch.register_pool(pool, group)
    assert registered
    group.all_reduce(x)
    torch.cuda.synchronize()
    for each in registered:
        each.close()


def torchs_allocator_is_nccls(_group: ProcessGroup) -> None:
    """The C functions that torch calls; it needs no torch."""
    functions = allocator_functions()
    allocate = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
    free = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    with cuda.on_device(0):
        before = free_bytes()
        address = allocate(functions.allocate.address)(1 << 20, 0, None)
        assert address
        assert free_bytes() <= before - (1 << 20)
        free(functions.free.address)(address, 1 << 20, 0, None)
        assert free_bytes() == before
        assert not allocate(functions.allocate.address)(1 << 60, 0, None), "out of memory is NULL"


POOLS = {"numba_cuda": pool_of_numba, "cupy": pool_of_cupy, "torch": pool_of_torch}
"""By package; each in a process of its own, because a memory manager is chosen once."""
