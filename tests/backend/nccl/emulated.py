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
