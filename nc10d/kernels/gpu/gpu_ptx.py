"""Kernels for NVIDIA GPUs: bodies as PTX, made without a GPU.

Contract: PTX is made once a machine, and kept beside other compiled code. No multiplication and
addition is contracted, so floats get the CPU's bits. Needs numba-cuda with NVVM (the extra cu12);
raises UnsupportedPlatform if it is missing.

A packing kernel (`kernel_ptx`) is void(table, chunks, factor, place): three int64 and, as the
third, a float64; `place` is not used. It is launched with THREADS threads a block and a block for
each chunk. A whole bucket is a single launch.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llvmlite
from llvmlite import ir
from numba import types
from numba.core import cgutils

from nc10d.arrays.dtypes import DType
from nc10d.base.run_to_end import import_to_end, off_main
from nc10d.errors import UnsupportedPlatform
from nc10d.kernels.cache_dir import KERNEL_SOURCES, code_folder, exclusive, replace
from nc10d.kernels.gpu.gpu_pack import THREADS, Target, cast_body, copy_body, supports
from nc10d.kernels.own.refusals import quoting
from nc10d.kernels.simd import I32, I64, Builder, Value
from nc10d.ops.own_reductions import Function, copied

GLOBAL = 1
"""The address space for a GPU's memory, in NVVM's numbers."""
Capability = tuple[int, int]
Bounds = tuple[int, int]
_REGISTERS = ("ctaid.x", "tid.x", "ntid.x")
_BOUNDS = (THREADS, 6)
"""Six blocks on a multiprocessor at once: 40 registers a thread, and memory is kept busy."""
_SIGNATURE = types.void(types.int64, types.int64, types.float64, types.int64)
_OPTIONS = {"opt": 3, "fma": 0}


@functools.cache
@off_main
def kernel_ptx(src: DType, dst: DType, scaled: bool, capability: Capability) -> str:
    """Return PTX with a kernel: dst = src, or dst = src * factor where `scaled` or cast.

    `capability` is the GPU's, such as (9, 0). TypeError for dtypes that are not real floats with at
    most 32 bits, unless for a plain copy. May block to compile.
    """
    if not supports(src, dst) or (scaled and not supports(src, DType.FLOAT32)):
        raise TypeError(f"there is no GPU kernel from {src.label} to {dst.label}")
    casts = scaled or src is not dst
    name = f"cast_{src.label}_to_{dst.label}" if casts else "copy_chunk"
    body = functools.partial(cast_body, src=src, dst=dst) if casts else copy_body
    return kept_ptx(name, body, _SIGNATURE, capability, _BOUNDS)


def kept_ptx(
    name: str, body: Callable[[Target], Any], signature: Any, capability: Capability, bounds: Bounds
) -> str:
    """Return PTX with a kernel, compiled from its body once a machine; the name says all of it.

    `bounds` are the threads of a block, and how many blocks a multiprocessor has at once.
    """
    path = _folder() / f"{name}-{capability[0]}{capability[1]}.ptx"
    with exclusive(path.with_suffix(".lock")):
        if not path.exists():
            made = body(_target())
            made.__name__ = made.__qualname__ = name
            with _compiling_for(capability):
                replace(path, _compiled(made, signature, capability, bounds).encode())
        return path.read_text()


def _compiled(body: Any, signature: Any, capability: Capability, bounds: Bounds) -> str:
    # Numba's own numba.cuda is outdated; the package numba_cuda replaces it. Its compile_ptx has no
    # option against contraction.
    compiler = import_to_end("numba.cuda.compiler")
    made = compiler.compile_cuda(
        body, signature.return_type, signature.args, cc=capability, nvvm_options=_OPTIONS
    )
    kernel = made.library.get_function(made.fndesc.llvm_func_name)
    compiler.kernel_fixup(kernel, False)
    import_to_end("numba.cuda.cudadrv.nvvm").set_launch_bounds(kernel, bounds)
    return str(made.library.get_asm_str(cc=capability))


@functools.cache
def _folder() -> Path:
    """Return the folder for PTX made from these sources by these versions."""
    sources = (*KERNEL_SOURCES, "kernels/gpu/*.py")
    return code_folder(sources, ("PTX", llvmlite.__version__, _version("numba-cuda")))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        message = 'GPU kernels need numba-cuda: pip install ".[cu12]" in its checkout'
        raise UnsupportedPlatform(message) from None


def _target() -> Target:
    jit = import_to_end("numba.cuda").jit

    def device_function(function: Any) -> Any:
        return jit(device=True, forceinline=True)(copied(function, device_function))

    def compile(function: Function, arguments: tuple[types.Type, ...]) -> Any:
        made = device_function(function)
        with quoting(function):
            made.compile_device(arguments)
        return made

    return Target(import_to_end("numba.cuda.extending").intrinsic, GLOBAL, _coordinate, compile)


@contextlib.contextmanager
def _compiling_for(capability: Capability) -> Iterator[None]:
    """Let Numba compile the functions that a kernel calls without a GPU, which it would ask."""
    dispatcher = import_to_end("numba.cuda.dispatcher")
    with dispatcher.global_compiler_lock:
        before = dispatcher.get_current_device
        dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=capability)
        try:
            yield
        finally:
            dispatcher.get_current_device = before


def _coordinate(b: Builder, _place: Value, index: int) -> Value:
    name, kind = f"llvm.nvvm.read.ptx.sreg.{_REGISTERS[index]}", ir.FunctionType(I32, ())
    return b.zext(b.call(cgutils.get_or_insert_function(b.module, kind, name), ()), I64)
