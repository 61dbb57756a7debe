"""The registry of backends: names that `init_process_group("name")` accepts.

A factory is a function from BackendSetup to Backend, or its address as "module:function", which
is imported when the backend is first made. A user's own backend is registered in the same way: by
a call of `register_backend`, or by a package's entry point in the group "nc10d.backends", whose
name is the backend's. The entry point is a function without arguments that calls
`register_backend`, and runs when the name is first asked for:

    [project.entry-points."nc10d.backends"]
    mine = "my_package:register"
"""

from __future__ import annotations

import importlib
import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from nc10d.backend.protocol import Factory, Meeting
from nc10d.base.run_to_end import import_to_end
from nc10d.errors import UnsupportedPlatform

PLUGINS = "nc10d.backends"
"""The group of entry points that register backends."""
Requirement = Callable[[], object]
"""Raises UnsupportedPlatform, with the reason, where a backend can't work on this machine."""


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """A registered backend: its factory, its default devices, and its types of options."""

    # `options` are the types that `pg_options` may have, or their addresses; None, the default, is
    # always accepted.
    # `meet` finds the other ranks by default (None: by the environment). `failure_detector` names
    # the backend that detects dead ranks in its place, in groups that have no backend for the CPU.

    name: str
    factory: Factory | str
    devices: tuple[str, ...]
    options: tuple[type[Any] | str, ...] = (object,)
    meet: Meeting | str | None = None
    failure_detector: str | None = None
    requires: Requirement | str | None = None

    def why_unavailable(self) -> str | None:
        """Return why the backend can't work on this machine, None if it can, as far as known."""
        if self.requires is None:
            return None
        try:
            cast(Requirement, _load(self, self.requires))()
        except UnsupportedPlatform as error:
            return str(error)
        return None

    def check_options(self, options: object) -> None:
        """Raise TypeError for options whose type this backend does not take."""
        if options is None:
            return
        kinds = tuple(cast(type[Any], _load(self, kind)) for kind in self.options)
        if isinstance(options, kinds):
            return
        known = " or ".join(kind.__name__ for kind in kinds)
        message = f"pg_options of the backend {self.name!r} must be {known or 'None: it has none'}"
        raise TypeError(f"{message}, got {reprlib.repr(options)}")


_entries: dict[str, BackendEntry] = {}


def register_backend(
    name: str,
    factory: Factory | str,
    devices: Sequence[str] = ("cpu",),
    options: tuple[type[object] | str, ...] = (object,),
    meet: Meeting | str | None = None,
    failure_detector: str | None = None,
    requires: Requirement | str | None = None,
) -> None:
    """Register a backend as `name`; it serves `devices` when requested by name alone.

    The factory returns an object that derives from `nc10d.backend.protocol.Backend`. `options` are
    the types that it takes as `pg_options`, or their addresses (by default any type, and the
    factory checks them); a group with other options is refused before its ranks meet.

    `meet(rank, size, deadline)`, or its address, finds the other ranks in a job whose only backend
    this is, if init_process_group gets neither a method nor a store; rank and size are -1 if
    unknown. A backend that can't detect dead peers names a `failure_detector` ("cpu"), which a
    group makes beside it. `requires()`, or its address, raises UnsupportedPlatform with the reason
    where the backend can't work on this machine (by default, the backend is taken to work).
    ValueError if the name is taken, is empty, or has a colon, a comma or a space.
    """
    name = name.lower()
    if not name or set(name) & set(":, "):
        raise ValueError(f"a backend's name must not be empty or contain ':' or ',', got {name!r}")
    if name in _entries:
        raise ValueError(f"a backend named {name!r} is registered already")
    if isinstance(devices, str) or not devices:
        raise ValueError(f"devices must be a sequence like ['cpu', 'cuda'], got {devices!r}")
    _entries[name] = BackendEntry(
        name, factory, tuple(devices), options, meet, failure_detector, requires
    )


def unregister_backend(name: str) -> None:
    """Remove a name; groups that use the backend keep it. For tests and plug-ins that reload."""
    _entries.pop(name.lower(), None)


def backend_names() -> list[str]:
    """Return the registered names, and those in installed packages' entry points; imports none."""
    return sorted({*_entries, *_plugins()})


def find_backend(name: str) -> BackendEntry:
    """Return the entry of `name`, which a package's entry point may register now.

    ValueError that lists the known names.
    """
    asked, name = name, name.lower()
    if name not in _entries and (plugin := _plugins().get(name)) is not None:
        plugin.load()()
        if name not in _entries:
            raise ValueError(
                f"{plugin.value} (entry point of {PLUGINS}) has not registered {name!r}"
            )
    if name not in _entries:
        raise ValueError(f"unknown backend {asked!r}; known are: {', '.join(backend_names())}")
    return _entries[name]


def _plugins() -> dict[str, Any]:
    """Return the entry points of installed packages, by their backends' names."""
    found = import_to_end("importlib.metadata").entry_points(group=PLUGINS)
    return {plugin.name.lower(): plugin for plugin in found}


def load_factory(entry: BackendEntry) -> Factory:
    """Return the entry's factory, imported if necessary; UnsupportedPlatform if it is missing."""
    return cast(Factory, _load(entry, entry.factory))


def load_meeting(entry: BackendEntry) -> Meeting | None:
    """Return how the ranks of the entry's backend meet, None if by the environment."""
    return None if entry.meet is None else cast(Meeting, _load(entry, entry.meet))


def _load(entry: BackendEntry, target: object) -> object:
    if not isinstance(target, str):
        return target
    module, _, attribute = target.partition(":")
    # A user's module may expect the main thread, as MPI does where mpi4py initialises it.
    ours = module.startswith("nc10d.") and not module.startswith("nc10d.backend.mpi.")
    load = import_to_end if ours else importlib.import_module
    try:
        return getattr(load(module), attribute)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise
        message = f"the backend {entry.name!r} is not part of this installation of nc10d"
        raise UnsupportedPlatform(message) from error


register_backend("cpu", "nc10d.backend.cpu.backend:make", ["cpu"], options=())
register_backend(
    "nccl",
    "nc10d.backend.nccl.backend:make",
    ["cuda"],
    ("nc10d.backend.nccl.comm.options:NcclOptions",),
    failure_detector="cpu",
    requires="nc10d.backend.nccl.bindings.library:require",
)
register_backend(
    "staged",
    "nc10d.backend.staged.backend:make",
    ["cuda"],
    ("nc10d.backend.staged.backend:StagedOptions",),
    requires="nc10d.cuda.driver:require_device",
)
register_backend(
    "mpi",
    "nc10d.backend.mpi.backend:make",
    ["cpu"],
    ("nc10d.backend.mpi.backend:MpiOptions",),
    meet="nc10d.backend.mpi.forming:meet",
    requires="nc10d.backend.mpi:require",
)
register_backend(
    "ucc",
    "nc10d.backend.ucc.backend:make",
    ["cpu", "cuda"],
    ("nc10d.backend.ucc.backend:UccOptions",),
    requires="nc10d.backend.ucc.library:library",
)
register_backend("fake", "nc10d.backend.fake:make", ["cpu", "cuda"], meet="nc10d.backend.fake:meet")
