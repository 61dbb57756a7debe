"""Errors as JSON, and back: what one rank has noticed is raised by all the others. No I/O.

A type of `nc10d.errors`, a message, and the attributes of a DistError; a caller's own type is told
as an Aborted. Whatever a caller has put into an error, it can be told: a group that fails must not
fail at that. What comes may be anything: it never makes an object of another kind.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from operator import index
from typing import Any

from nc10d import errors
from nc10d.errors import Aborted, DistError

_FIELDS = ("rank", "host", "pid", "group", "op", "seq", "cause", "waited", "last", "code")
_LONGEST = 100
"""Characters of an attribute."""
_BITS = 64


def in_words(reason: object) -> str:
    """Return an error's message, or any reason as text; if it can't even say that, its type."""
    try:
        return str(reason)
    except Exception:  # noqa: BLE001  (a caller's own code, which may raise anything)
        return f"{type(reason).__name__}, which can't be put in words"


def kind_of(error: BaseException) -> type[DistError]:
    """Return the type by which an error is told."""
    kind: type = type(error)
    return kind if _known(kind) else Aborted


def written(error: DistError, most: int | None = None, **own: Any) -> bytes:
    """Return an error as text of at most so many bytes (512 suffice for any): the rest is cut.

    Attributes in `own` replace the error's.
    """
    fields = {name: _plain(getattr(error, name, None)) for name in _FIELDS} | own
    kind, message = kind_of(error).__name__, in_words(error)
    while True:
        said = {"kind": kind, "message": message, "fields": fields}
        text = json.dumps(said, ensure_ascii=False).encode(errors="replace")
        excess = 0 if most is None else len(text) - most
        if excess <= 0:
            return text
        message = _cut(message, fields, excess)


def _cut(message: str, fields: dict[str, Any], excess: int) -> str:
    """Return a message from which some of the bytes in excess are cut; or cut the attributes.

    The beginning of the message goes before what each rank did last, and that before the words of
    other attributes.
    """
    texts = {name: text for name, text in fields.items() if text and isinstance(text, str)}
    least = _LONGEST if texts or fields["last"] is not None else 1
    if len(message) > least:
        # A character takes up to six bytes: cut too little rather than too much, and look again.
        return message[: max(least - 1, len(message) - excess // 6 - 2)] + "…"
    if fields["last"] is not None:
        fields["last"] = None
    else:
        fields.update({name: text[: len(text) // 2] for name, text in texts.items()})
    return message


def read(text: bytes | str) -> DistError:
    """Return the error that was `written`; of anything else, an Aborted that says so."""
    try:
        said = json.loads(text)
        kind, message, fields = getattr(errors, said["kind"]), said["message"], said["fields"]
        found = {name: fields[name] for name in _FIELDS}
        if found["last"] is not None:
            found["last"] = {int(rank): int(seq) for rank, seq in found["last"].items()}
        if not _known(kind):
            raise LookupError("no such type of error")
    except (ValueError, OverflowError, RecursionError, LookupError, TypeError, AttributeError):
        return Aborted(f"the group has failed, for a reason that can't be read: {text[:80]!r}")
    if not issubclass(kind, errors.LibraryError):
        del found["code"]
    error: DistError = kind(str(message))
    error.__dict__.update(found)
    return error


def _known(kind: Any) -> bool:
    own = isinstance(kind, type) and issubclass(kind, DistError)
    return own and getattr(errors, kind.__name__, None) is kind


def _plain(value: Any) -> Any:
    """Return an attribute as JSON has it: numbers of any library, text that is not long."""
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, str):
        return value[:_LONGEST]
    try:
        if isinstance(value, Mapping):
            return {_number(rank): _number(seq) for rank, seq in value.items()}
        return _number(value)
    except (TypeError, ValueError):
        return None if isinstance(value, Mapping) else in_words(value)[:_LONGEST]


def _number(value: Any) -> int | float:
    """Return a number as Python's; TypeError or ValueError if it is none, or has many digits."""
    number = index(value) if hasattr(value, "__index__") else float(value)
    if not -(1 << _BITS) <= number < 1 << _BITS:
        raise ValueError("a number that no rank could have")
    return number
