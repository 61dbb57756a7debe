"""Ranks that wait for each other in a cycle: each of them gets an error, and no other rank."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import nc10d as dist
from benchmarks.faults.forked_ranks import ForkedRanks, Report
from benchmarks.libraries.nc10d import Nc10d
from nc10d.backend.cpu.control.connections import ControlConnection, Message
from nc10d.errors import DistError
from nc10d.testing.ranks import Ranks

Script = Callable[[list[Any]], object]  # a rank's calls, given the world and its other groups


KEPT: list[Any] = []
"""Groups of a play: a rank that drops a group leaves it, and its peers are told that instead."""


def groups_of(group: Any, others: list[list[int]]) -> list[Any]:
    made = [group, *(dist.new_group(ranks) for ranks in others)]
    KEPT.extend(made)
    group.barrier()
    return made


def x() -> Any:
    return np.ones(4)


def two_groups(groups: list[Any]) -> None:
    world, pair = groups
    first, second = (world, pair) if world.rank == 0 else (pair, world)
    first.all_reduce(x())
    second.all_reduce(x())


def three_groups(groups: list[Any]) -> None:
    rank = groups[0].rank
    mine, next_one = groups[1 + rank], groups[1 + (rank + 1) % 3]
    mine.all_reduce(x())
    next_one.all_reduce(x())


def three_groups_and_late_reports(groups: list[Any]) -> None:
    """Rank 1 sees the end of its data connection to rank 0 long before what rank 0 has reported."""
    if groups[0].rank == 1:
        receive = ControlConnection.receive

        def receive_late(connection: ControlConnection) -> list[Message]:
            threading.Event().wait(0.2)
            return receive(connection)

        ControlConnection.receive = receive_late  # type: ignore[method-assign]
    three_groups(groups)


def both_receive(groups: list[Any]) -> None:
    groups[0].recv(x(), 1 - groups[0].rank)


def message_and_collective(groups: list[Any]) -> None:
    if groups[0].rank == 0:
        groups[0].all_reduce(x())
    else:
        groups[0].recv(x(), 0)


def both_send_what_has_no_room(groups: list[Any]) -> None:
    large = np.ones(1 << 21)
    groups[0].send(large, 1 - groups[0].rank)
    groups[0].recv(large, 1 - groups[0].rank)


def waits_of_asynchronous_calls(groups: list[Any]) -> None:
    world, pair = groups
    first, second = (world, pair) if world.rank == 0 else (pair, world)
    first.all_reduce(x(), async_op=True).wait()
    second.all_reduce(x(), async_op=True).wait()


def others_come_meanwhile(groups: list[Any]) -> None:
    """Ranks 0 and 1 wait for each other; rank 0's notice changes as its host's peers arrive."""
    world, pair = groups
    threading.Event().wait((0.0, 0.19, 0.2, 0.23)[world.rank])
    (pair if world.rank == 1 else world).all_reduce(x())


def waited_in_a_group_that_is_closed(groups: list[Any]) -> None:
    """Rank 1 waits long for rank 0, which reads its notice; later rank 0 waits for rank 1."""
    world, pair = groups
    if world.rank == 1:
        pair.recv(x(), 0)
    else:
        threading.Event().wait(0.3)
        pair.send(x(), 1)
    world.barrier()
    dist.destroy_process_group(pair)
    if world.rank == 0:
        world.recv(x(), 1)
    else:
        threading.Event().wait(0.3)
        world.send(x(), 0)


PAIRS = [[0, 2], [0, 1], [1, 2]]
CYCLES: dict[str, tuple[list[list[int]], Script]] = {
    "two groups": ([[0, 1]], two_groups),
    "three groups": (PAIRS, three_groups),
    "both receive": ([], both_receive),
    "message and collective": ([], message_and_collective),
    "both send": ([], both_send_what_has_no_room),
    "asynchronous": ([[0, 1]], waits_of_asynchronous_calls),
}
LATE_REPORTS = {"late reports": (PAIRS, three_groups_and_late_reports)}
OTHERS: dict[str, tuple[list[list[int]], Script]] = {
    "others come": ([[0, 1]], others_come_meanwhile),
    "waited before": ([[0, 1]], waited_in_a_group_that_is_closed),
}
PLAYS = [
    *[(name, "aaa" if name == "three groups" else "aa") for name in CYCLES],
    *[(name, "ab") for name in CYCLES if name not in ("three groups", "both send")],
    *[("three groups", hosts) for hosts in ("aab", "abb", "abc")],
    ("late reports", "abc"),
]
"""Cycles, and the host (a letter) of each rank."""
MEANWHILE, BEFORE = len(PLAYS), len(PLAYS) + 1
"""The indices of the reports on OTHERS."""


def main() -> None:
    """Play all scripts in processes forked from this; print the ranks' reports."""
    library = Nc10d()
    library.warm()
    for number, (name, hosts) in enumerate(
        [*PLAYS, ("others come", "abaa"), ("waited before", "ab")]
    ):
        part = partial(waits, library, number, name, hosts)
        print(json.dumps(ForkedRanks(len(hosts)).play(part, len(hosts), 60.0).reports))


