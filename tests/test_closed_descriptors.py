"""The library, its store's server and the launcher work with any standard descriptors closed."""

import os
import subprocess
import sys
import textwrap
from functools import partial
from pathlib import Path

import pytest

CLOSED = [(0,), (1,), (2,), (0, 1, 2)]
LIBRARY = """
    import sys
    from contextlib import closing
    import numpy as np
    import nc10d as dist

    with closing(dist.TCPStore("127.0.0.1", is_master=True, timeout=30)) as store:
        dist.init_process_group("cpu", store=store, rank=0, world_size=1, timeout=30)
        x = np.ones(2)
        dist.all_reduce(x)
        dist.destroy_process_group()
        store.set("sum", str(x[0]))
        open(sys.argv[1], "w").write(store.get("sum").decode())
"""
RANK = """
    import os, sys
    import nc10d as dist
    from nc10d.init_methods.methods import rendezvous

    store, rank, size = rendezvous(timeout=30)
    store.set(str(rank), "came")
    open(f"{sys.argv[1]}.{rank}", "w").write(store.get(str(1 - rank)).decode())
    print("printed")
"""


def run_without(fds: tuple[int, ...], command: list[str]) -> int:
    """Run a command without some standard descriptors; return its exit code."""
    return subprocess.run(command, preexec_fn=partial(_close, fds), timeout=50).returncode


def _close(fds: tuple[int, ...]) -> None:
    for fd in fds:
        os.close(fd)


@pytest.mark.parametrize("fds", CLOSED)
def test_a_program_without_standard_descriptors(fds: tuple[int, ...], tmp_path: Path) -> None:
    result = tmp_path / "result"
    command = [sys.executable, "-c", textwrap.dedent(LIBRARY), str(result)]
    assert run_without(fds, command) == 0
    assert result.read_text() == "1.0"


@pytest.mark.parametrize("fds", CLOSED)
def test_a_launcher_without_standard_descriptors(fds: tuple[int, ...], tmp_path: Path) -> None:
    script, result = tmp_path / "rank.py", tmp_path / "result"
    script.write_text(textwrap.dedent(RANK))
    launcher = [sys.executable, "-m", "nc10d.run", "--nproc-per-node", "2"]
    assert run_without(fds, [*launcher, str(script), str(result)]) == 0
    assert [Path(f"{result}.{rank}").read_text() for rank in range(2)] == ["came"] * 2
