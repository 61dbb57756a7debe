"""Run ranks as processes that load the emulators of libcuda and libnccl, not the real libraries.

tests/emulators compiles the emulators. A process finds them by its environment, and must not have
loaded the real libraries before. So ranks use devices, and pytest's process does not.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from nc10d.testing.ranks import Ranks

EMULATORS = Path(__file__).parents[2] / "emulators"
sys.path.insert(0, str(EMULATORS))

needs_emulators = pytest.mark.skipif(
    not (EMULATORS.joinpath("build.py").exists()), reason="the emulators are not there"
)


@contextmanager
def emulators(**more: str) -> Iterator[None]:
    """Make processes started in the `with` block load the emulators."""
    from build import build

    libraries = build()
    if libraries is None:
        if os.environ.get("NC10D_REQUIRE_NCCL"):
            pytest.fail("no gcc, or no headers of CUDA and NCCL")
        pytest.skip("no gcc, or no headers of CUDA and NCCL: see `make test-nccl`")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**libraries.environment(), **more}.items():
            patch.setenv(name, value)
        yield


@contextmanager
def emulated_ranks(
    size: int = 2, backend: str = "cpu:cpu,cuda:nccl", **more: str
) -> Iterator[Ranks]:
    """Yield ranks that are processes with the emulators; `more` are environment variables."""
    with emulators(**more), Ranks(size, "processes", backend, timeout=20.0) as ranks:
        yield ranks
