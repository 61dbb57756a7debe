"""Programs that are known already: by their key, and, for plain arrays, by dtype and size.

The quick way serves what training loops do: one or two plain, contiguous, writable NumPy arrays.
It may skip every check because the same operation, dtype and sizes have passed them before; what
depends on the very arrays (layout, overlap) is looked at again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nc10d.backend.cpu.algorithms.layout import Layout
from nc10d.backend.cpu.linking import Linked, Scratch, link
from nc10d.backend.cpu.native import layout as at
from nc10d.backend.cpu.program import Kernel
from nc10d.backend.cpu.requests import Request
from nc10d.dtypes import DType
from nc10d.kernels.reduce import divide_address, kernel_address, scale_address
from nc10d.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Op,
    RedOp,
    Reduce,
    ReduceScatter,
)

LIMIT = 4096
Quick = tuple[Linked, Any, Any]
_NOTHING = np.zeros(1, np.uint8)
_DTYPES = {dtype.label: dtype for dtype in DType}


class Plans:
    """The programs of one group."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._scratch = Scratch()
        self._linked: dict[tuple[Any, ...], Linked] = {}
        self._quick: dict[Any, dict[Any, Linked]] = {}

    def quick(self, op: Op) -> Quick | None:
        """Return program and arrays if all of it is known and plain, else None."""
        find = _FINDERS.get(type(op))
        return None if find is None else find(self._quick, op)

    def linked(self, request: Request) -> Linked:
        """Return the program of a request, built and linked if it is new; may compile kernels."""
        found = self._linked.get(request.key)
        if found is None:
            if len(self._linked) >= LIMIT:
                self._linked.clear()
            program = request.build()
            mates = self._layout.near.size
            found = link(program, mates, at.C_TABLES, _kernel_address, self._scratch.room)
            self._linked[request.key] = found
        return found

    def remember(self, op: Op, linked: Linked) -> None:
        """Let `quick` know a program whose operation has passed all checks."""
        name = _KEYS.get(type(op))
        key = None if name is None else name(op)
        if key is not None:
            by_dtype = self._quick.setdefault(key[0], {})
            if len(by_dtype) >= LIMIT:
                by_dtype.clear()
            by_dtype[key[1:]] = linked


def _kernel_address(kernel: Kernel) -> int:
    dtype = _DTYPES[kernel.dtype]
    if kernel.kind == "DIVIDE":
        return divide_address(dtype)
    if kernel.kind == "SCALE":
        return scale_address(dtype)
    return kernel_address(RedOp[kernel.kind], dtype)


def _one_key(op: Any) -> tuple[Any, ...] | None:
    x = op.x
    if type(x) is not np.ndarray or not x.flags.carray:
        return None
    extra = op.op if type(op) is AllReduce else (type(op), op.root, getattr(op, "op", None))
    return (extra, x.dtype, x.size)


def _two_key(op: Any) -> tuple[Any, ...] | None:
    out, inp = op.out, op.inp
    if type(out) is not np.ndarray or type(inp) is not np.ndarray:
        return None
    if not out.flags.carray or not inp.flags.carray:
        return None
    extra = AllGather if type(op) is AllGather else (ReduceScatter, op.op)
    return (extra, inp.dtype, inp.size, out.size)


def _exchange_key(op: AllToAll) -> tuple[Any, ...] | None:
    out, inp = op.out, op.inp
    if type(out) is not np.ndarray or type(inp) is not np.ndarray:
        return None
    if op.in_splits is not None or op.out_splits is not None:
        return None
    if not out.flags.carray or not inp.flags.carray:
        return None
    return (AllToAll, inp.dtype, inp.shape, out.shape)


_KEYS: dict[type[Any], Callable[[Any], tuple[Any, ...] | None]] = {
    AllReduce: _one_key,
    Broadcast: _one_key,
    Reduce: _one_key,
    AllGather: _two_key,
    ReduceScatter: _two_key,
    AllToAll: _exchange_key,
    Barrier: lambda _: (Barrier,),
}


def _find_all_reduce(known: dict[Any, dict[Any, Linked]], op: AllReduce) -> Quick | None:
    x = op.x
    if type(x) is not np.ndarray:
        return None
    sizes = known.get(op.op)
    if sizes is None:
        return None
    linked = sizes.get((x.dtype, x.size))
    return (linked, x, x) if linked is not None and x.flags.carray else None


def _find_one(known: dict[Any, dict[Any, Linked]], op: Any) -> Quick | None:
    key = _one_key(op)
    if key is None:
        return None
    linked = known.get(key[0], _NONE).get(key[1:])
    return None if linked is None else (linked, op.x, op.x)


def _find_two(known: dict[Any, dict[Any, Linked]], op: Any) -> Quick | None:
    key = _exchange_key(op) if type(op) is AllToAll else _two_key(op)
    if key is None:
        return None
    linked = known.get(key[0], _NONE).get(key[1:])
    if linked is None or np.may_share_memory(op.out, op.inp) or op.out.dtype != op.inp.dtype:
        return None
    # In the order in which requests.py numbers them.
    return (linked, op.out, op.inp) if type(op) is ReduceScatter else (linked, op.inp, op.out)


def _find_barrier(known: dict[Any, dict[Any, Linked]], op: Barrier) -> Quick | None:
    del op
    linked = known.get(Barrier, _NONE).get(())
    return None if linked is None else (linked, _NOTHING, _NOTHING)


_NONE: dict[Any, Linked] = {}
_FINDERS: dict[type[Any], Callable[[Any, Any], Quick | None]] = {
    AllReduce: _find_all_reduce,
    Broadcast: _find_one,
    Reduce: _find_one,
    AllGather: _find_two,
    ReduceScatter: _find_two,
    AllToAll: _find_two,
    Barrier: _find_barrier,
}
