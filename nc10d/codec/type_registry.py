"""The user's own types that the codec supports, by name: sender and receiver must register them.

A value travels as a name and a state made from other supported values. The receiver looks the name
up among its own registrations; a stream can't make the receiver import a module or find a class.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, overload

from nc10d.errors import CodecError

T = TypeVar("T")


class TypeCodec(NamedTuple):
    """How a type travels: `encode(value)` returns the state, `decode(state)` the value.

    For an array type, `move(value, device)` returns a copy on a device.
    """

    name: str
    kind: type
    encode: Callable[[Any], object]
    decode: Callable[[Any], object]
    move: Callable[[Any, str], object] | None = None


_by_type: dict[type, TypeCodec] = {}
_by_name: dict[str, TypeCodec] = {}


def register_type(
    kind: type[T],
    encode: Callable[[T], object],
    decode: Callable[[Any], T],
    name: str | None = None,
    move: Callable[[T, str], object] | None = None,
) -> None:
    """Let the object calls send values whose type is exactly `kind`.

    `encode(value)` returns a state of supported values; `decode(state)` returns the value. The
    state comes from a peer, so `decode` must check it. `name` (by default module and qualified
    name) must be the same on sender and receiver; ValueError if another type has it.

    For an array type, `move(value, device)` returns a copy on a device ("cuda:1"). `map_location`
    then applies to such values, and not to the arrays in their states. `encode` and `decode` of
    such a type may be called more than once for a value.

    >>> import fractions
    >>> register_type(fractions.Fraction, str, fractions.Fraction)
    """
    if not isinstance(kind, type):
        raise TypeError(f"register_type: expected a class, got {kind!r}")
    codec = TypeCodec(name or _full_name(kind), kind, encode, decode, move)
    other = _by_name.get(codec.name)
    # A class that is defined again (a notebook's cell, a reload) replaces the earlier definition.
    if other is not None and _full_name(other.kind) != _full_name(kind):
        message = f"register_type: the name {codec.name!r} is that of {other.kind!r}"
        raise ValueError(f"{message}: give another name")
    _by_name[codec.name] = codec
    _by_type[kind] = codec


@overload
def register_dataclass(kind: type[T]) -> type[T]: ...


@overload
def register_dataclass(*, name: str) -> Callable[[type[T]], type[T]]: ...


def register_dataclass(kind: Any = None, *, name: str | None = None) -> Any:
    """Let the object calls send a dataclass; use it as a decorator, with or without a `name`.

    All fields travel; the receiver's class must have the same fields. The received object is
    filled in as by copy.copy: neither __init__ nor __post_init__ is called.

    >>> @register_dataclass
    ... @dataclasses.dataclass
    ... class Report:
    ...     step: int
    ...     loss: float
    """
    if kind is None:
        return lambda found: _register_dataclass(found, name)
    return _register_dataclass(kind, name)


def _register_dataclass(kind: type[T], name: str | None) -> type[T]:
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise TypeError(f"register_dataclass: {kind!r} is not a dataclass; use register_type")
    names = [field.name for field in dataclasses.fields(kind)]

    def encode(value: T) -> dict[str, Any]:
        return {name: getattr(value, name) for name in names}

    def decode(state: Any) -> Any:
        if type(state) is not dict or state.keys() != set(names):
            raise CodecError(f"{kind.__qualname__} has the fields {names}; those sent differ")
        value = object.__new__(kind)
        for field, content in state.items():
            object.__setattr__(value, field, content)
        return value

    register_type(kind, encode, decode, name)
    return kind


def register_finder(name: str, decode: Callable[[Any], object]) -> None:
    """Let `decode(state)` find the class of values that travel under a name for many classes."""
    _by_name[name] = TypeCodec(name, object, lambda value: value, decode)


def codec_of(kind: type[object]) -> TypeCodec | None:
    """Return a type's codec, or None if the type is not registered."""
    return _by_type.get(kind)


def codec_named(name: object) -> TypeCodec:
    """Return the codec registered under a name; CodecError if there is none."""
    if type(name) is not str:  # another value may be too long to put into words
        raise CodecError(f"the name of a registered type is text, not a {type(name).__name__}")
    found = _by_name.get(name)
    if found is None:
        advice = "call nc10d.register_dataclass or nc10d.register_type here too"
        if name.startswith("torch."):
            advice = "import nc10d.torch here too"
        message = f"an object of type {name!r} has come, which is not registered on this rank"
        raise CodecError(f"{message}: {advice}")
    return found


def _full_name(kind: type[object]) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
