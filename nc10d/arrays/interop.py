"""Operations on other libraries' host arrays, as the same operations on NumPy's views of them.

A backend for the CPU is quick with NumPy arrays. An adapter registers, for its own type of array,
how NumPy sees the same memory; groups ask here for operations on those. Nothing is copied. What
nobody has registered, and what has no such view (another device, a layout without strides), stays
as it is.

There are two kinds of views. One keeps its array alive. The other is lent: it does not, so it can
be found by address and used again and again; whoever borrows it holds the array meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from nc10d.ops import (
    AllGather,
    AllReduce,
    AllToAll,
    Array,
    Arrays,
    Broadcast,
    Gather,
    Op,
    Recv,
    Reduce,
    ReduceScatter,
    Scatter,
    Send,
)

View = Callable[[Any], Array]
Lend = Callable[[Any], Array | None]
views: dict[type, View] = {}
lenders: dict[type, Lend] = {}


def register_view(kind: type, view: View, lender: Lend) -> None:
    """See arrays of exactly the type `kind` as NumPy's.

    `view(x)` returns an ndarray that is the memory of `x` and keeps it alive, or `x` itself where
    there is none. `lender(x)` returns quickly one that does not keep it alive, or None.
    """
    views[kind], lenders[kind] = view, lender


def view_of(x: Array) -> Array:
    """Return the ndarray that is the memory of `x`, if its type is registered; else `x`."""
    view = views.get(type(x))
    return x if view is None else view(x)


def lend(x: Array) -> Array | None:
    """Return a lent view of `x`; None where there is none."""
    lender = lenders.get(type(x))
    return None if lender is None else lender(x)


def borrow(op: Op) -> tuple[Array, ...] | None:
    """Put lent views in the place of the arrays of `op`, and return those.

    None, and all is as it was, where one of them has no such view. Whoever calls holds the arrays
    until the operation is over.
    """
    names = _ARRAYS.get(type(op), ())
    arrays = tuple(getattr(op, name) for name in names)
    lent = [lend(x) for x in arrays]
    if not lent or any(x is None for x in lent):
        return None
    for name, x in zip(names, lent, strict=True):
        setattr(op, name, x)
    return arrays


_ARRAYS: dict[type[Any], tuple[str, ...]] = {
    **dict.fromkeys((AllReduce, Reduce, Broadcast, Send), ("x",)),
    **dict.fromkeys((AllGather, ReduceScatter, AllToAll), ("out", "inp")),
}
"""Where the operations that can be quick have their one array, or their two."""


def on_views(op: Op) -> Op:
    """Return `op` on the views of its arrays; an operation without arrays is returned itself."""
    return on_each(op, view_of)


def on_each(op: Op, see: View) -> Op:
    """Return `op` on what `see` makes of each of its arrays."""
    made = _MADE.get(type(op))
    return op if made is None else made(op, see, partial(_each, see))


def _each(see: View, xs: Arrays | None) -> Any:
    if xs is None:  # of a Gather or Scatter, where only the root has it
        return None
    return [see(x) for x in xs] if isinstance(xs, (list, tuple)) else see(xs)


_MADE: dict[type[Any], Callable[[Any, View, Callable[[Arrays], Arrays]], Op]] = {
    AllReduce: lambda op, see, each: AllReduce(see(op.x), op.op),
    Reduce: lambda op, see, each: Reduce(see(op.x), op.root, op.op),
    Broadcast: lambda op, see, each: Broadcast(see(op.x), op.root),
    AllGather: lambda op, see, each: AllGather(each(op.out), see(op.inp)),
    ReduceScatter: lambda op, see, each: ReduceScatter(see(op.out), each(op.inp), op.op),
    AllToAll: lambda op, see, each: AllToAll(
        each(op.out), each(op.inp), op.out_splits, op.in_splits
    ),
    Gather: lambda op, see, each: Gather(each(op.out), see(op.inp), op.root, op.even),
    Scatter: lambda op, see, each: Scatter(see(op.out), each(op.inp), op.root, op.even),
    Send: lambda op, see, each: Send(see(op.x), op.peer, op.tag),
    Recv: lambda op, see, each: Recv(see(op.x), op.peer, op.tag),
}
