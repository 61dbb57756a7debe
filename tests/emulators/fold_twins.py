"""CPU twins of the kernels that fold in rank order: the very bodies, thread by thread.

On an emulated GPU a kernel runs as the twin that a test has registered for it. A twin is as strict
as a card: addresses are aligned, and all bytes lie in memory of the device.
"""

from __future__ import annotations

import ctypes
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit
from numba.extending import intrinsic

from nc10d.arrays.dtypes import ElementType, alignment
from nc10d.cuda.driver import call, driver
from nc10d.kernels.gpu.gpu_pack import THREADS, Target
from nc10d.kernels.gpu.gpu_reduce import ROW_ALIGN, fold_body, fold_name
from nc10d.kernels.simd import I64
from nc10d.ops import ReduceOp
from nc10d.ops.reductions import ReductionKind

ARGUMENTS = 10
launched: Counter[str] = Counter()
"""How often this process has launched each kernel."""
_registered: dict[str, Any] = {}


def coordinate(b: Any, place: Any, index: int) -> Any:
    return b.load(b.inttoptr(b.add(place, I64(8 * index)), ir.PointerType(I64)), align=8)


CPU = Target(intrinsic, 0, coordinate)


@functools.cache
def every_thread(kind: ReductionKind, element: ElementType) -> Callable[..., None]:
    """Return a function of arguments, blocks and threads that runs a body for all threads."""
    body = njit(fold_body(CPU, kind, element))

    @njit
    def run(a, place, at, blocks, threads):  # type: ignore[no-untyped-def]
        place[2] = threads
        for block in range(blocks):
            for thread in range(threads):
                place[0], place[1] = block, thread
                body(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], at)

    def launch(arguments: Any, blocks: int, threads: int = THREADS) -> None:
        place = np.zeros(3, np.int64)
        run(np.array(arguments, np.int64), place, place.ctypes.data, blocks, threads)

    return launch


def register_twin(op: ReduceOp, element: ElementType) -> None:
    """Give an emulated GPU the twin of a reduction's kernel; nothing on a GPU."""
    driver()
    library, name = ctypes.CDLL("libcuda.so.1"), fold_name(op.kind, element)
    if not hasattr(library, "cuemuRegisterKernel") or name in _registered:
        return
    run = every_thread(op.kind, element)
    run([0] * ARGUMENTS, 1)  # compiled here, and not on a stream's thread

    def twin(grid: Any, block: Any, args: Any) -> None:
        a = [ctypes.c_int64.from_address(args[i]).value for i in range(ARGUMENTS)]
        dst, own, rows, stride, _rank, size, count = a[:7]
        nbytes, align = count * element.itemsize, alignment(element.itemsize)
        assert (dst | own) % align == 0, "aligned to an element"
        assert (rows | stride) % ROW_ALIGN == 0, "rows are aligned"
        assert grid[0] == -(-count // a[7]), "a block for each share"
        a[:2] = host_bytes(dst, nbytes), host_bytes(own, nbytes)
        a[2] = host_bytes(rows, size * stride) if size > 1 else 0
        run(a, grid[0], block[0])
        launched[name] += 1

    kind = ctypes.CFUNCTYPE(
        None, *[ctypes.POINTER(ctypes.c_uint)] * 2, ctypes.POINTER(ctypes.c_void_p)
    )
    _registered[name] = kind(twin)
    sizes = (ctypes.c_uint * ARGUMENTS)(*[8] * ARGUMENTS)
    register = library.cuemuRegisterKernel
    assert register(f"{name}B".encode(), _registered[name], ARGUMENTS, sizes) == 0


def host_bytes(address: int, nbytes: int) -> int:
    """Return where an emulated device's bytes lie; they must all be in one allocation."""
    kinds = driver().CUpointer_attribute
    first, size, host = (
        int(call("cuPointerGetAttribute", kind, address))
        for kind in (
            kinds.CU_POINTER_ATTRIBUTE_RANGE_START_ADDR,
            kinds.CU_POINTER_ATTRIBUTE_RANGE_SIZE,
            kinds.CU_POINTER_ATTRIBUTE_HOST_POINTER,
        )
    )
    assert first <= address, "in an allocation"
    assert address + nbytes <= first + size, "no byte behind the end of an allocation"
    return host
