"""A failed operation whose Work nobody waits for is told by the next call, or in the log."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from at_once import at_once

import nc10d as dist
from nc10d.errors import CollectiveMismatch
from nc10d.group.world import own_world
from nc10d.store import HashStore
from nc10d.work import Work

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
        return caplog.messages

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
    while not work.is_completed():
        pass
    assert isinstance(work.exception(), CollectiveMismatch)


def see(group: Any) -> None:
    work = launch(group)
    while not work.is_completed():
        pass
    assert not work.is_success()


def wait_for_its_future(group: Any) -> None:
    with pytest.raises(CollectiveMismatch):
        launch(group).get_future().wait()


def test_the_end_of_a_group_logs_what_no_call_has_told(logged_after: Logged) -> None:
    logged = logged_after(launch)
    assert len(logged) == 2
    for line in logged:
        assert "rank 0 called all_reduce(dtype=float64, count=3, op=SUM) at " in line
        assert line.endswith("; nobody has waited for it")


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
    assert "nc10d: ranks disagree on operation #1" in ended.stderr
    assert "nobody has waited for it" in ended.stderr
    assert "Traceback" not in ended.stderr
