"""Serialize errors as JSON, so that every rank raises the error that a rank detected. No I/O.

The JSON holds a type of `nc10d.errors`, the message, and the attributes of a DistError. An error of
the caller's own type becomes an Aborted. Encoding never fails, whatever a caller has put into an
error: a failing group must be able to report its cause. Decoding accepts any bytes and creates no
object but a DistError.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from operator import index
from typing import Any

from nc10d import errors
from nc10d.errors import Aborted, DistError

_FIELDS = ("rank", "host", "pid", "group", "op", "seq", "cause", "waited", "last", "code")
_LONGEST_TEXT = 100
"""The most characters of an attribute."""
_BITS = 64
_PLAIN = (str, int, float, type(None))


def message_of(reason: object) -> str:
    """Return an error's message, or any reason as text; its type's name if str() raises."""
    try:
        return str(reason)
    except Exception:  # noqa: BLE001  (a caller's own code, which may raise anything)
        return f"{type(reason).__name__}, which can't be put in words"


def wire_type(error: BaseException) -> type[DistError]:
    """Return the type of `nc10d.errors` as which an error is sent."""
    kind: type = type(error)
    return kind if _is_wire_type(kind) else Aborted


def encode_error(error: DistError, most: int | None = None, **own: object) -> bytes:
    """Return an error as JSON of at most `most` bytes (512 at least); longer texts are cut."""
    # Attributes in `own` replace the error's.
    fields = {name: _as_json(getattr(error, name, None)) for name in _FIELDS} | own
    kind, message = wire_type(error).__name__, message_of(error)
    while True:
        content = {"kind": kind, "message": message, "fields": fields}
        text = json.dumps(content, ensure_ascii=False).encode(errors="replace")
        excess = 0 if most is None else len(text) - most
        if excess <= 0:
            return text
        message = _shortened(message, fields, excess)


def _shortened(message: str, fields: dict[str, Any], excess: int) -> str:
    """Return a shorter message, or shorten the attributes in `fields`, by a part of the excess."""
    # The message's end is cut first, then the `last` call of each rank is dropped, then the texts
    # of other attributes are halved.
    texts = {name: text for name, text in fields.items() if text and isinstance(text, str)}
    least = _LONGEST_TEXT if texts or fields["last"] is not None else 1
    if len(message) > least:
        # A character takes up to six bytes. Cut rather too little: the caller checks again.
        return message[: max(least - 1, len(message) - excess // 6 - 2)] + "…"
    if fields["last"] is not None:
        fields["last"] = None
    else:
        fields.update({name: text[: len(text) // 2] for name, text in texts.items()})
    return message


def decode_error(text: bytes | str) -> DistError:
    """Return the error that `encode_error` wrote; an Aborted for any other bytes."""
    try:
        content = json.loads(text)
        kind, message = getattr(errors, content["kind"]), content["message"]
        fields = content["fields"]
        found = {name: fields[name] for name in _FIELDS}
        if found["last"] is not None:
            found["last"] = {int(rank): int(seq) for rank, seq in found["last"].items()}
        plain = [message, *(value for name, value in found.items() if name != "last")]
        if not _is_wire_type(kind) or not all(isinstance(value, _PLAIN) for value in plain):
            raise LookupError("no such error")
    except (ValueError, OverflowError, RecursionError, LookupError, TypeError, AttributeError):
        return Aborted(f"the group has failed, for a reason that can't be read: {text[:80]!r}")
    if not issubclass(kind, errors.LibraryError):
        del found["code"]
    error: DistError = kind(str(message))
    error.__dict__.update(found)
    return error


def _is_wire_type(kind: Any) -> bool:
    own = isinstance(kind, type) and issubclass(kind, DistError)
    return own and getattr(errors, kind.__name__, None) is kind


def _as_json(value: object) -> object:
    """Return an attribute as a JSON value: numbers of any library, shortened texts."""
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, str):
        return value[:_LONGEST_TEXT]
    try:
        if isinstance(value, Mapping):
            return {_number(rank): _number(seq) for rank, seq in value.items()}
        return _number(value)
    except (TypeError, ValueError):
        return None if isinstance(value, Mapping) else message_of(value)[:_LONGEST_TEXT]


def _number(value: Any) -> int | float:
    """Return an int or float; TypeError or ValueError if not a number, or beyond 64 bits."""
    number = index(value) if hasattr(value, "__index__") else float(value)
    if not -(1 << _BITS) <= number < 1 << _BITS:
        raise ValueError("a number that no rank could have")
    return number
