"""The engine's copy functions: vectors where the C library is slow, streaming past the cache.

Contract: as in `reduce`, void(dst, src, unused, nbytes), called by address; src and dst share no
byte, or are the same. Nothing needs alignment. `copier` chooses the function for a size.

From 2 KiB on, glibc before 2.40 copies by `rep movsb` if the CPU has that instruction. On AMD's Zen
3 and 4 such a copy takes ten times as long if src begins a cache line and dst does not (glibc bug
30994). Copies from a staging buffer to a large NumPy array are like that: the array begins 16 bytes
into a page. Zen 5 is not affected.

The C library also lets a copy that would fill the cache bypass it, but only if the copy comes in a
single piece; over staging buffers arrays come in many pieces.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import binding, ir
from numba import types

from nc10d.arrays.dtypes import DType
from nc10d.kernels.cache import address_of
from nc10d.kernels.loops import compile_kernel
from nc10d.kernels.simd import I8, I64, STORED, Builder, Value, emits, load, store
from nc10d.kernels.streaming import STREAM_BYTES, stream_copy_address

ZEN = ("znver3", "znver4")
"""AMD's Zen 3 and 4, by LLVM's names."""
MENDED = (2, 40)
"""The first glibc that does not use `rep movsb` on those CPUs."""
QUICK = 2048
"""Bytes from which on a vector copy replaces the C library's, which copies fewer bytes fast."""
_WORD = 64
_WORDS = 4
_STEP = _WORD * _WORDS

_made: dict[str, Any] = {}


def copier(each: int, in_all: int) -> int:
    """Return the function's address for copies of `each` bytes, `in_all` bytes to one array.

    0 stands for the C library's function. May block to compile.
    """
    if in_all >= STREAM_BYTES:
        return stream_copy_address()
    return quick_copy_address() if each >= QUICK else 0


def quick_copy_address() -> int:
    """Return a vector copy's address where the C library is slow, else 0. May compile."""
    return vector_copy_address() if needed() else 0


@functools.cache
def needed() -> bool:
    """Return whether the C library copies slowly on this machine."""
    return copies_slowly(cpu_name(), _libc())


@functools.cache  # Every group asks, and an error from a signal's handler amid LLVM may be fatal.
def cpu_name() -> str:
    """Return LLVM's name for this machine's CPU."""
    return str(binding.get_host_cpu_name())


def copies_slowly(cpu: str, libc: str) -> bool:
    """Return whether a C library ("glibc 2.36") copies slowly on a CPU (by LLVM's name)."""
    name, _, version = libc.partition(" ")
    if cpu not in ZEN or name != "glibc":
        return False
    return tuple(int(part) for part in version.split(".")[:2]) < MENDED


def _libc() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except ValueError:  # another library than glibc
        return ""


def vector_copy_address() -> int:
    """Return the address of dst = src, for any bytes, by vectors. May block to compile."""
    return address_of(_made, "vector_copy", _kernel)


def every_kernel() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the name of each kernel and the call that makes it: for warming up."""
    yield "vector_copy", vector_copy_address


def _kernel() -> Any:
    word, step = _moved(1), _moved(_WORDS)

    def vector_copy(dst, src, unused, nbytes):  # type: ignore[no-untyped-def]
        """dst[:] = src"""
        if nbytes < _STEP:
            library_copy(dst, src, nbytes)
            return
        # The first and the last words may overlap the loop's, which begin a cache line of dst.
        word(dst, src)
        for at in range(-dst & (_WORD - 1), nbytes - _STEP, _STEP):
            step(dst + at, src + at)
        step(dst + nbytes - _STEP, src + nbytes - _STEP)

    return compile_kernel(vector_copy, "vector_copy")


def _moved(times: int) -> Any:
    """Return the function that copies `times` words: loaded, then stored."""

    @emits(types.void(types.int64, types.int64))
    def move(b: Builder, to: Value, at: Value) -> None:
        places = [I64(_WORD * number) for number in range(times)]
        found = [load(b, b.add(at, place), STORED[DType.UINT8], _WORD) for place in places]
        for value, place in zip(found, places, strict=True):
            store(b, value, b.add(to, place))

    return move


@emits(types.void(types.int64, types.int64, types.int64))
def library_copy(b: Builder, dst: Value, src: Value, nbytes: Value) -> None:
    """dst[:nbytes] = src[:nbytes], by the C library's memmove."""
    pointer = I8.as_pointer()
    copy = b.module.declare_intrinsic("llvm.memmove", [pointer, pointer, I64])
    to, at = b.inttoptr(dst, pointer), b.inttoptr(src, pointer)
    b.call(copy, [to, at, nbytes, ir.Constant(ir.IntType(1), 0)])
