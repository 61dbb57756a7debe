"""After deaths at any time, the survivors agree on the remaining ranks and go on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from control_groups import ControlGroup
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import Job, all_say
from on_ranks import on_ranks

import nc10d as dist
from nc10d.backend.config import BackendConfig
from nc10d.base.deadline import Deadline
from nc10d.errors import Aborted, DistError, GroupClosed
from nc10d.group import shrink
from nc10d.group.shrink import ShrinkAttempt
from nc10d.store import HashStore
from nc10d.testing import run_local, run_ranks

# ---- the survivors -------------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(size=st.integers(2, 5), data=st.data())
def test_all_callers_get_the_same_list_without_dead_ranks(size: int, data: st.DataObject) -> None:
    ranks = st.sampled_from(range(size))
    dead = data.draw(st.sets(ranks, max_size=size - 1))
    alive = [rank for rank in range(size) if rank not in dead]
    with ControlGroup(size) as group, ThreadPoolExecutor(size) as pool:
        answers = [pool.submit(group.attempt(r).agree, Deadline.after(30.0)) for r in alive]
        for rank in dead:
            group.members[rank].die()
        assert [answer.result(30) for answer in answers] == [alive] * len(alive)


def test_a_rank_that_calls_late_is_left_out_and_gets_the_same_list() -> None:
    with ControlGroup(3) as group:
        group.members[1].die()
        assert group.attempt(0).agree(Deadline.after(0.1)) == [0]
        assert group.attempt(2).agree(Deadline.after(30.0)) == [0]


@settings(deadline=None, max_examples=30)
@given(
    fates=st.lists(st.sampled_from(["made", "failed", "dead", "silent"]), min_size=2, max_size=5)
)
def test_a_group_is_made_on_all_of_its_members_or_on_none(fates: list[str]) -> None:
    members = [*range(len(fates))]
    until = Deadline.after(0.05 if "silent" in fates else 30.0)

    def ask(attempt: ShrinkAttempt, made: bool) -> tuple[bool, set[int]]:
        return attempt.confirm(members, made, until), attempt.lost

    with (
        pytest.MonkeyPatch.context() as patch,
        ControlGroup(len(fates)) as group,
        ThreadPoolExecutor(len(fates)) as pool,
    ):
        patch.setattr(shrink, "_GRACE_SECONDS", 0.05)  # a silent rank stays silent here
        for rank, fate in enumerate(fates):
            if fate == "dead":
                group.members[rank].die()
        asking = [rank for rank in members if fates[rank] in ("made", "failed")]
        answers = [pool.submit(ask, group.attempt(r), fates[r] == "made") for r in asking]
        results = [answer.result(30) for answer in answers]
        assert [made for made, _ in results] == [set(fates) == {"made"}] * len(asking)
        assert all(lost == results[0][1] for _, lost in results), "all blame the same ranks"


# ---- the group -----------------------------------------------------------------------------------


def work_on(group: Any) -> Any:
    """Use a group in every way, and return a result."""
    x = np.full(70_000, float(group.rank + 1))
    group.all_reduce(x)
    peer = (group.rank + 1) % group.size
    got = np.zeros(3)
    works = [group.isend(np.full(3, float(group.rank)), peer), group.irecv(got, None)]
    for work in works:
        work.wait()
    sub = dist.new_group([0, group.size - 1])
    if group.rank in (0, group.size - 1):
        sub.barrier()
    return x[0]


def excluding(group: Any, shrunk: threading.Event) -> Any:
    group.barrier()
    if group.rank == 1:
        shrunk.wait(30)
        with pytest.raises(Aborted, match=r"gone on without rank 1: they are \[0, 2\]"):
            dist.shrink_group()
        return None
    new = dist.shrink_group([1])
    assert dist.GroupMember.WORLD is new
    assert (new.rank, new.size, [*new.ranks]) == (0 if group.rank == 0 else 1, 2, [0, 1])
    assert (dist.get_rank(), dist.get_world_size()) == (new.rank, 2)
    with pytest.raises(DistError):
        group.barrier()
    result = work_on(new)
    shrunk.set()
    return result


def test_a_live_rank_that_is_left_out_gets_an_error() -> None:
    assert run_ranks(excluding, 3, "threads", [threading.Event()] * 3) == [3.0, None, 3.0]


@on_ranks(2)
def test_mistakes_are_refused_and_the_group_goes_on(world: Any) -> None:
    with pytest.raises(ValueError, match="can't exclude itself"):
        dist.shrink_group([world.rank])
    with pytest.raises(ValueError, match="has no rank 7"):
        dist.shrink_group([7])
    with pytest.raises(TypeError, match="must be an integer"):
        dist.shrink_group(["x"])  # type: ignore[list-item]
    with dist.coalescing_manager(), pytest.raises(ValueError, match="coalescing block"):
        dist.shrink_group()
    world.barrier()


def test_a_backend_that_can_not_shrink_raises() -> None:
    def ask(group: Any) -> None:
        with pytest.raises(TypeError, match="can't shrink"):
            dist.shrink_group()

    run_local(ask, 1)


def test_a_group_without_a_backend_for_the_cpu_raises() -> None:
    config = BackendConfig("cuda:staged")
    group = dist.ProcessGroup("staged", [0], 0, HashStore(), 10.0, config)
    with pytest.raises(TypeError, match=r"'cuda:staged' of .* can't shrink"):
        dist.shrink_group(group=group)


def test_ctrl_c_in_the_last_vote_closes_what_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    successor = dist.ProcessGroup.successor

    def make(*arguments: Any) -> Any:
        made.append(successor(*arguments))
        return made[-1]

    def press(attempt: ShrinkAttempt, *arguments: Any) -> bool:
        raise KeyboardInterrupt

    def ask(group: Any) -> None:
        with pytest.raises(KeyboardInterrupt):
            dist.shrink_group()

    monkeypatch.setattr(dist.ProcessGroup, "successor", make)
    monkeypatch.setattr(ShrinkAttempt, "confirm", press)
    run_ranks(ask, 1)
    with pytest.raises(GroupClosed):
        made[0].barrier()


def subgroup(group: Any) -> Any:
    sub = dist.new_group([0, 2, 3])
    if group.rank == 1:
        return None
    if group.rank == 3:
        dist.destroy_process_group(sub)
        return None
    smaller = dist.shrink_group(group=sub)
    assert [*smaller.ranks] == [0, 2], "global ranks stay what they were"
    assert dist.GroupMember.WORLD is group
    x = np.ones(2)
    smaller.all_reduce(x)
    return x[0]


def test_a_sub_group_shrinks_for_itself() -> None:
    assert run_ranks(subgroup, 4) == [2.0, None, 2.0, None]


SURVIVES = """
import json, os, signal, sys, time
from functools import partial
import numpy as np
import nc10d as dist
from benchmarks.libraries.nc10d import Nc10d
from benchmarks.faults.forked_ranks import ForkedRanks


