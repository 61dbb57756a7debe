"""Key-value stores in which ranks meet: one abstract `Store`, and four ways to have one.

Each name is imported on first use: a HashStore needs no sockets.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nc10d.store.base import Store
    from nc10d.store.client import TCPStore
    from nc10d.store.file import FileStore
    from nc10d.store.hash import HashStore
    from nc10d.store.prefix import PrefixStore

__all__ = ["FileStore", "HashStore", "PrefixStore", "Store", "TCPStore"]

_HOME = {
    "FileStore": "file",
    "HashStore": "hash",
    "PrefixStore": "prefix",
    "Store": "base",
    "TCPStore": "client",
}


def __getattr__(name: str) -> Any:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
