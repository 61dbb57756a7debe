"""Programs that are known already: by their key, and, for plain arrays, by dtype and size.

The quick way serves what training loops do: one or two plain, contiguous, writable NumPy arrays.
It may skip every check because the same operation, dtype and sizes have passed them before; what
depends on the very arrays (type, layout, overlap) compiled code looks at again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nc10d.backend.cpu.algorithms.layout import Layout
from nc10d.backend.cpu.channel import Channel, Words
from nc10d.backend.cpu.linking import Linked, Scratch, link
from nc10d.backend.cpu.native import arrays as plain
from nc10d.backend.cpu.native import layout as at
from nc10d.backend.cpu.program import Kernel
from nc10d.backend.cpu.ready import Ready
from nc10d.backend.cpu.requests import Request
from nc10d.dtypes import DType
from nc10d.kernels.lazy import EntryPoint
from nc10d.kernels.reduce import both_address, divide_address, kernel_address, scale_address
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
NOTHING = np.empty(0, np.uint8)
"""What a barrier has for an array."""
_DTYPES = {dtype.label: dtype for dtype in DType}


class Known(Ready):
    """A program and the arrays that it is for, as words for compiled code at `address`."""

    __slots__ = ("_extra", "_keep", "_kind", "address")

    def __init__(
        self, channel: Channel, linked: Linked, kind: type[Op], extra: Any, x: Any, y: Any
    ) -> None:
        self._kind, self._extra = kind, extra
        self._keep = (linked, x.dtype)
        by_rows = kind is AllToAll
        words: Words = np.array(
            [
                channel.address,
                linked.address,
                linked.short,
                id(x.dtype),
                x.size,
                y.size,
                x.nbytes,
                y.nbytes,
                len(x) if by_rows else -1,
                len(y) if by_rows else -1,
                x is y,
            ],
            np.int64,
        )
        super().__init__(channel, words)
        self.address: int = plain.address(words)

    def entry(self) -> EntryPoint:
        """Return run_known."""
        return plain.run_known

    def ops(self, x: Any, y: Any) -> tuple[Op, ...]:
        """Return the operation on these arrays, for whoever has to tell of it."""
        return (_PARTS[self._kind][1](self._extra, x, y),)


class Plans:
    """The programs of one group."""

    def __init__(self, layout: Layout, channel: Channel) -> None:
        self._layout, self._channel = layout, channel
        self._scratch = Scratch()
        self._linked: dict[tuple[Any, ...], Linked] = {}
        self._known: dict[tuple[Any, ...], Known] = {}
        self.latest: dict[type[Any], dict[Any, Known]] = {kind: {} for kind in _PARTS}
        """By type of operation and what it has besides arrays: what was found for it last."""

    def find(self, op: Op) -> tuple[Known, Any, Any] | None:
        """Return what is known of an operation (then it is the latest), and its arrays."""
        parts = _parts(op)
        if parts is None:
            return None
        extra, x, y = parts
        found = self._known.get(_key(op, extra, x, y))
        if found is None:
            return None
        self.latest[type(op)][extra] = found
        return found, x, y

    def remember(self, op: Op, linked: Linked) -> None:
        """Let `find` know a program whose operation has passed all checks."""
        parts = _parts(op)
        if parts is None:
            return
        extra, x, y = parts
        if x.flags.carray and y.flags.carray:
            if len(self._known) >= LIMIT:
                self._known.clear()
                for by_extra in self.latest.values():
                    by_extra.clear()
            known = Known(self._channel, linked, type(op), extra, x, y)
            self._known[_key(op, extra, x, y)] = self.latest[type(op)][extra] = known

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


def _kernel_address(kernel: Kernel) -> int:
    dtype = _DTYPES[kernel.dtype]
    if kernel.kind == "DIVIDE":
        return divide_address(dtype)
    if kernel.kind == "SCALE":
        return scale_address(dtype)
    if kernel.kind.startswith("BOTH_"):
        return both_address(RedOp[kernel.kind.removeprefix("BOTH_")], dtype)
    return kernel_address(RedOp[kernel.kind], dtype)


def _exchanged(op: AllToAll) -> tuple[Any, Any, Any]:
    splits = op.in_splits is not None or op.out_splits is not None
    return None, None if splits else op.inp, op.out


_Parts = tuple[Callable[[Any], tuple[Any, Any, Any]], Callable[[Any, Any, Any], Op]]
_PARTS: dict[type[Any], _Parts] = {
    AllReduce: (lambda op: (op.op, op.x, op.x), lambda extra, x, y: AllReduce(x, extra)),
    Broadcast: (lambda op: (op.root, op.x, op.x), lambda extra, x, y: Broadcast(x, extra)),
    Reduce: (lambda op: ((op.root, op.op), op.x, op.x), lambda extra, x, y: Reduce(x, *extra)),
    AllGather: (lambda op: (None, op.inp, op.out), lambda extra, x, y: AllGather(y, x)),
    ReduceScatter: (lambda op: (op.op, op.out, op.inp), lambda e, x, y: ReduceScatter(x, y, e)),
    AllToAll: (_exchanged, lambda extra, x, y: AllToAll(y, x)),
    Barrier: (lambda op: (None, NOTHING, NOTHING), lambda extra, x, y: Barrier()),
}
"""From an operation to what it has besides arrays, and these in the order in which requests.py
numbers them; and back.
"""


def _parts(op: Op) -> tuple[Any, Any, Any] | None:
    """Return what _PARTS says, if the arrays are ndarrays."""
    both = _PARTS.get(type(op))
    if both is None:
        return None
    extra, x, y = both[0](op)
    return (extra, x, y) if type(x) is np.ndarray and type(y) is np.ndarray else None


def _key(op: Op, extra: Any, x: Any, y: Any) -> tuple[Any, ...]:
    if type(op) is AllToAll:  # cut along dimension 0
        return AllToAll, x.dtype, x.shape, y.shape
    return type(op), extra, x.dtype, x.size, y.size