def part(number, names, victims, ranks, rank):
    if names:
        os.environ["NC10D_HOST_ID"] = names[rank]
    library.join(number, rank, ranks.size, 60.0)
    x, took = np.ones(1000), []
    for victim in victims:
        try:
            if rank == victim:
                dist.all_reduce(x)
                os.kill(os.getpid(), signal.SIGKILL)
            while True:
                dist.all_reduce(x)
                x[:] = 1
        except dist.PeerLost as error:
            began = time.monotonic()
            group = dist.shrink_group()
            took.append(time.monotonic() - began)
    x = np.full(5, dist.get_rank() + 1.0)
    dist.all_reduce(x)
    dist.destroy_process_group()
    return {"size": group.size, "sum": x[0], "took": max(took)}


library = Nc10d()
library.warm()
for number, (names, victims) in enumerate(json.loads(sys.argv[1])):
    played = ForkedRanks(4).play(partial(part, number, names, victims), 4 - len(victims), 60.0)
    print(json.dumps([played.codes, played.reports]))
"""
LOSSES: list[tuple[str, list[int]]] = [
    ("", [0]),
    ("", [3]),
    ("", [1, 0, 3]),
    ("aabb", [0]),
    ("abab", [3]),
    ("aaab", [3]),
    ("aabb", [2, 3]),
]
"""Host names of ranks, a letter each (empty: a single host), and the ranks to kill in order."""


@pytest.fixture(scope="module")
def survived() -> list[Any]:
    command = [sys.executable, "-c", SURVIVES, json.dumps(LOSSES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # Sources that have changed since the cache was warmed are compiled by the first process.
    assert [line for line in done.stderr.splitlines() if "compiling" not in line] == []
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("case", range(len(LOSSES)), ids=[f"{n}{v}" for n, v in LOSSES])
def test_survivors_go_on_after_each_kill(survived: list[Any], case: int) -> None:
    victims = LOSSES[case][1]
    codes, reports = survived[case]
    assert codes == [-9 if rank in victims else 0 for rank in range(4)]
    left = [rank for rank in range(4) if rank not in victims]
    assert sorted(report["rank"] for report in reports) == left
    for report in reports:
        assert report["size"] == len(left)
        assert report["sum"] == sum(range(1, len(left) + 1))


def test_shrinking_takes_less_than_a_second(survived: list[Any]) -> None:
    """Some attempts are slow on a busy machine, so at least one must keep the documented bound."""
    took = [max(report["took"] for report in reports) for _, reports in survived]
    assert min(took) < 1.0


STORELESS = """
port = PORT
os.environ["NC10D_HOST_ID"] = NAMES[rank]
group = join(60.0)
group.barrier()
say("ready")
try:
    while True:
        dist.all_reduce(np.ones(10))
