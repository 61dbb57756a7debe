"""Raw memory, atomics and system calls for Numba code: addresses in, integers out.

`load` and `store` are for memory that a single thread uses, or that an acquiring load or a lock has
made visible. A load of a word that other threads write acquires, a store that publishes releases,
and read-modify-writes are sequentially consistent. On x86-64 an acquiring load does not pass an
earlier read-modify-write: comments call it a full fence, and each "set my word, then look at yours"
relies on it. C functions are called by name, which the loader resolves, so that compiled code can
be kept on disk.
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import NativeValue, register_model, unbox

from nc10d.backend.cpu.native import offsets as at
from nc10d.kernels.loops import call_kernel as call_kernel
from nc10d.kernels.simd import I8, I32, I64, Builder, Value, emits
from nc10d.kernels.words import load as load
from nc10d.kernels.words import store as store

X86 = platform.machine() in ("x86_64", "AMD64")
SYS_FUTEX = 202 if X86 else 98
SYS_WRITE = 1 if X86 else 64
SYS_READ_PROCESS = 310 if X86 else 270
SYS_WRITE_PROCESS = 311 if X86 else 271
SYS_THREAD = 186 if X86 else 178
FUTEX_WAIT, FUTEX_WAKE = 0, 1


def _read_acquiring(kind: Any) -> Any:
    @emits(kind(types.int64))
    def read(b: Builder, address: Value) -> Value:
        pointer = b.inttoptr(address, ir.IntType(kind.bitwidth).as_pointer())
        return b.load_atomic(pointer, "acquire", kind.bitwidth // 8)

    return read


load_acquire = _read_acquiring(types.int64)
"""Return the int64 at an address; the writer's earlier stores are visible afterwards."""
load_acquire_32 = _read_acquiring(types.int32)
"""Return the int32 at an address (a futex word), acquiring."""


@emits(types.void(types.int64, types.int64))
def store_release(b: Builder, address: Value, value: Value) -> None:
    """Set the int64 at an address; this thread's earlier stores become visible, too."""
    b.store_atomic(value, b.inttoptr(address, I64.as_pointer()), "release", 8)


def _read_modify_write(operation: str, kind: Any) -> Any:
    @emits(kind(types.int64, kind))
    def change(b: Builder, address: Value, value: Value) -> Value:
        pointer = b.inttoptr(address, ir.IntType(kind.bitwidth).as_pointer())
        return b.atomic_rmw(operation, pointer, value, "seq_cst")

    return change


exchange = _read_modify_write("xchg", types.int64)
add = _read_modify_write("add", types.int64)
add_32 = _read_modify_write("add", types.int32)
set_bits = _read_modify_write("or", types.int64)
keep_bits = _read_modify_write("and", types.int64)


@emits(types.int64(types.int64, types.int64, types.int64))
def swap_if(b: Builder, address: Value, expected: Value, value: Value) -> Value:
    """Set the int64 at `address` to `value` if it is `expected`; return the old value."""
    pointer = b.inttoptr(address, I64.as_pointer())
    return b.extract_value(b.cmpxchg(pointer, expected, value, "seq_cst", "acquire"), 0)


@emits(types.void())
def pause(b: Builder) -> None:
    """Hint to the core that this is a spin loop."""
    name = "llvm.x86.sse2.pause" if X86 else "llvm.aarch64.isb"
    operands = [] if X86 else [I32(15)]
    kind = ir.FunctionType(ir.VoidType(), [operand.type for operand in operands])
    b.call(cgutils.get_or_insert_function(b.module, kind, name), operands)


@emits(types.void(types.int64, types.int64, types.int64))
def move(b: Builder, dst: Value, src: Value, nbytes: Value) -> None:
    """dst[:nbytes] = src[:nbytes], by the C library's memcpy."""
    pointer = I8.as_pointer()
    cgutils.raw_memcpy(b, b.inttoptr(dst, pointer), b.inttoptr(src, pointer), nbytes, 1)


@emits(types.int64(types.int64, types.int64))
def call_address(b: Builder, function: Value, channel: Value) -> Value:
    """Call the C function at address `function` with one integer; return the answer."""
    return b.call(b.inttoptr(function, ir.FunctionType(I64, [I64]).as_pointer()), [channel])


