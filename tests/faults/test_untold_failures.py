"""A failed operation whose Work nobody waits for is told by the next call, or in the log."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from at_once import at_once
from clocks import until

import nc10d as dist
from nc10d.errors import CollectiveMismatch
from nc10d.group.world import own_world
from nc10d.store import HashStore
from nc10d.work import Work

UNTOLD = "; no call has raised this error"
Logged = Callable[[Callable[[Any], object]], list[str]]


def on_two_ranks(live: Callable[[int], Any]) -> list[Any]:
    """Return the results of `live(rank)`, for two ranks as threads with Worlds of their own."""
    found: list[Any] = [None, None]

    def run(rank: int) -> None:
        with own_world():
            found[rank] = live(rank)

    at_once(lambda: run(0), lambda: run(1))
    return found


def begin(store: HashStore, rank: int) -> Any:
    dist.init_process_group("cpu", store=store, rank=rank, world_size=2, timeout=20.0)
    return dist.group.WORLD


@pytest.fixture
def logged_after(caplog: pytest.LogCaptureFixture) -> Callable[..., list[str]]:
    """Return a function that gives what two ranks log, which both act before either leaves."""

    def run(act: Callable[[Any], object]) -> list[str]:
        store = HashStore()

        def live(rank: int) -> None:
            act(begin(store, rank))
            store.set(f"acted/{rank}", "")
            store.wait(["acted/0", "acted/1"])
            dist.destroy_process_group()

        on_two_ranks(live)
        return [line for line in caplog.messages if line.endswith(UNTOLD)]

    return run


def launch(group: Any) -> Work:
    """Launch an all_reduce that differs between the ranks."""
    return group.all_reduce(np.ones(3 + group.rank), async_op=True)  # type: ignore[no-any-return]


def call(group: Any) -> None:
    launch(group)
    with pytest.raises(CollectiveMismatch):
        group.all_reduce(np.ones(2))


def wait(group: Any) -> None:
    with pytest.raises(CollectiveMismatch):
        launch(group).wait()


def ask(group: Any) -> None:
    work = launch(group)
    until(work.is_completed)
    assert isinstance(work.exception(), CollectiveMismatch)


def see(group: Any) -> None:
    work = launch(group)
    until(work.is_completed)
    assert not work.is_success()


def wait_for_its_future(group: Any) -> None:
    with pytest.raises(CollectiveMismatch):
        launch(group).get_future().wait()


def test_the_end_of_a_group_logs_what_no_call_has_told(logged_after: Logged) -> None:
    logged = logged_after(launch)
    assert logged, "the rank that finds it, and the other one if it has been told by then"
    for line in logged:
        assert "rank 0 called all_reduce(dtype=float64, count=3, op=SUM) at " in line


@pytest.mark.parametrize("tell", [call, wait, ask, see, wait_for_its_future])
def test_what_a_call_has_told_is_not_logged(
    tell: Callable[[Any], object], logged_after: Logged
) -> None:
    assert logged_after(tell) == []


def abort_amid_a_call(group: Any) -> None:
    if group.rank == 0:
        group.all_reduce(np.ones(3), async_op=True)
        group.abort("enough")


def abort_after_the_last_call(group: Any) -> None:
    group.all_reduce(np.ones(3))
    if group.rank == 0:
        group.abort("enough")


@pytest.mark.parametrize("act", [abort_amid_a_call, abort_after_the_last_call])
def test_a_rank_that_aborts_or_has_lost_no_call_logs_nothing(
    act: Callable[[Any], object], logged_after: Logged
) -> None:
    assert logged_after(act) == []


def test_the_last_rank_logs_a_collective_that_another_has_left(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = HashStore()

    def live(rank: int) -> None:
        group = begin(store, rank)
        if rank == 0:
            store.wait(["left"])
            group.all_reduce(np.ones(3), async_op=True)
        dist.destroy_process_group()
        store.set("left", "")

    on_two_ranks(live)
    (line,) = [line for line in caplog.messages if line.endswith(UNTOLD)]
    assert "rank 1 has left group 'world', but rank 0 still waits for it in all_reduce" in line


PROGRAM = """
import sys
import numpy as np, nc10d as dist
dist.init_process_group(timeout=20)
dist.all_reduce(np.ones(3 + dist.get_rank()), async_op=True)
print("launched", flush=True)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [0, 3])
def test_the_exit_tells_what_no_call_has_told_and_keeps_its_code(tmp_path: Path, code: int) -> None:
    script = tmp_path / "never_waits.py"
    script.write_text(PROGRAM)
    run = [sys.executable, "-m", "nc10d.run", "--keep-going", "--nproc-per-node", "2"]
    ended = subprocess.run([*run, script, str(code)], capture_output=True, text=True, timeout=100)
    assert ended.returncode == code, ended.stderr
    assert ended.stdout.count("launched") == 2
    assert re.search(
        f"nc10d: (ranks disagree on operation #1|rank . has left) .*{UNTOLD}", ended.stderr
    )
    assert "Traceback" not in ended.stderr