except dist.PeerLost as error:
    say("lost", error.rank)
hear()
new = dist.shrink_group()
x = np.ones(3)
dist.all_reduce(x)
say("goes on with", new.size, x[0])
try:
    dist.new_group([0, 1])
except dist.StoreError as error:
    say("no new group:", error)
dist.all_reduce(x)
say("still", x[0])
hear()
"""


@pytest.mark.parametrize("names", ["aaaa", "aabb", "abca"])
def test_shrinking_needs_neither_the_store_nor_its_host(names: str) -> None:
    """Kill rank 0 and the store's server with it, as if their host were lost."""
    command = [sys.executable, "-m", "nc10d.store", "--host", "127.0.0.1", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline().split(":")[-1])
        code = STORELESS.replace("NAMES", repr(names)).replace("PORT", str(port))
        with Job(code, 4) as ranks:
            all_say(ranks, "ready")
            server.kill()
            ranks[0].kill(signal.SIGKILL)
            all_say(ranks[1:], "lost 0")
            for rank in ranks[1:]:
                rank.tell("go on")
            for rank in ranks[1:]:
                assert rank.line() == "goes on with 3 3.0"
                assert f"127.0.0.1:{port}" in rank.line()
                assert rank.line() == "still 9.0"
                rank.tell("end")
            assert [rank.ended() for rank in ranks[1:]] == [0, 0, 0]


STOPS = """
from nc10d.group import shrink
from nc10d.errors import Aborted

shrink.PATIENCE = 0.5
asked = MOMENT


def stopping(*arguments):
    os.kill(os.getpid(), signal.SIGSTOP)
    return asked(*arguments)


if rank == 2:
    MOMENT = stopping
group = join()
try:
    new = dist.shrink_group(timeout=0.5)
except Aborted as error:
    say(error)
else:
    x = np.ones(3)
    dist.all_reduce(x)
    say("goes on with", new.size, x[0])
hear()
"""


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["dist.ProcessGroup.successor", "shrink.ShrinkAttempt.confirm"])
def test_a_rank_that_stops_while_ranks_shrink_delays_them_no_longer_than_the_timeout(
    moment: str,
) -> None:
    """A rank stops before the group forms or afterwards: no survivor goes on with it."""
    with Job(STOPS.replace("MOMENT", moment), 3) as ranks:
        assert [rank.line() for rank in ranks[:2]] == ["goes on with 2 2.0"] * 2
        ranks[2].kill(signal.SIGCONT)
        assert "gone on without rank 2: they are [0, 1]" in ranks[2].line()
        for rank in ranks:
            rank.tell("go")
            assert rank.ended() == 0
