"""Ranks as threads of one process, on hosts that are named by letters."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

from nc10d.backend.cpu.backend import CpuBackend, make
from nc10d.backend.protocol import BackendSetup
from nc10d.backend.registry import register_backend, unregister_backend
from nc10d.testing.ranks import Ranks


def on_hosts(names: str, setup: BackendSetup) -> CpuBackend:
    """Make the backend of a rank whose host is a letter of `names`."""
    return make(setup, names[setup.rank % len(names)])


@contextmanager
def ranks_on(names: str, timeout: float = 20.0) -> Iterator[Ranks]:
    """Ranks as threads, each on the host that its letter names."""
    register_backend("hosts", functools.partial(on_hosts, names))
    try:
        with Ranks(len(names), backend="hosts", timeout=timeout) as ranks:
            yield ranks
    finally:
        unregister_backend("hosts")
