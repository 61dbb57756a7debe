"""The rank that the launcher reports when a rank breaks a collective."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

Launch = Callable[..., "subprocess.CompletedProcess[str]"]

# The survivors fail within milliseconds, because of rank 2. Where rank 2 raises, they learn of it
# before its process has ended, which may take seconds.
DIE = """
    import atexit, os, signal, sys, time
    teardown = []
    atexit.register(lambda: time.sleep(sum(teardown)))  # the last to run
    import numpy as np
    import nc10d as dist

    dist.init_process_group()
    x = np.ones(1000)
    for step in range(1000):
        if step == 100 and dist.get_rank() == 2:
            {how}
        dist.all_reduce(x, op=dist.ReduceOp.MAX)
"""


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "SIGKILL"),
        ("raise ValueError('the bug')", 1, "exit code 1"),
        ("teardown.append(2.5); raise ValueError('the bug')", 1, "exit code 1"),
        ("dist.destroy_process_group(); raise ValueError('the bug')", 1, "exit code 1"),
        ("sys.exit(3)", 3, "exit code 3"),
    ],
)
def test_the_rank_that_broke_the_collective_is_reported(
    launch: Launch, script: Callable[[str], str], how: str, code: int, words: str
) -> None:
    done = launch("--nproc-per-node", "4", script(DIE.format(how=how)))
    assert done.returncode == code, done.stderr
    assert f"nc10d-run: rank 2 failed with {words}" in done.stderr
    assert done.stderr.count("nc10d-run: rank ") == 1


WRONG_SHAPE = """
    import numpy as np
    import nc10d as dist

    dist.init_process_group()

    def step():
        work = dist.all_reduce(np.ones(4 - dist.get_rank() % 2), async_op=True)
        work.wait()

    step()
"""


def test_the_errors_of_three_ranks_fit_on_a_screen(
    launch: Launch, script: Callable[[str], str]
) -> None:
    path = script(WRONG_SHAPE)
    done = launch("--nproc-per-node", "3", path)
    lines = done.stderr.splitlines()
    for rank in range(3):
        said = [line for line in lines if line.startswith(f"[rank {rank}] ")]
        assert 0 < len(said) <= 12, done.stderr
        assert sum("ranks disagree" in line for line in said) == 1
    first, cause = [line for line in lines if not line.startswith("[rank ")]
    assert first.startswith("nc10d-run: rank ")
    assert cause.startswith(f"nc10d-run: {path}:9: nc10d.errors.CollectiveMismatch: ranks disagree")
