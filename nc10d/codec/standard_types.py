"""Types that objects carry without registration: some standard types, and classes by name.

A named tuple or an Enum member travels as its class's name and its contents. The receiver looks
the class up among the modules that it has imported, without importing any and without calling any
code of the class. Only classes of these two kinds are taken, whose instances do nothing when they
are made, compared, hashed or dropped; so a sender can't choose what runs.
"""

from __future__ import annotations

import argparse
import datetime
import enum
import pathlib
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Sized
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

from nc10d.codec.type_registry import TypeCodec, register_finder, register_type
from nc10d.errors import CodecError

_FACTORIES = {None: None} | {
    kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, list, tuple, dict, set)
}
"""A defaultdict's factories that travel, by name."""


def _take(state: object, *kinds: type) -> tuple[Any, ...]:
    """Return a state that is a tuple with these exact types; CodecError for others."""
    if type(state) is not tuple or tuple(map(type, state)) != kinds:
        names = ", ".join(kind.__name__ for kind in kinds)
        raise CodecError(f"expected the parts ({names}), got {type(state).__name__}")
    return state


def _with_attributes(value: Any, attributes: object) -> Any:
    if type(attributes) is not dict or set(map(type, attributes)) - {str}:
        raise CodecError("attributes are a dict from names to values")
    vars(value).update(attributes)
    return value


def _ordered_dict(state: object) -> Any:
    items, attributes = _take(state, dict, dict)
    return _with_attributes(OrderedDict(items), attributes)


def _factory_name(factory: object) -> str | None:
    if factory is None or _FACTORIES.get(getattr(factory, "__name__", "")) is factory:
        return None if factory is None else str(factory.__name__)
    raise CodecError(f"a defaultdict with the factory {factory!r} can't be carried: send dict(it)")


def _default_dict(state: object) -> defaultdict[object, object]:
    (name,), items = _take(state, tuple, dict)
    if type(name) not in (type(None), str):  # a tuple may be too long to hash
        raise CodecError(f"a factory is sent by its name, not as a {type(name).__name__}")
    return defaultdict(_FACTORIES[name], items)


def _counter(state: object) -> Counter[object]:
    if type(state) is not dict:
        raise CodecError(f"the counts are a dict, not a {type(state).__name__}")
    return Counter(state)


def _deque(state: object) -> deque[object]:
    items, (most,) = _take(state, list, tuple)
    return deque(items, most)


# By fixed names: Python 3.13 has moved the paths' module.
register_type(
    OrderedDict, lambda x: (dict(x), vars(x)), _ordered_dict, "collections.OrderedDict"
)  # a module's state_dict has versions in the attributes
register_type(
    defaultdict,
    lambda x: ((_factory_name(x.default_factory),), dict(x)),
    _default_dict,
    "collections.defaultdict",
)
register_type(Counter, dict, _counter, "collections.Counter")
register_type(deque, lambda x: ([*x], (x.maxlen,)), _deque, "collections.deque")
register_type(argparse.Namespace, vars, lambda x: _with_attributes(argparse.Namespace(), x))
register_type(SimpleNamespace, vars, lambda x: _with_attributes(SimpleNamespace(), x))
for _path in (pathlib.PurePosixPath, pathlib.PosixPath):
    register_type(_path, str, _path, f"pathlib.{_path.__name__}")


def _iso(value: Any) -> str | tuple[str, datetime.timezone]:
    """Return a date or a time as a text, and the zone if that has a separate name.

    CodecError if a text does not hold everything.
    """
    zone = getattr(value, "tzinfo", None)
    if getattr(value, "fold", 0) or type(zone) not in _ZONES:
        raise CodecError(f"{value!r} can't be carried: send it with a datetime.timezone, or as UTC")
    if zone is not None and len(_parts_of(zone)) > 1:
        return value.replace(tzinfo=None).isoformat(), zone
    return str(value.isoformat())


