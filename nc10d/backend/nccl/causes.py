"""A failure as text in the store, so that every rank of a group raises the same one."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from nc10d import errors
from nc10d.errors import Aborted, DistError

if TYPE_CHECKING:
    from nc10d.store.base import Store

KEY = "cause"


def told(store: Store, cause: DistError) -> DistError:
    """Tell the others a cause; return the one that holds: the first that anybody told."""
    said = store.compare_set(KEY, "", _written(cause))
    return cause if said == _written(cause).encode() else _read(said)


def heard(store: Store) -> DistError | None:
    """Return the cause that somebody has told, if anybody has; never blocks."""
    return _read(store.get(KEY)) if store.check([KEY]) else None


def _written(cause: DistError) -> str:
    known = {name: value for name, value in vars(cause).items() if _plain(value)}
    return json.dumps({"kind": type(cause).__name__, "text": str(cause), "known": known})


def _plain(value: Any) -> bool:
    return isinstance(value, (int, str))


def _read(text: bytes) -> DistError:
    said = json.loads(text)
    kind = getattr(errors, said["kind"], None)
    # A cause of somebody's own class is told as what it means here.
    made = (kind if isinstance(kind, type) and issubclass(kind, DistError) else Aborted)(
        said["text"]
    )
    made.__dict__.update(said["known"])
    return made
