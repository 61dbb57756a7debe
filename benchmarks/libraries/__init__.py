"""Adapters of the libraries that are measured: one module for each library.

A rank makes its adapter by name. nc10d and gloo also play the scenarios of `benchmarks.faults`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.libraries.base import Library
    from benchmarks.libraries.c10d import C10dLibrary

TCP = "tcp"
C10D_NAMES = ("nc10d", "gloo")
"""Libraries that speak c10d; their ranks can be started singly, also on separate hosts."""
NAMES = (*C10D_NAMES, "mpich", "openmpi")
_CLASSES = {
    "nc10d": ("nc10d", "Nc10d"),
    "gloo": ("gloo", "Gloo"),
    "mpich": ("mpi", "Mpi"),
    "openmpi": ("mpi", "Mpi"),
}


def make(name: str) -> Library:
    """Return a new adapter; KeyError where no library has this name."""
    if is_tcp(name):
        from benchmarks.libraries.tcp import Tcp

        library: Library = Tcp(int(name.removeprefix(TCP) or 1))
    else:
        module, adapter = _CLASSES[name]
        library = getattr(importlib.import_module(f"benchmarks.libraries.{module}"), adapter)()
    library.name = name
    return library


def make_c10d(name: str) -> C10dLibrary:
    """Return a new adapter of a library in C10D_NAMES."""
    from benchmarks.libraries.c10d import C10dLibrary

    library = make(name)
    assert isinstance(library, C10dLibrary), name
    return library


def is_tcp(name: str) -> bool:
    """Return whether a name asks for the plain TCP copy: tcp, or tcp4 for four sockets a pair."""
    count = name.removeprefix(TCP)
    return name.startswith(TCP) and (not count or (count.isdecimal() and int(count) > 0))
