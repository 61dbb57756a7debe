"""A DevicePacker launches packing kernels: on an emulated GPU that runs their CPU twins."""

from __future__ import annotations

import ctypes
import importlib.util
from typing import Any

import numpy as np
import pytest
from emulated import emulated_ranks, needs_emulators

from build import WANTED, build
from nc10d.arrays.dtypes import DType
from nc10d.kernels.gpu import gpu_pack

HERE = importlib.util.find_spec("numba_cuda") and importlib.util.find_spec("cuda.bindings")
needs_compiler = pytest.mark.skipif(not (HERE or WANTED), reason="no CUDA compiler: see .ci/run")
pytestmark = [needs_emulators, needs_compiler]
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
    repeated(cuda, DevicePacker)
    mistakes(cuda, DevicePacker)


def repeated(cuda: Any, packer: Any) -> None:
    """A graph repeats a launch on another stream than before."""
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


def mistakes(cuda: Any, packer: Any) -> None:
    two, flat = cuda.to_device(np.ones(2, np.float32)), cuda.to_device(np.ones(4, np.float32))
    with pytest.raises(ValueError, match="elements 3 to 5 are not all inside of 4"):
        packer([two], flat, [3])
    with pytest.raises(TypeError, match="float32 can't be cast to int64"):
        packer([two], cuda.to_device(np.ones(4, np.int64)), [0])
    with pytest.raises(TypeError, match="must be on cuda:0"):
        packer([np.ones(2, np.float32)], flat, [0])
    packer([], flat, []).pack()


@pytest.mark.parametrize("driver", ["", "7.5"])
def test_arrays_are_packed_and_unpacked_by_one_launch_each(driver: str) -> None:
    """Also with a driver that is too old for the compiler's PTX."""
    old = {"NC10D_EMULATED_PTX": driver} if driver else {}
    with emulated_ranks(1, "fake", 90.0, **old) as ranks:
        ranks.run(packed_and_back)
