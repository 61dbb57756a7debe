"""The packing kernels for NVIDIA GPUs: `blocks`' bodies as PTX, made without a GPU.

Contract: a kernel is void(table, chunks, factor, place): three int64 and, as the third, a float64;
`place` is not used. It is launched with THREADS threads a block and a block for each chunk. A whole
bucket is a single launch. PTX is made once a machine, and kept beside other compiled code. Needs
numba-cuda with NVVM (the extra cu12); raises UnsupportedPlatform if it is missing.
"""

from __future__ import annotations

import functools
import importlib.metadata
from pathlib import Path
from typing import Any

import llvmlite
from llvmlite import ir
from numba import types

from nc10d.arrays.dtypes import DType
from nc10d.base.run_to_end import import_to_end, off_main
from nc10d.errors import UnsupportedPlatform
from nc10d.kernels.cache_dir import KERNEL_SOURCES, code_folder, exclusive, replace
from nc10d.kernels.gpu_pack import THREADS, Target, cast_body, copy_body, supports
from nc10d.kernels.simd import I32, I64, Builder, Value

GLOBAL = 1
"""The address space for a GPU's memory, in NVVM's numbers."""
_REGISTERS = ("ctaid.x", "tid.x", "ntid.x")
_BOUNDS = (THREADS, 6)
"""Six blocks on a multiprocessor at once: 40 registers a thread, and memory is kept busy."""
_SIGNATURE = types.void(types.int64, types.int64, types.float64, types.int64)


@functools.cache
@off_main
def kernel_ptx(src: DType, dst: DType, scaled: bool, capability: tuple[int, int]) -> str:
    """Return PTX with a kernel: dst = src, or dst = src * factor where `scaled` or cast.

    `capability` is the GPU's, such as (9, 0). TypeError for dtypes that are not real floats with at
    most 32 bits, unless for a plain copy. May block to compile.
    """
    if not supports(src, dst) or (scaled and not supports(src, DType.FLOAT32)):
        raise TypeError(f"there is no GPU kernel from {src.label} to {dst.label}")
    casts = scaled or src is not dst
    name = f"cast_{src.label}_to_{dst.label}" if casts else "copy_chunk"
    path = _folder() / f"{name}-{capability[0]}{capability[1]}.ptx"
    with exclusive(path.with_suffix(".lock")):
        if not path.exists():
            replace(path, _made(name, src, dst, capability).encode())
        return path.read_text()


def _made(name: str, src: DType, dst: DType, capability: tuple[int, int]) -> str:
    compile_ptx, target = _tools()
    body = copy_body(target) if name == "copy_chunk" else cast_body(target, src, dst)
    body.__name__ = body.__qualname__ = name
    ptx, _ = compile_ptx(body, _SIGNATURE, device=False, cc=capability, launch_bounds=_BOUNDS)
    return str(ptx)


@functools.cache
def _folder() -> Path:
    """Return the folder for PTX made from these sources by these versions."""
    return code_folder(KERNEL_SOURCES, ("PTX", llvmlite.__version__, _version("numba-cuda")))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        message = 'GPU kernels need numba-cuda: pip install ".[cu12]" in its checkout'
        raise UnsupportedPlatform(message) from None


def _tools() -> tuple[Any, Target]:
    # Numba's own numba.cuda is outdated; the package numba_cuda replaces it.
    intrinsic = import_to_end("numba.cuda.extending").intrinsic
    return import_to_end("numba.cuda").compile_ptx, Target(intrinsic, GLOBAL, _coordinate)


def _coordinate(b: Builder, _place: Value, index: int) -> Value:
    name = f"llvm.nvvm.read.ptx.sreg.{_REGISTERS[index]}"
    found = b.module.globals.get(name)
    if found is None:
        found = ir.Function(b.module, ir.FunctionType(I32, ()), name)
    return b.zext(b.call(found, ()), I64)
