"""The token of a job that the launcher starts: it reaches the ranks, and no other process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nc10d.auth import token
from nc10d.errors import AuthError
from nc10d.run.cli import ensure_token, read

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("NC10D_TOKEN")}

LOOKS = """
import os, sys
from pathlib import Path
import numpy as np
import nc10d as dist
from nc10d.errors import StoreError
from nc10d.store import TCPStore

dist.init_process_group()
x = np.ones(2)
dist.all_reduce(x)
try:
    TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), timeout=0.3, token=None)
    answer = "a stranger was let in"
except StoreError:
    answer = "refused"
words = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if readable(path)]
shown = any(os.environ["NC10D_TOKEN"].encode() in line for line in words)
print(x[0], answer, shown, flush=True)
dist.destroy_process_group()
"""
READABLE = """
def readable(path):
    try:
        path.read_bytes()
    except OSError:
        return False
    return True
"""


def run(script: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "nc10d.run", "--no-prefix", *words, str(script)]
    environment = {**CLEAN, **variables}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_a_standalone_job_has_a_token_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "looks.py"
    script.write_text(READABLE + LOOKS)
    done = run(script, "--standalone", "--nproc-per-node", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["2.0 refused False"] * 2


def test_an_existing_token_is_the_jobs_token() -> None:
    environment = {token.VALUE: "ab" * 32}
    ensure_token(read(["--standalone", "a.py"]), environment)
    assert environment == {token.VALUE: "ab" * 32}
    made: dict[str, str] = {}
    ensure_token(read(["--standalone", "a.py"]), made)
    assert token.job_token(made) is not None
    none: dict[str, str] = {}
    ensure_token(read(["a.py"]), none)
    assert none == {}, "torch's programs can meet in a store without one"


def test_several_nodes_need_a_token_or_trust() -> None:
    words = ["--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "192.0.2.1:4711", "a.py"]
    with pytest.raises(AuthError, match=r"NC10D_TOKEN_FILE.*nc10d\.auth FILE.*NC10D_INSECURE=1"):
        ensure_token(read(words), {})
    ensure_token(read(words), {token.VALUE: "ab" * 32})
    ensure_token(read(words), {token.INSECURE: "1"})


def test_without_a_token_the_launcher_explains_and_starts_nothing(tmp_path: Path) -> None:
    script = tmp_path / "never.py"
    script.write_text("print('started')")
    where = ["--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "192.0.2.1:4711"]
    done = run(script, *where)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("nc10d-run: the store of a job of several nodes at 192.0.2.1")
    assert "python -m nc10d.auth FILE" in done.stderr
