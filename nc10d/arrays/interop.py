"""Replace other libraries' host arrays in operations by NumPy views on the same memory.

The CPU backend is fastest with NumPy arrays. A view is made once for an operation, so all steps
see the same memory, even if an array's library describes other memory at the next look. Nothing is
copied. Arrays on other devices stay unchanged.

There are two kinds of views. An owning view keeps its array alive. An unowned view does not, and
can be cached by address; the caller must keep the array alive while the view is used. An adapter
registers a function that makes unowned views for an array type, and an owning view costs less if
there is an unowned one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from nc10d import ops
from nc10d.arrays import buffer
from nc10d.arrays.access import arrays_of
from nc10d.arrays.fields import Fields
from nc10d.ops.facts import facts_of

View = Callable[[Any], ops.Array]
UnownedView = Callable[[Any], ops.Array | None]
unowned_views: dict[type, UnownedView] = {}
_addresses: dict[type, Callable[[Any], int]] = {}
_owners: dict[type, Callable[[Any], Any]] = {}
_AS_THEY_ARE = (np.ndarray, int, type(None))
"""Argument types for which `lend` makes no view."""


def register_unowned_view(
    kind: type, unowned: UnownedView, address: Callable[[Any], int], owner: Callable[[Any], object]
) -> None:
    """Register unowned views of arrays whose type is exactly `kind`; the functions are fast.

    `unowned(x)` returns an ndarray in the memory of `x` that does not keep `x` alive, or None.
    `address(x)` returns the address of element 0, `owner(x)` an object that keeps the memory.
    """
    unowned_views[kind], _addresses[kind], _owners[kind] = unowned, address, owner
    unowned_views[tuple] = _unowned_each


def _unowned_each(xs: tuple[object, ...]) -> tuple[object, ...] | None:
    views = [x if type(x) is np.ndarray else unowned_view(x) for x in xs]
    return None if any(view is None for view in views) else tuple(views)


def address_finder(x: object) -> Callable[[Any], int]:
    """Return a function that finds where element 0 of arrays such as `x` lies now."""
    return _addresses.get(type(x), _address)


def _address(x: object) -> int:
    return buffer.as_buffer(x).address


class _Refused:
    """The stand-in for an argument that is no array: `as_buffer` raises the reason."""

    __slots__ = ("error",)

    def __init__(self, error: TypeError) -> None:
        self.error = error

    def reason(self) -> buffer.Buffer:
        raise self.error


buffer.register(_Refused, _Refused.reason, "cpu")


class _Owned:
    """An unowned view's memory, and an object that keeps that memory."""

    __slots__ = ("__array_interface__", "_owner")

    def __init__(self, view: Any, owner: object) -> None:
        found = view.__array_interface__
        # Untyped bytes, as in buffer._Memory: not all dtypes have a NumPy name.
        del found["descr"]
        found["typestr"] = f"|V{view.itemsize}"
        self.__array_interface__, self._owner = found, owner


def numpy_view(x: ops.Array) -> ops.Array:
    """Return an ndarray that keeps the memory of `x` alive; `x` itself on other devices."""
    # An ndarray is returned unchanged. If `x` is no array, the argument checks will say so.
    if isinstance(x, np.ndarray):
        return x
    if isinstance(x, Fields):
        return x.map(numpy_view)
    cached = unowned_view(x)
    if cached is not None:
        return np.asarray(_Owned(cached, (x, _owners[type(x)](x)))).view(cached.dtype)
    try:
        memory = buffer.as_buffer(x)
    except TypeError as error:
        return _Refused(error)
    return memory.as_numpy() if memory.device == "cpu" else x


def unowned_view(x: ops.Array) -> ops.Array | None:
    """Return an unowned view of `x`, or None if there is none."""
    make = unowned_views.get(type(x))
    return None if make is None else make(x)


def lend(x: object, y: object) -> tuple[Any, Any] | None:
    """Return a prepared call's arguments with unowned views of other libraries' arrays.

    None if an array has no such view.

    Each is an array or a tuple of arrays; y may also be x itself, None, or a tag.
    """
    make = unowned_views.get(type(x))  # `unowned_view` without its frame
    a = make(x) if make is not None else x if type(x) is np.ndarray else None
    b = a if y is x else y if type(y) in _AS_THEY_ARE else unowned_view(y)
    return None if a is None or (b is None and y is not None) else (a, b)


def owners(x: object, y: object) -> list[Any]:
    """Return what keeps the memory of lent arguments, as `lend` takes them."""
    given = x if type(x) is tuple else (x,)
    if y is not x and y is not None and type(y) is not int:
        given += y if type(y) is tuple else (y,)
    return [_owners[kind](each) if (kind := type(each)) in _owners else each for each in given]


def use_unowned_views(op: ops.Op) -> tuple[ops.Array, ...] | None:
    """Replace the arrays of `op` by unowned views; return the replaced arrays.

    Return None, and leave `op` unchanged, if an array has no such view. The caller must keep the
    arrays alive until the operation has ended.
    """
    names = facts_of(op).arrays
    arrays = tuple(getattr(op, name) for name in names)
    found = [unowned_view(x) for x in arrays]
    if not found or any(x is None for x in found):
        return None
    for name, x in zip(names, found, strict=True):
        setattr(op, name, x)
    return arrays


def map_to_numpy(op: ops.Op) -> ops.Op:
    """Return `op` on the NumPy views of its arrays; `op` itself if all of them are ndarrays."""
    plain = all(isinstance(x, np.ndarray) for x in arrays_of(op))
    return op if plain else map_arrays(op, numpy_view)


def map_arrays(op: ops.Op, replace: View) -> ops.Op:
    """Return `op` with each of its arrays x replaced by `replace(x)`."""
    facts = facts_of(op)
    return facts.replace(op, **{f: _map_value(replace, getattr(op, f)) for f in facts.arrays})


def _map_value(replace: View, xs: ops.Arrays | None) -> object:
    if xs is None:  # Gather and Scatter: only the root has the list
        return None
    return [replace(x) for x in xs] if isinstance(xs, (list, tuple)) else replace(xs)
