"""Kernels for NVIDIA GPUs: bodies as PTX, made without a GPU.

Contract: PTX ships with nc10d (`shipped_ptx`) for kernels that are the same in all programs; it
runs on every GPU from sm_70 on. PTX for reductions is made once a machine (`kept_ptx`), and kept
beside other compiled code. That needs numba-cuda with NVVM (the extra cu12); UnsupportedPlatform if
it is missing. No multiplication and addition is contracted, so floats get the CPU's bits.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.resources
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llvmlite
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from nc10d.base.run_to_end import import_to_end
from nc10d.errors import UnsupportedPlatform
from nc10d.kernels.cache_dir import KERNEL_SOURCES, code_folder, exclusive, replace
from nc10d.kernels.gpu.gpu_pack import Target
from nc10d.kernels.own.refusals import quoting
from nc10d.kernels.simd import I32, I64, Builder, Value
from nc10d.ops.own_reductions import Function, copied

GLOBAL = 1
"""The address space for a GPU's memory, in NVVM's numbers."""
Capability = tuple[int, int]
Bounds = tuple[int, int]
_REGISTERS = ("ctaid.x", "tid.x", "ntid.x")
_OPTIONS = {"opt": 3, "fma": 0}


@functools.cache
def shipped_ptx(name: str) -> str:
    """Return PTX with a kernel that ships with nc10d; tools/gen_ptx.py makes it."""
    return (importlib.resources.files(__package__) / "ptx" / f"{name}.ptx").read_text()


def kept_ptx(
    name: str, body: Callable[[Target], Any], signature: Any, capability: Capability, bounds: Bounds
) -> str:
    """Return PTX with a kernel, compiled from its body once a machine; the name says all of it.

    `bounds` are the threads of a block, and how many blocks a multiprocessor has at once.
    """
    path = _folder() / f"{name}-{capability[0]}{capability[1]}.ptx"
    with exclusive(path.with_suffix(".lock")):
        if not path.exists():
            replace(path, made_ptx(name, body, signature, capability, bounds).encode())
        return path.read_text()


def made_ptx(
    name: str, body: Callable[[Target], Any], signature: Any, capability: Capability, bounds: Bounds
) -> str:
    """Compile a kernel from its body, and return the PTX; see `kept_ptx`."""
    _import_compiler()
    # Numba's own numba.cuda is outdated; the package numba_cuda replaces it. Its compile_ptx has no
    # option against contraction.
    compiler = import_to_end("numba.cuda.compiler")
    function = body(_target())
    function.__name__ = function.__qualname__ = name
    with _compiling_for(capability):
        made = compiler.compile_cuda(
            function, signature.return_type, signature.args, cc=capability, nvvm_options=_OPTIONS
        )
        kernel = made.library.get_function(made.fndesc.llvm_func_name)
        compiler.kernel_fixup(kernel, False)
        import_to_end("numba.cuda.cudadrv.nvvm").set_launch_bounds(kernel, bounds)
        return str(made.library.get_asm_str(cc=capability))


def _import_compiler() -> None:
    """Import all of numba-cuda; UnsupportedPlatform where NumPy is too new for it."""
    try:
        import_to_end("numba.cuda.cudaimpl")
    except AttributeError as error:  # "module 'numpy' has no attribute 'row_stack'"
        if "numpy" not in str(error):
            raise
        version = _version("numba-cuda")
        message = f"numba-cuda {version} needs numpy < 2.5, got numpy {np.__version__}: {error}"
        raise UnsupportedPlatform(message) from None


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
