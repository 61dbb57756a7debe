"""Copies past the cache: for more bytes than a cache holds, where stores need not read first.

Contract: as in `pack`, void(dst, src, arg, nbytes); src and dst share no byte, or are the same.
When a kernel returns, other threads see its stores. Streaming stores go to aligned 32-byte words;
bytes before and behind them, and a dst that is not aligned to its elements, are stored as usual.

An ordinary store brings the line into the cache before the change: a third of a copy's traffic.
That pays only if a thread reads the line soon.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from llvmlite import ir
from numba import types

from nc10d.arrays.dtypes import DType
from nc10d.kernels.cache import address_of
from nc10d.kernels.loops import compile_kernel
from nc10d.kernels.simd import DOUBLE, STORED, Builder, Value, emits, load, spread, store, vector

_LAST_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")


def _stream_bytes(least: int = 8 << 20) -> int:
    """Return a quarter of the last cache in bytes, if the system shows it; at least `least`."""
    try:
        text = _LAST_CACHE.read_text().strip()
    except OSError:
        return least
    return max(least, int(text[:-1]) * 1024 // 4) if text.endswith("K") else least


STREAM_BYTES = _stream_bytes()
"""Bytes from which on a pack streams: with its source, more than a core's part of a cache."""
SCALED = (DType.FLOAT32, DType.FLOAT64)
_WORD = 32
_WORDS = 4

_kernels: dict[str, Any] = {}


def stream_copy_address() -> int:
    """Return the address of dst = src, for any bytes; arg is not used. May block to compile."""
    return _once("stream_bytes", DType.UINT8, None)


def stream_scale_address(dtype: DType) -> int:
    """Return the address of dst = src * factor, for a type in SCALED; `arg` is a float64's address.

    The factor is rounded to the type first. May block to compile.
    """
    return _once(f"stream_scale_{dtype.label}", dtype, _times)


def stream_divide_address(dtype: DType) -> int:
    """Return the address of dst = src / arg, for a type in SCALED; `arg` is an int.

    May block to compile.
    """
    return _once(f"stream_divide_{dtype.label}", dtype, _over)


def every_kernel() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the name of each kernel and the call that makes it: for warming up."""
    yield "stream_bytes", stream_copy_address
    for dtype in SCALED:
        yield f"stream_scale_{dtype.label}", functools.partial(stream_scale_address, dtype)
        yield f"stream_divide_{dtype.label}", functools.partial(stream_divide_address, dtype)


def _times(b: Builder, x: Value, arg: Value) -> Value:
    factor = b.load(b.inttoptr(arg, DOUBLE.as_pointer()), align=8)
    if x.type.element != DOUBLE:
        factor = b.fptrunc(factor, x.type.element)
    return b.fmul(x, spread(b, factor, x.type.count))


def _over(b: Builder, x: Value, arg: Value) -> Value:
    return b.fdiv(x, spread(b, b.sitofp(arg, x.type.element), x.type.count))


def _once(name: str, dtype: DType, change: Callable[..., Value] | None) -> int:
    return address_of(_kernels, name, lambda: _kernel(name, dtype, change))


def _kernel(name: str, dtype: DType, change: Callable[..., Value] | None) -> Any:
    single = dtype.itemsize
    word, element = _step(dtype, _WORD // single, change, True), _step(dtype, 1, change, False)

    def kernel(dst, src, arg, nbytes):  # type: ignore[no-untyped-def]
        """dst[:] = src, src * arg or src / arg"""
        head = min(nbytes, -dst & (_WORD - 1)) if dst & (single - 1) == 0 else nbytes
        end = head + ((nbytes - head) & -(_WORD * _WORDS))
        for at in range(0, head, single):
            element(dst + at, src + at, arg)
        for at in range(head, end, _WORD * _WORDS):
            for part in range(0, _WORD * _WORDS, _WORD):
                word(dst + at + part, src + at + part, arg)
        _publish()
        for at in range(end, nbytes, single):
            element(dst + at, src + at, arg)

    return compile_kernel(kernel, name)


def _step(dtype: DType, lanes: int, change: Callable[..., Value] | None, past: bool) -> Any:
    """Return the function that moves `lanes` elements, past the cache if `past`."""

    @emits(types.void(types.int64, types.int64, types.int64))
    def step(b: Builder, to: Value, at: Value, arg: Value) -> None:
        x = load(b, at, STORED[dtype], lanes)
        value = x if change is None else change(b, x, arg)
        if past:
            place = b.inttoptr(to, vector(STORED[dtype], lanes).as_pointer())
            one = b.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
            b.store(value, place, align=_WORD).set_metadata("nontemporal", one)
        else:
            store(b, value, to)

    return step


@emits(types.void())
def _publish(b: Builder) -> None:
    """Let other threads see all earlier stores before any later store."""
    b.fence("seq_cst")
