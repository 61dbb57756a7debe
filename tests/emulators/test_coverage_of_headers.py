"""The emulators have all functions of the headers, except those left out on purpose."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from driving import libraries

from build import WANTED, build, find_headers

pytestmark = pytest.mark.skipif(
    (find_headers() is None or not shutil.which("nm")) and not WANTED,
    reason="no cuda.h and nccl.h, or no nm: see `make test-nccl`",
)

# Tuning and encryption: nc10d makes no use of them.
LEFT_OUT = re.compile("ncclResetDebugInit|ncclSetEncryption|ncclParam.*|nccl.*Config")


def exported(library: object) -> set[str]:
    command = ["nm", "-D", "--defined-only", str(library)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
    return {line.split()[2] for line in lines if line}


def test_libnccl_exports_the_headers_functions_except_the_omitted_functions() -> None:
    headers = find_headers()
    assert headers is not None
    prototypes = r"^\s*(?:ncclResult_t|const char\s*\*|void)\s+(nccl[A-Z]\w+)\s*\("
    declared = set(re.findall(prototypes, headers[1].read_text(), re.M))
    assert len(declared) > 60
    missing = declared - exported(libraries().nccl)
    assert not {name for name in missing if not LEFT_OUT.fullmatch(name)}


def test_omitted_functions_are_not_exported() -> None:
    found = exported(libraries().nccl)
    assert {name for name in found if LEFT_OUT.fullmatch(name)} == {"ncclCommInitRankConfig"}


def test_building_again_changes_nothing() -> None:
    before = libraries()
    assert build() == before
    assert before.cuda.exists()