def _parts_of(zone: Any) -> Any:
    """Return a zone's offset, and the name if the zone has a separate one."""
    return zone.__getinitargs__()


def _zone(state: Sized) -> datetime.timezone:
    kinds = (datetime.timedelta, str) if len(state) == 2 else (datetime.timedelta,)
    return datetime.timezone(*_take(state, *kinds))


def _from_iso(read: Callable[[str], Any], state: object) -> object:
    if type(state) is str:
        return read(state)
    text, zone = _take(state, str, datetime.timezone)
    return read(text).replace(tzinfo=zone)


_ZONES = {type(None), datetime.timezone}
for _kind in (datetime.date, datetime.time, datetime.datetime):
    register_type(_kind, _iso, partial(_from_iso, _kind.fromisoformat))
register_type(
    datetime.timedelta,
    lambda x: (x.days, x.seconds, x.microseconds),
    lambda state: datetime.timedelta(*_take(state, int, int, int)),
)
register_type(datetime.timezone, _parts_of, _zone)


def _find(module: str, qualname: object) -> object:
    """Return what an imported module holds under a name, None if there is no such name.

    Only the dicts of modules and classes are looked at: a module's `__getattr__` may run anything.
    """
    found: Any = sys.modules.get(module)
    for part in str(qualname).split("."):
        if not issubclass(type(found), (ModuleType, type)):
            return None
        found = vars(found).get(part)
    return found


def _is_named_tuple(kind: Any) -> bool:
    return (
        issubclass(type(kind), type)
        and issubclass(kind, tuple)
        and type(getattr(kind, "_fields", None)) is tuple
        and (kind.__hash__, kind.__eq__) == (tuple.__hash__, tuple.__eq__)
        and not hasattr(kind, "__del__")
    )


def _class_of(what: str, module: str, qualname: str, fits: Callable[[Any], bool]) -> Any:
    found = _find(module, qualname)
    if not fits(found):
        raise CodecError(
            f"a {what} of the class {module}.{qualname} has come, and this rank has imported no "
            "such class: import its module here too, or send it as a tuple, a number or a text"
        )
    return found


def _named_tuple(state: object) -> object:
    module, qualname, fields, values = _take(state, str, str, tuple, tuple)
    if set(map(type, fields)) - {str}:  # other fields may be too long to put into words
        raise CodecError("the fields of a named tuple are texts")
    kind = _class_of("named tuple", module, qualname, _is_named_tuple)
    if kind._fields != fields or len(values) != len(fields):
        raise CodecError(f"{qualname} has the fields {kind._fields}; those sent are {fields}")
    return tuple.__new__(kind, values)


def _member(state: object) -> object:
    module, qualname, name = _take(state, str, str, str)
    kind = _class_of("member", module, qualname, lambda x: issubclass(type(x), enum.EnumMeta))
    if name not in kind._member_map_:
        raise CodecError(f"{qualname} has no member {name!r}")
    return kind._member_map_[name]


def _member_name(value: enum.Enum) -> str:
    if value.name not in type(value)._member_map_:  # several flags at once
        raise CodecError(f"{value!r} has no name of its own: send its value")
    return value.name


NAMED_TUPLE, MEMBER = "a named tuple", "an enum's member"
register_finder(NAMED_TUPLE, _named_tuple)
register_finder(MEMBER, _member)


def codec_by_name(kind: type[Any]) -> TypeCodec | None:
    """Return the codec of a class that the receiver can find by name, None for other types."""
    if _find(kind.__module__, kind.__qualname__) is not kind:
        return None
    place = kind.__module__, kind.__qualname__
    if _is_named_tuple(kind):
        return TypeCodec(
            NAMED_TUPLE, kind, lambda x: (*place, kind._fields, tuple(x)), _named_tuple
        )
    if issubclass(kind, enum.Enum):
        return TypeCodec(MEMBER, kind, lambda x: (*place, _member_name(x)), _member)
    return None
