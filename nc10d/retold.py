"""Errors as JSON, and back: what one rank has noticed is raised by all the others. No I/O.

A type of `nc10d.errors`, a message, and the attributes of a DistError; a caller's own type is told
as an Aborted. What comes may be anything: it never makes an object of another kind.
"""

from __future__ import annotations

import json
from typing import Any

from nc10d import errors
from nc10d.errors import Aborted, DistError

_FIELDS = ("rank", "host", "pid", "group", "op", "seq", "cause", "waited", "last", "code")
_LONGEST = 100
"""Characters of an attribute."""


def written(error: DistError, most: int | None = None, **own: Any) -> bytes:
    """Return an error as text of at most so many bytes: a message that is too long is cut.

    Attributes in `own` replace the error's.
    """
    fields = {name: _short(getattr(error, name, None)) for name in _FIELDS} | own
    kind = type(error).__name__ if _known(type(error)) else Aborted.__name__
    message = str(error)
    while True:
        said = {"kind": kind, "message": message, "fields": fields}
        text = json.dumps(said, ensure_ascii=False).encode(errors="replace")
        excess = 0 if most is None else len(text) - most
        if excess <= 0:
            return text
        # A character takes up to six bytes: cut too little rather than too much, and look again.
        message = message[: max(0, len(message) - excess // 6 - 2)] + "…"


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


def _short(value: Any) -> Any:
    return value[:_LONGEST] if isinstance(value, str) else value