@emits(types.int64())
def scratch(b: Builder) -> Value:
    """Return the address of 16 bytes on the stack."""
    return b.ptrtoint(cgutils.alloca_once(b, ir.ArrayType(I64, 2), zfill=True), I64)


@emits(types.int64())
def block_on_stack(b: Builder) -> Value:
    """Return the address of FOLD_BLOCK bytes on the stack, that begin a cache line."""
    with b.goto_entry_block():  # alloca_once would write zeros at each call
        block = b.alloca(ir.ArrayType(I8, at.FOLD_BLOCK))
    block.align = 64
    return b.ptrtoint(block, I64)


_L, _I = types.int64, types.int32
_syscall = types.ExternalFunction("syscall", _L(_L, _L, _L, _L, _L, _L, _L))
yield_core = types.ExternalFunction("sched_yield", _I())
this_thread = types.ExternalFunction("pthread_self", _L())  # equals threading.get_ident()
_clock_gettime = types.ExternalFunction("clock_gettime", _I(_I, _L))


@njit(nogil=True)
def nc10d_now() -> int:
    """Return the monotonic clock in ns (the clock of time.monotonic_ns())."""
    spec = scratch()
    _clock_gettime(np.int32(1), spec)
    return load(spec) * 1000000000 + load(spec + 8)


@njit(nogil=True)
def nc10d_futex_wait(address: int, expected: int, timeout_ns: int) -> None:
    """Sleep until woken, unless the word has changed already; at most `timeout_ns`."""
    spec = scratch()
    store(spec, timeout_ns // 1000000000)
    store(spec + 8, timeout_ns % 1000000000)
    _syscall(SYS_FUTEX, address, FUTEX_WAIT, np.int64(expected), spec, 0, 0)


@njit(nogil=True)
def nc10d_futex_wake(address: int) -> None:
    """Wake every thread that sleeps on the word."""
    _syscall(SYS_FUTEX, address, FUTEX_WAKE, np.int64(0x7FFFFFFF), 0, 0, 0)


@njit(nogil=True)
def nc10d_write_event(fd: int) -> None:
    """Add one to an eventfd."""
    increment = scratch()
    store(increment, 1)
    _syscall(SYS_WRITE, fd, increment, np.int64(8), 0, 0, 0)


@njit(nogil=True)
def nc10d_read_process(pid: int, dst: int, src: int, nbytes: int) -> int:
    """Copy from another process's memory: 0, or -1 if the kernel refuses."""
    here, there = scratch(), scratch()
    while nbytes > 0:
        store(here, dst)
        store(here + 8, nbytes)
        store(there, src)
        store(there + 8, nbytes)
        got = _syscall(SYS_READ_PROCESS, pid, here, np.int64(1), there, 1, 0)
        if got <= 0:
            return -1
        dst += got
        src += got
        nbytes -= got
    return 0


@njit(nogil=True)
def nc10d_write_process(pid: int, src: int, nbytes: int, there: int, writer: int) -> int:
    """Copy into another process's memory, to the place in an iovec; return the bytes copied.

    0 if the kernel refuses. The process can empty the iovec, and sees at `writer` which thread may
    have read it before.
    """
    here = scratch()
    store(here, src)
    store(here + 8, nbytes)
    exchange(writer, _syscall(SYS_THREAD, 0, 0, np.int64(0), 0, 0, 0))
    went = _syscall(SYS_WRITE_PROCESS, pid, here, np.int64(1), there, 1, 0)
    store_release(writer, 0)
    return max(0, went)


class ObjectType(types.Type):
    """Any Python object; native code gets the address, and answers for what it reads there."""

    def __init__(self) -> None:
        super().__init__(name="nc10d_object")


any_object = ObjectType()


@register_model(ObjectType)
class _ObjectModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, I64)


@unbox(ObjectType)
def _unbox_object(kind: object, value: Any, context: Any) -> object:
    return NativeValue(context.builder.ptrtoint(value, I64))


@emits(types.int64(any_object))
def as_int(_builder: Builder, value: Value) -> Value:
    """Return the address of an `any_object`."""
    return value
