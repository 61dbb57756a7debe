"""Key-value stores: the ranks of a job exchange small values here, and meet here first.

TCPStore has a server and clients that speak torch's protocol. FileStore uses a shared file,
HashStore the memory of this process. PrefixStore is a view of another store. `Store` defines their
common methods.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nc10d.base.run_to_end import import_to_end

if TYPE_CHECKING:
    from nc10d.store.base import Store
    from nc10d.store.file import FileStore
    from nc10d.store.local import HashStore
    from nc10d.store.prefix import PrefixStore
    from nc10d.store.tcp import TCPStore

_HOMES = {
    "FileStore": "file",
    "HashStore": "local",
    "PrefixStore": "prefix",
    "Store": "base",
    "TCPStore": "tcp",
}
__all__ = ["FileStore", "HashStore", "PrefixStore", "Store", "TCPStore"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_to_end(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return [*__all__]
