"""Words of memory by their addresses, in compiled code."""

from __future__ import annotations

from numba import types

from nc10d.kernels.simd import I64, Builder, Value, emits


@emits(types.int64(types.int64))
def load(b: Builder, address: Value) -> Value:
    """Return the int64 at an address, in memory that no other thread writes just now."""
    return b.load(b.inttoptr(address, I64.as_pointer()))


@emits(types.void(types.int64, types.int64))
def store(b: Builder, address: Value, value: Value) -> None:
    """Set the int64 at an address, in memory that no other thread reads just now."""
    b.store(value, b.inttoptr(address, I64.as_pointer()))
