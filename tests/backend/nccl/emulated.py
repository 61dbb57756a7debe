"""Ranks as processes that take the emulators of libcuda and libnccl for the real ones.

The emulators are compiled by tests/emulators; a process finds them by its environment, and must
not have loaded others before. So what needs a device runs in ranks, not in pytest's process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

EMULATORS = Path(__file__).parents[2] / "emulators"
sys.path.insert(0, str(EMULATORS))

needs_emulators = pytest.mark.skipif(
    not (EMULATORS.joinpath("build.py").exists()), reason="the emulators are not there"
)


@contextmanager
def emulators(**more: str) -> Iterator[None]:
    """Let processes that are started inside take the emulators for the real libraries."""
    from build import build

    libraries = build()
    if libraries is None:
        if os.environ.get("NC10D_REQUIRE_NCCL"):
            pytest.fail("no gcc, or no headers of CUDA and NCCL")
        pytest.skip("no gcc, or no headers of CUDA and NCCL: see `make test-nccl`")
    wanted = {**libraries.environment(), **more}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
