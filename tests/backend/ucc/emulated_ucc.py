"""Run ranks as processes that load the emulator of libucc, which tests/emulators compiles."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

EMULATORS = Path(__file__).parents[2] / "emulators"
sys.path.insert(0, str(EMULATORS))

from build_ucc import INCLUDE, build_ucc  # noqa: E402


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
    wanted = {
        "NC10D_UCC_LIBRARY": str(library),
        "UCC_EMULATOR_FOLDER": str(folder),
        # Ranks unpickle functions of test modules.
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ["PYTHONPATH"]])
        if "PYTHONPATH" in os.environ
        else str(Path(__file__).parent),
        **more,
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield library
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


__all__ = ["INCLUDE", "emulated", "emulator"]
