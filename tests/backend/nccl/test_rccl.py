"""AMD's RCCL loads by the table of NCCL: a stub has the names that its header exports."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc")

# The functions of RCCL 2.21.5's src/nccl.h.in (ROCm/rccl, 2024-10) that nc10d's table has, but for
# ncclGetVersion; RCCL names ncclAlltoAll otherwise, and has collectives of its own.
NAMES = """
    ncclGetErrorString ncclGetLastError ncclGetUniqueId ncclCommInitRankConfig ncclCommDestroy
    ncclCommAbort ncclCommGetAsyncError ncclCommRegister ncclCommDeregister ncclMemAlloc ncclMemFree
    ncclRedOpCreatePreMulSum ncclReduce ncclBroadcast ncclAllReduce ncclReduceScatter ncclAllGather
    ncclGather ncclScatter ncclSend ncclRecv ncclGroupStart ncclGroupEnd ncclAllToAll ncclAllToAllv
"""
SHOWN = """
from nc10d import nccl
from nc10d.backend.nccl.bindings.library import library
from nc10d.errors import UnsupportedPlatform
print(nccl.version(), library().has("ncclAllReduce"), library().has("ncclAlltoAll"))
try:
    library().function("ncclCommSuspend")
except UnsupportedPlatform as error:
    print(error)
"""


def test_rccl_tells_its_name_and_version(tmp_path: Path) -> None:
    lines = [f"int {name}(void) {{ return 0; }}" for name in NAMES.split()]
    lines.append("int ncclGetVersion(int *version) { *version = 22105; return 0; }")
    (tmp_path / "rccl.c").write_text("\n".join(lines))
    command = ["gcc", "-shared", "-fPIC", "rccl.c", "-o", "librccl.so.1"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=200)
    environment = os.environ | {"NC10D_NCCL_LIBRARY": str(tmp_path / "librccl.so.1")}
    done = subprocess.run(
        [sys.executable, "-c", SHOWN], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "('RCCL', (2, 21, 5)) True False"
    assert second.startswith("ncclCommSuspend needs NCCL >= 2.29.7, this is RCCL 2.21.5 (")
