"""A DevicePacker launches packing kernels: on an emulated GPU that runs their CPU twins."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np
import pytest
from emulated import emulated_ranks, needs_emulators

from build import build
from nc10d.arrays.dtypes import DType
from nc10d.cuda.device_kernels import load_kernel
from nc10d.kernels.gpu import gpu_pack
from nc10d.kernels.gpu.gpu_ptx import shipped_ptx

pytestmark = needs_emulators
TWIN = ctypes.CFUNCTYPE(None, *[ctypes.POINTER(ctypes.c_uint)] * 2, ctypes.POINTER(ctypes.c_void_p))
CASTS = [(DType.FLOAT32, DType.BFLOAT16), (DType.BFLOAT16, DType.FLOAT32), (DType.FLOAT32,) * 2]
_alive: list[Any] = []


def twin_of(body: Any) -> Any:
    """Return the C function that runs a body for all threads of a launch."""
    from numba import njit

    inner = njit(body)

    @njit
    def run(table, chunks, factor, place, at, count, threads):  # type: ignore[no-untyped-def]
        place[2] = threads
        for block in range(count):
            for thread in range(threads):
                place[0], place[1] = block, thread
                inner(table, chunks, factor, at)

    def twin(grid: Any, block: Any, args: Any) -> None:
        table, chunks = (ctypes.c_int64.from_address(args[i]).value for i in (0, 1))
        factor = ctypes.c_double.from_address(args[2]).value
        place = np.zeros(3, np.int64)
        run(table, chunks, factor, place, place.ctypes.data, grid[0], block[0])

    return TWIN(twin)


def register(part: str, body: Any) -> None:
    found = build()
    assert found is not None
    function = ctypes.CDLL(str(found.cuda)).cuemuRegisterKernel
    _alive.append(twin_of(body))
    assert function(part.encode(), _alive[-1], 4, (ctypes.c_uint * 4)(8, 8, 8, 8)) == 0


def register_all() -> None:
    from llvmlite import ir
    from numba.extending import intrinsic

    def coordinate(b: Any, place: Any, index: int) -> Any:
        at = b.add(place, ir.IntType(64)(8 * index))
        return b.load(b.inttoptr(at, ir.IntType(64).as_pointer()), align=8)

    cpu = gpu_pack.Target(intrinsic, 0, coordinate)
    register("copy_chunk", gpu_pack.copy_body(cpu))
    for src, dst in CASTS:
        register(f"cast_{src.label}_to_{dst.label}", gpu_pack.cast_body(cpu, src, dst))


COUNTS = [3, 0, 1000, 70_001]
OFFSETS = [1, 4, 5, 1006]


def packed_and_back(_group: Any) -> None:
    """Pack float32 arrays into float32 and bfloat16, in two parts, and unpack them again."""
    from nc10d import cuda
    from nc10d.reducer.device_packing import DevicePacker

    register_all()
    values = [np.arange(n).astype(np.float32) % 64 for n in COUNTS]
    arrays = [cuda.to_device(x) for x in values]
    for dtype in (DType.FLOAT32, DType.BFLOAT16):
        flat = cuda.to_device(np.full(72_000, 7).astype(dtype.numpy))
        packer = DevicePacker(arrays, flat, OFFSETS)
        for scale in (1.0, 0.5):
            packer.pack(scale)
            cuda.synchronize()
            expected = np.full(72_000, 7).astype(dtype.numpy)
            for x, at in zip(values, OFFSETS, strict=True):
                expected[at : at + x.size] = (x * scale).astype(dtype.numpy)
            assert flat.to_host().tobytes() == expected.tobytes()
            packer.unpack(1 / scale)
            cuda.synchronize()
            assert all((a.to_host() == x).all() for a, x in zip(arrays, values, strict=True))
    moved(cuda, DevicePacker)
    repeated(cuda, DevicePacker)
    mistakes(cuda, DevicePacker)


def moved(cuda: Any, packer: Any) -> None:
    """Arrays and flat array move, and grow, between passes, as gradients do."""
    values = [np.arange(n).astype(np.float32) for n in (5, 0, 9000)]
    for turn, (first, count) in enumerate([(0, 5), (0, 5), (4, 5), (4, 9), (0, 5)]):
        offsets = [first, first + count, first + count]
        flat = cuda.to_device(np.full(9100, 7, np.float32))
        arrays = [cuda.to_device(np.full(x.size, -1, np.float32)) for x in values]
        arrays[0] = cuda.to_device(np.full(count, -1, np.float32))
        if not turn:
            packing = packer(arrays, flat, offsets)
        packing.take(arrays, offsets, flat)
        given = [np.arange(count, dtype=np.float32) + turn, *(x + turn for x in values[1:])]
        for array, x in zip(arrays, given, strict=True):
            array.fill_from(x)
        packing.pack()
        expected = np.full(9100, 7, np.float32)
        for x, at in zip(given, offsets, strict=True):
            expected[at : at + x.size] = x
        packing.unpack(0.5)
        cuda.synchronize()
        assert np.array_equal(flat.to_host(), expected)
        assert all((a.to_host() == x / 2).all() for a, x in zip(arrays, given, strict=True))


def repeated(cuda: Any, packer: Any) -> None:
    """A graph repeats its launch, on another stream than before, whatever is packed meanwhile."""
    from nc10d.cuda.driver import call, driver

    flat, x = cuda.zeros(4), cuda.to_device(np.ones(4, np.float32))
    packing, stream = packer([x], flat, [0]), cuda.Stream()
    packing.pack()
    relaxed = driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    with cuda.on_device(0), cuda.stream(stream):
        call("cuStreamBeginCapture", stream.handle, relaxed)
        packing.pack(0.5)
        runs = call("cuGraphInstantiate", call("cuStreamEndCapture", stream.handle), 0)
        cuda.synchronize()
        assert flat.to_host().tolist() == [1.0] * 4, "capturing runs nothing"
        call("cuGraphLaunch", runs, stream.handle)
    stream.synchronize()
    assert flat.to_host().tolist() == [0.5] * 4
    y, z = (cuda.to_device(np.full(4, value, np.float32)) for value in (8, 3))
    packing.take([y], [0])
    packing.pack()
    cuda.synchronize()
    strict = driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
    with cuda.on_device(0), cuda.stream(stream):
        packing.take([z], [0])
        call("cuStreamBeginCapture", stream.handle, strict)
        packing.pack()
        later = call("cuGraphInstantiate", call("cuStreamEndCapture", stream.handle), 0)
        cuda.synchronize()
        packing.pack(2.0)
        for graph, value in ((None, 6.0), (runs, 0.5), (later, 3.0), (runs, 0.5)):
            if graph is not None:
                call("cuGraphLaunch", graph, stream.handle)
            stream.synchronize()
            assert flat.to_host().tolist() == [value] * 4
        packing.pack()
        stream.synchronize()
        assert flat.to_host().tolist() == [3.0] * 4
        del packing  # the graph's tables outlive it: freed memory would be others' at once
        others = [cuda.zeros(n) for n in range(1, 40)]
        call("cuGraphLaunch", runs, stream.handle)
        stream.synchronize()
        assert flat.to_host().tolist() == [0.5] * 4
        assert all(not other.to_host().any() for other in others)


def mistakes(cuda: Any, packer: Any) -> None:
    two, flat = cuda.to_device(np.ones(2, np.float32)), cuda.to_device(np.ones(4, np.float32))
    with pytest.raises(ValueError, match="elements 3 to 5 are not all inside of 4"):
        packer([two], flat, [3])
    with pytest.raises(TypeError, match="float32 can't be cast to int64"):
        packer([two], cuda.to_device(np.ones(4, np.int64)), [0])
    with pytest.raises(TypeError, match="must be on cuda:0"):
        packer([np.ones(2, np.float32)], flat, [0])
    packer([], flat, []).pack()


def test_arrays_are_packed_and_unpacked_by_one_launch_each() -> None:
    with emulated_ranks(1, "fake", 90.0) as ranks:
        ranks.run(packed_and_back)


def kernel_in_a_later_version_of_ptx(_group: Any) -> None:
    text = shipped_ptx("copy_chunk")
    assert load_kernel(0, text.replace(".version 6.0", ".version 8.8"))


def test_a_driver_that_is_too_old_for_the_compilers_ptx_gets_an_earlier_version() -> None:
    with emulated_ranks(1, "fake", 90.0, NC10D_EMULATED_PTX="7.5") as ranks:
        ranks.run(kernel_in_a_later_version_of_ptx)


class Watched:
    """Refuses the import of numba-cuda, as where it is not installed."""

    def find_spec(self, name: str, *_: object) -> None:
        if name.startswith(("numba_cuda", "numba.cuda")):
            raise AssertionError(f"{name} is imported")


def packed_without_numba_cuda(_group: Any) -> None:
    from nc10d import cuda
    from nc10d.reducer.device_packing import DevicePacker

    sys.meta_path.insert(0, Watched())  # type: ignore[arg-type]
    arrays = [cuda.to_device(np.full(n, n, np.float32)) for n in (3, 5)]
    for dtype in (DType.FLOAT32, DType.BFLOAT16):
        flat = cuda.zeros(8, dtype)
        DevicePacker(arrays, flat, [0, 3]).pack(2.0)
        cuda.synchronize()
        assert flat.to_host().astype(np.float32).tolist() == [6.0] * 3 + [10.0] * 5
    assert "numba.cuda" not in sys.modules


def test_packing_needs_no_numba_cuda() -> None:
    with emulated_ranks(1, "fake", 90.0) as ranks:
        ranks.run(packed_without_numba_cuda)
