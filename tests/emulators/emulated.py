"""Run ranks as processes that load the emulators of libcuda and libnccl, not the real libraries.

A process finds them by its environment, and must not have loaded the real libraries before. So
ranks use devices, and pytest's process does not.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from build import WANTED, build, find_headers
from nc10d.testing.ranks import Ranks

REASON = "no gcc, or no headers of CUDA and NCCL: see `make test-nccl`"
needs_emulators = pytest.mark.skipif(
    (find_headers() is None or not shutil.which("gcc")) and not WANTED, reason=REASON
)


@contextmanager
def emulators(**more: str) -> Iterator[None]:
    """Make processes started in the `with` block load the emulators."""
    libraries = build()
    if libraries is None:
        pytest.fail(REASON) if WANTED else pytest.skip(REASON)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**libraries.environment(), **more}.items():
            patch.setenv(name, value)
        yield


@contextmanager
def emulated_ranks(
    size: int = 2, backend: str = "cpu:cpu,cuda:nccl", timeout: float = 20.0, **more: str
) -> Iterator[Ranks]:
    """Yield ranks that are processes with the emulators; `more` are environment variables."""
    with emulators(**more), Ranks(size, "processes", backend, timeout=timeout) as ranks:
        yield ranks
