"""Other libraries' host arrays as ndarrays in the same memory.

Contract: the ndarray lies in the exporter's memory, or a TypeError says why not. An exporter may
use DLPack, the buffer protocol or NumPy's array interface. The exporter's memory is described
twice, and both descriptions must be equal: an exporter of copies would lose results. NumPy
allocates new memory where an exporter gives a null pointer; such arrays are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

View = np.ndarray[Any, Any]


def host_view(x: object) -> View:
    """Return an ndarray in a host array's memory; TypeError if there is no such memory."""
    export = _export_of(x)
    if export is None:
        raise TypeError(f"expected an array, got {_type_hint(x)}")
    try:
        view, again = export(x), export(x)
    except Exception as error:  # any type, by an exporter
        raise TypeError(f"{_type_text(x)} can't be shared ({error}): {_advice(x)}") from error
    if view.size:
        if view.flags.owndata:  # by NumPy, for a null pointer
            raise TypeError(f"{_type_text(x)} has no memory: {_advice(x)}")
        if _description(view) != _description(again):
            raise TypeError(f"{_type_text(x)} gives a copy of its values, not its memory: {_COPY}")
    return view


def _description(x: View) -> tuple[object, ...]:
    return x.ctypes.data, x.shape, x.strides, x.dtype, x.flags.writeable


def _export_of(x: Any) -> Callable[[Any], View] | None:
    if isinstance(x, np.generic):  # a scalar exports a copy
        return None
    if hasattr(x, "__dlpack__"):
        return _by_dlpack
    try:
        memoryview(x).release()
    except TypeError:
        known = hasattr(type(x), _INTERFACE) or _INTERFACE in getattr(x, "__dict__", ())
        return _by_interface if known else None  # hasattr(x, ...) would be another look
    except (BufferError, ValueError):
        pass  # `export` raises it again, and `host_view` explains it
    return lambda x: np.asarray(memoryview(x))


def _by_dlpack(x: Any) -> View:
    lazy = getattr(x, "is_neg", None)
    if callable(lazy) and lazy():  # torch exports such a tensor without the sign
        raise TypeError("it is a lazy negative, its memory is not: pass x.resolve_neg()")
    return np.from_dlpack(x)


def _by_interface(x: Any) -> View:
    found = dict(x.__array_interface__)
    if found.get("mask") is not None:
        raise TypeError("its mask would be lost: pass the values, and the mask by itself")
    data = found.get("data")
    if data is None or isinstance(data, tuple):
        return np.asarray(_Described(x, found))
    # np.asarray would not compare the shape with the buffer's length.
    place = data, found.get("offset", 0), found.get("strides")
    return np.ndarray(found["shape"], found["typestr"], *place)


class _Described:
    """An array's description, read once; NumPy keeps it, and so the array, as the view's base."""

    __slots__ = ("__array_interface__", "_array")

    def __init__(self, x: object, found: dict[str, Any]) -> None:
        self.__array_interface__, self._array = found, x


_INTERFACE = "__array_interface__"
_COPY = "pass np.array(x), and copy a result back"


def _type_hint(x: object) -> str:
    kind = type(x).__name__
    if isinstance(x, np.generic):
        return f"the NumPy scalar {x!r}: pass np.array(x), a 0-d array, so that it can be written"
    if isinstance(x, (bool, int, float, complex)):
        return f"the number {x!r}: pass np.array([{x!r}])"
    if isinstance(x, (list, tuple)):
        return f"a {kind}: pass np.array(...) of it"
    if hasattr(x, "__array__"):  # columns and frames of pandas and polars, for example
        library = type(x).__module__.partition(".")[0]
        return f"{library}'s {kind}, which shows no memory: {_COPY}"
    return f"{kind}: pass a NumPy array, or one with a buffer, __cuda_array_interface__, __dlpack__"


def _type_text(x: object) -> str:
    dtype = getattr(x, "dtype", None)
    return f"a {type(x).__name__}" + ("" if dtype is None else f" of {dtype}")


def _advice(x: Any) -> str:
    """Return advice for an array that the library does not export."""
    if getattr(x, "requires_grad", False):
        return "pass x.detach(), the same memory without its history"
    label = str(getattr(x, "dtype", "")).rpartition(".")[2]
    if "float" in label and not hasattr(np, label) and hasattr(x, "view"):
        bits = f"x.view(torch.uint{8 * x.dtype.itemsize}).numpy().view(ml_dtypes.{label})"
        return f"import nc10d.torch, or pass {bits}, the same memory in a type that NumPy knows"
    return "pass a plain array in host memory"
