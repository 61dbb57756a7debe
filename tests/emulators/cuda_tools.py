"""CUDA's tools in the installed wheels; tests that need them are skipped without."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

WANTED = bool(os.environ.get("NC10D_REQUIRE_NCCL"))


def tool(name: str) -> Path | None:
    """Return the path of a tool in the installed wheels."""
    spec = importlib.util.find_spec("nvidia")
    roots = spec.submodule_search_locations if spec else None
    found = [path for root in roots or () for path in Path(root).glob(f"*/bin/{name}")]
    return found[0] if found else None


PTXAS, NVDISASM = tool("ptxas"), tool("nvdisasm")
HERE = bool(PTXAS and NVDISASM and importlib.util.find_spec("numba_cuda"))
needs_compilers = pytest.mark.skipif(
    not (HERE or WANTED), reason="no CUDA compilers here: see .ci/run and `make test-nccl`"
)
