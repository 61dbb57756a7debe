"""The token of a job that the launcher starts: it reaches the ranks, and no other process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nc10d.auth import token
from nc10d.errors import AuthError
from nc10d.run.cli import ensure_token
from nc10d.run.launch_options import read

CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("NC10D_TOKEN")}

LOOKS = """
import os, sys
from pathlib import Path
import numpy as np
import nc10d as dist

dist.init_process_group()
x = np.ones(2)
dist.all_reduce(x)
words = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if readable(path)]
shown = any(os.environ["NC10D_TOKEN"].encode() in line for line in words)
print(x[0], shown, flush=True)
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


@pytest.mark.parametrize("words", [[], ["--standalone"]])
def test_a_job_of_one_node_has_a_token_of_its_own(tmp_path: Path, words: list[str]) -> None:
    script = tmp_path / "looks.py"
    script.write_text(READABLE + LOOKS)
    done = run(script, *words, "--nproc-per-node", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["2.0 False"] * 2


TORCH = """
import nc10d, numpy, os, torch
import torch.distributed as dist

dist.init_process_group("gloo")
x = torch.ones(2)
dist.all_reduce(x)
dist.destroy_process_group()
nc10d.init_process_group()
y = numpy.ones(2)
nc10d.all_reduce(y)
print(x.tolist(), y.tolist(), flush=True)
nc10d.destroy_process_group()
"""


@pytest.mark.slow
def test_torchs_own_client_meets_in_that_store_too(tmp_path: Path) -> None:
    pytest.importorskip("torch.distributed")
    script = tmp_path / "torch_ranks.py"
    script.write_text(TORCH)
    done = run(script, "--nproc-per-node", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[2.0, 2.0] [2.0, 2.0]"] * 2


@pytest.mark.parametrize(
    "words", ["a.py", "--standalone a.py", "--master-addr 127.0.0.1 a.py", "--master-addr x.y a.py"]
)
def test_an_existing_token_is_the_jobs_token(words: str) -> None:
    environment = {token.VALUE: "ab" * 32}
    assert not ensure_token(read(words.split()), environment)
    assert environment == {token.VALUE: "ab" * 32}
    made: dict[str, str] = {}
    assert ensure_token(read(words.split()), made)
    assert token.job_token(made) is not None
    trusted = {token.INSECURE: "1"}
    assert not ensure_token(read(words.split()), trusted)
    assert trusted == {token.INSECURE: "1"}


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
