"""AsyncCollectiveArray: an array that is still being received, and waits when it is first used.

Contract: each has a Work; the fields of a call share one. Shape and dtype are known at once. Every
use of elements waits: operators, indexing, NumPy's and torch's functions, DLPack,
`__cuda_array_interface__`, printing. The results are plain arrays; so are copies, pickles, and
arrays received inside objects. On the CPU waiting blocks; on a GPU it orders streams, as
`Work.wait` does. Nobody waits for an array that is dropped unused, since peers may first need other
calls of this rank. The memory lives until the collective has ended; the next functional call warns
if that has failed.
"""

from __future__ import annotations

import operator
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from nc10d.arrays import buffer
from nc10d.codec import register_type
from nc10d.ops import Array
from nc10d.work import Work


class AsyncCollectiveArray:
    """The result of a functional collective: `array`, complete once `work` has ended."""

    def __init__(self, array: Array, work: Work) -> None:
        _release_dropped()
        self._array = array
        self._work: Work | None = work
        # A finalizer runs at any time, on any thread: it takes no lock and calls nothing.
        self._finalizer = weakref.finalize(self, _dropped.append, (work, array))
        self._finalizer.atexit = False  # groups are closed then

    def wait(self) -> Array:
        """Block until the array is complete and return it, plain; raise the collective's error."""
        if self._work is not None:
            self._finalizer.detach()
            self._work.wait()
            self._work = None
        return self._array

    @property
    def unfinished(self) -> Array:
        """The plain array, whose elements may still be written."""
        return self._array

    @property
    def completed(self) -> bool:
        """Whether the array is complete; never blocks."""
        return self._work is None or self._work.is_completed()

    @property
    def shape(self) -> Any:
        """The array's shape, known at once."""
        return self._array.shape

    @property
    def dtype(self) -> Any:
        """The array's element type, known at once."""
        return self._array.dtype

    def __getattr__(self, name: str) -> Any:
        # Also for attributes that only some arrays have: __cuda_array_interface__ and others.
        private = name.startswith("_") and not name.startswith("__")
        if private or (name in _DESCRIPTIONS and _is_lossy(self.dtype)):
            raise AttributeError(name)
        value = getattr(self._array, name)
        return value if name in _METADATA else getattr(self.wait(), name)

    def __array__(self, dtype: object = None, copy: bool | None = None) -> Any:
        return self.wait().__array__(dtype) if dtype is not None else self.wait().__array__()

    def __array_ufunc__(
        self, ufunc: object, method: str, *inputs: object, **options: object
    ) -> Any:
        return getattr(ufunc, method)(*unwrapped(inputs), **unwrapped(options))

    def __array_function__(self, function: Any, types: object, args: object, kwargs: object) -> Any:
        return function(*unwrapped(args), **unwrapped(kwargs))

    @classmethod
    def __torch_function__(
        cls, function: Any, types: object, args: object = (), kwargs: object = None
    ) -> Any:
        return function(*unwrapped(args), **unwrapped(kwargs or {}))

    def __dlpack__(self, **options: object) -> Any:
        return self.wait().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()

    def __setitem__(self, key: object, value: object) -> None:
        self.wait()[unwrapped(key)] = unwrapped(value)

    def __repr__(self) -> str:
        return f"AsyncCollectiveArray({self.wait()!r})"

    def __format__(self, how: str) -> str:
        return format(self.wait(), how)

    def __reduce_ex__(self, protocol: object) -> Any:
        # Copies and pickles are plain arrays.
        return self.wait().__reduce_ex__(protocol)


_DESCRIPTIONS = frozenset({"__array_struct__", "__array_interface__"})
_METADATA = frozenset({"ndim", "size", "itemsize", "nbytes", "device", "requires_grad"})


def _is_lossy(dtype: Any) -> bool:
    """Return whether NumPy, which prefers `_DESCRIPTIONS` to `__array__`, would lose a part."""
    return isinstance(dtype, np.dtype) and dtype.isbuiltin != 1


def unwrapped(x: Any) -> Any:
    """Return `x` with plain arrays for AsyncCollectiveArrays, in lists, tuples and dicts too."""
    if isinstance(x, AsyncCollectiveArray):
        return x.wait()
    if type(x) in (list, tuple):
        return type(x)(unwrapped(item) for item in x)
    if type(x) is dict:
        return {key: unwrapped(value) for key, value in x.items()}
    return x


_dropped: deque[tuple[Work, Array]] = deque()
"""Results that were dropped unused, with the memory that their collectives write to."""


def _release_dropped() -> None:
    """Forget dropped results whose collectives have ended; warn of those that failed."""
    for _ in range(len(_dropped)):
        try:
            work, array = _dropped.popleft()
        except IndexError:  # another thread was here
            return
        if not work.is_completed():
            _dropped.append((work, array))
        elif (error := work.exception()) is not None:
            message = (
                f"the result of a functional collective was dropped unused; it failed: {error}"
            )
            warnings.warn(message, RuntimeWarning, stacklevel=2)


def _forward(name: str, apply: Callable[..., object]) -> None:
    def method(self: AsyncCollectiveArray, *others: object) -> object:
        return apply(self.wait(), *unwrapped(others))

    method.__name__ = method.__qualname__ = name
    setattr(AsyncCollectiveArray, name, method)


# Python looks operators up in the type, not in the object: the type needs each of them.
_NAMES = "add sub mul mod pow xor truediv floordiv matmul lshift rshift and_ or_"
_BINARY = {name.rstrip("_"): getattr(operator, name) for name in _NAMES.split()}
_NAMES = "lt le eq ne gt ge neg pos abs invert index getitem"
_OTHERS: dict[str, Callable[..., Any]] = {name: getattr(operator, name) for name in _NAMES.split()}
_KINDS: list[Callable[..., Any]] = [bool, int, float, complex, len, iter, round, divmod]
_OTHERS |= {kind.__name__: kind for kind in _KINDS}
for _name, _apply in _BINARY.items():
    _forward(f"__{_name}__", _apply)
    _forward(f"__r{_name}__", lambda own, other, apply=_apply: apply(other, own))
    if hasattr(operator, f"__i{_name}__"):
        _forward(f"__i{_name}__", getattr(operator, f"__i{_name}__"))
for _name, _apply in _OTHERS.items():
    _forward(f"__{_name}__", _apply)

buffer.register(
    AsyncCollectiveArray,
    lambda x: buffer.as_buffer(x.wait()),
    lambda x: buffer.device_type(x._array),
)
register_type(AsyncCollectiveArray, lambda x: x.wait(), lambda x: x, "nc10d.AsyncCollectiveArray")
