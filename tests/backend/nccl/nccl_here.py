"""Find the real libnccl; without it, tests that need it are skipped, but fail in CI.

`.ci/run` sets NC10D_REQUIRE_NCCL, which makes a missing library or header a failure.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

import pytest

WANTED = bool(os.environ.get("NC10D_REQUIRE_NCCL"))


def wheel_folders(*names: str) -> list[Path]:
    """Return the existing folders nvidia/... of installed wheels."""
    spec = importlib.util.find_spec("nvidia")
    roots = spec.submodule_search_locations if spec else None
    return [path for root in roots or () if (path := Path(root, *names)).is_dir()]


HEADERS = wheel_folders("nccl", "include")
LIBRARY = wheel_folders("nccl", "lib")

needs_nccl = pytest.mark.skipif(not (LIBRARY or WANTED), reason="no libnccl: see .ci/run")
needs_headers = pytest.mark.skipif(
    not ((HEADERS and shutil.which("gcc")) or WANTED), reason="no nccl.h or gcc: see .ci/run"
)