def waits(
    library: Nc10d, number: int, name: str, hosts: str, ranks: ForkedRanks, rank: int
) -> Report | None:
    os.environ["NC10D_HOST_ID"] = hosts[rank]
    library.join(number, rank, ranks.size, 120.0)
    others, script = (CYCLES | LATE_REPORTS | OTHERS)[name]
    groups = groups_of(dist.get_default_group(), others)
    start = time.monotonic()
    try:
        script(groups)
    except DistError as error:
        return {"late": time.monotonic() - start, **library.describe(error)}
    return {"late": 0.0, "message": "nothing"}


@pytest.fixture(scope="module")
def played() -> list[list[Report]]:
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    "play", range(len(PLAYS)), ids=["-".join(name_and_hosts) for name_and_hosts in PLAYS]
)
def test_a_cycle_is_reported_to_all_its_ranks_long_before_the_timeout(
    played: list[list[Report]], play: int
) -> None:
    reports, size = played[play], len(PLAYS[play][1])
    assert sorted(report["rank"] for report in reports) == [*range(size)]
    assert len({report["message"] for report in reports}) == 1
    for report in reports:
        assert report["kind"] == "CollectiveMismatch", report
        assert report["late"] < 30
        for rank in range(size):
            assert f"rank {rank} waits in" in report["message"]
            assert f"for rank {rank}" in report["message"]
        assert report["message"].count("test_wait_cycles.py:") == size
        if PLAYS[play][0] == "both receive":
            assert (report["op"], report["seq"]) == ("recv", 1)


def test_a_new_notice_of_the_same_wait_is_reported(played: list[list[Report]]) -> None:
    reports = played[MEANWHILE]
    assert [report["kind"] for report in reports] == ["CollectiveMismatch"] * 4
    assert len({report["message"] for report in reports}) == 1
    assert max(report["late"] for report in reports) < 30


def test_no_rank_is_accused_for_a_wait_that_has_ended(played: list[list[Report]]) -> None:
    assert [report["message"] for report in played[BEFORE]] == ["nothing"] * 2


def comes_late(group: Any, by_thread: bool) -> bool:
    """Rank 1 waits in a group; rank 0 joins late, in its main thread or in another thread."""
    world, pair = groups_of(group, [[0, 1]])
    y, never = x(), threading.Event()

    def missing() -> None:
        never.wait(0.5)
        pair.all_reduce(y)

    if group.rank == 1:
        pair.all_reduce(y)
        world.all_reduce(x())
    elif by_thread:
        other = threading.Thread(target=missing)
        other.start()
        world.all_reduce(x())
        other.join()
    else:
        missing()
        world.all_reduce(x())
    return bool((y == 2).all())


@pytest.mark.parametrize("by_thread", [False, True])
def test_no_rank_is_accused_while_a_peer_may_still_arrive(by_thread: bool) -> None:
    with Ranks(2, "processes", timeout=60.0) as ranks:
        assert ranks.run(comes_late, [by_thread] * 2) == [True, True]


def wait_for_no_rank(group: Any) -> str:
    groups, never = groups_of(group, [[0, 1]]), threading.Event()
    group.timeout = 1.0
    if group.rank == 0:
        with pytest.raises(DistError) as caught:
            groups[0].all_reduce(x())
        return str(caught.value)
    while (failure := group.backend("cpu").failure()) is None:
        never.wait(0.02)  # this rank neither waits for a rank nor calls
    return str(failure)


def test_a_rank_that_waits_for_no_rank_is_late_and_in_no_cycle() -> None:
    with Ranks(2, "processes", timeout=60.0) as ranks:
        messages = ranks.run(wait_for_no_rank)
    assert all("timed out on rank 0 after" in message for message in messages)


if __name__ == "__main__":
    main()
