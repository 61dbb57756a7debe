"""Ints and strings that return themselves when they are called.

nc10d's groups have `rank`, `size` and `name` as attributes; c10d's groups have methods of these
names. Code for either works with `group.rank` and `group.rank()`. A copy or a pickle is plain.
"""

from __future__ import annotations

from typing import Any


class CallableInt(int):
    """An int that is its own getter."""

    __slots__ = ()

    def __call__(self) -> int:
        """Return the plain int."""
        return int(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (int(self),)

    def __array_ufunc__(
        self, ufunc: object, method: str, *inputs: object, **options: object
    ) -> Any:
        # NumPy lets a plain int take an array's dtype, but no instance of a subclass.
        plain = [int(x) if isinstance(x, CallableInt) else x for x in inputs]
        return getattr(ufunc, method)(*plain, **options)


class CallableStr(str):
    """A str that is its own getter."""

    __slots__ = ()

    def __call__(self) -> str:
        """Return the plain str."""
        return str(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str(self),)
