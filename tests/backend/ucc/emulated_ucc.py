"""Run ranks as processes that load the emulator of libucc, which tests/emulators compiles."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from build_ucc import INCLUDE, build_ucc


def emulator() -> Path:
    """Return the path of the emulator; skip the test if there is no compiler."""
    library = build_ucc()
    if library is None:
        pytest.skip("no gcc")
    return library


@contextmanager
def emulated(folder: Path, **more: str) -> Iterator[Path]:
    """Make processes started in the `with` block load the emulator, which writes to `folder`."""
    library = emulator()
    wanted = {"NC10D_UCC_LIBRARY": str(library), "UCC_EMULATOR_FOLDER": str(folder), **more}
    with pytest.MonkeyPatch.context() as patch:
        # Ranks unpickle functions of test modules.
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        for name, value in wanted.items():
            patch.setenv(name, value)
        yield library


__all__ = ["INCLUDE", "emulated", "emulator"]
