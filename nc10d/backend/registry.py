"""Names of backends: what `init_process_group("name")` can mean.

A factory is a function from BackendSetup to Backend, or its address as "module:function", which
is imported when the backend is first made. A user's own backend is registered in the same way.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from nc10d.backend.base import Factory, Meeting
from nc10d.errors import UnsupportedPlatform


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """A registered backend: how to make it, for which devices by default, and its options.

    `options` are the types that its `pg_options` may have; None, the default, always goes. `meet`
    is how its ranks find each other where nobody says how (None: by the environment). `lookout` is
    the backend that learns of deaths for it, in groups that have no backend for the CPU.
    """

    name: str
    factory: Factory | str
    devices: tuple[str, ...]
    options: tuple[type[Any], ...] = (object,)
    meet: Meeting | str | None = None
    lookout: str | None = None

    def check_options(self, options: Any) -> None:
        """Raise TypeError for options that this backend does not know."""
        if options is None or isinstance(options, self.options):
            return
        known = " or ".join(kind.__name__ for kind in self.options)
        message = f"pg_options of the backend {self.name!r} must be {known or 'None: it has none'}"
        raise TypeError(f"{message}, got {options!r}")


_entries: dict[str, BackendEntry] = {}


def register_backend(
    name: str,
    factory: Factory | str,
    devices: Sequence[str] = ("cpu",),
    options: tuple[type[Any], ...] = (object,),
    meet: Meeting | str | None = None,
    lookout: str | None = None,
) -> None:
    """Make `name` known; `devices` are those it serves when it is asked for by name alone.

    `options` are the types of `pg_options` that it takes (by default any, which its factory then
    checks itself); a group with others is refused before its ranks have met. `meet(rank, size,
    deadline)`, or its address, finds the other ranks of a job whose only backend this is, where
    init_process_group gets no method and no store; rank and size are -1 if unknown. A backend that
    can't see its peers die names a `lookout`, which a group makes beside it ("cpu"). ValueError if
    the name is taken, is empty, or has a character of "cpu:cpu,cuda:nccl".
    """
    name = name.lower()
    if not name or set(name) & set(":, "):
        raise ValueError(f"a backend's name must not be empty or contain ':' or ',', got {name!r}")
    if name in _entries:
        raise ValueError(f"a backend named {name!r} is registered already")
    if isinstance(devices, str) or not devices:
        raise ValueError(f"devices must be a sequence like ['cpu', 'cuda'], got {devices!r}")
    _entries[name] = BackendEntry(name, factory, tuple(devices), options, meet, lookout)


def unregister_backend(name: str) -> None:
    """Forget a name; groups that use the backend keep it. For tests and plug-ins that reload."""
    _entries.pop(name.lower(), None)


def find_backend(name: str) -> BackendEntry:
    """Return the entry called `name`; ValueError that lists the known names."""
    entry = _entries.get(name.lower())
    if entry is None:
        known = ", ".join(sorted(_entries))
        raise ValueError(f"unknown backend {name!r}; known are: {known}")
    return entry


def load_factory(entry: BackendEntry) -> Factory:
    """Return the entry's function, imported if need be; UnsupportedPlatform if it is not here."""
    return cast(Factory, _load(entry, entry.factory))


def load_meeting(entry: BackendEntry) -> Meeting | None:
    """Return how the ranks of the entry's backend meet, None for by the environment."""
    return None if entry.meet is None else cast(Meeting, _load(entry, entry.meet))


def _load(entry: BackendEntry, what: object) -> object:
    if not isinstance(what, str):
        return what
    module, _, attribute = what.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        message = f"the backend {entry.name!r} is not part of this installation of nc10d"
        raise UnsupportedPlatform(message) from error


register_backend("cpu", "nc10d.backend.cpu.backend:make", ["cpu"], options=())
register_backend("nccl", "nc10d.backend.nccl.backend:make", ["cuda"], lookout="cpu")
register_backend("staged", "nc10d.backend.staged.backend:make", ["cuda"])
register_backend(
    "mpi", "nc10d.backend.mpi.backend:make", ["cpu"], meet="nc10d.backend.mpi.store_bootstrap:meet"
)
register_backend("fake", "nc10d.backend.fake:make", ["cpu", "cuda"], meet="nc10d.backend.fake:meet")
