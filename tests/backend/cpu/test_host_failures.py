"""A failure on a host reaches the ranks of all hosts: the same single cause everywhere."""

from __future__ import annotations

import queue
import re
import signal
import time
from typing import Any

import numpy as np
import pytest
from failing_calls import CALLS, caught, stand_aside
from jobs import Job, all_say
from lettered_hosts import ranks_on

from nc10d.backend.cpu.engine.call_sites import text_at
from nc10d.errors import Aborted, CollectiveMismatch, CollectiveTimeout, DistError


def same_on_all(errors: list[DistError], kind: type[DistError]) -> DistError:
    assert all(isinstance(error, kind) for error in errors), errors
    assert len({str(error) for error in errors}) == 1, errors
    return errors[0]


def sends_another(group: Any, taken_aside: bool, count: int) -> DistError:
    """Rank 0 sends other than rank 1 receives, maybe behind a message that is received before."""
    x = np.ones(count)

    def exchange(group: Any) -> None:
        if group.rank == 0:
            group.send(x, 1, tag=5)
        if taken_aside and group.rank == 0:
            group.send(x, 1, tag=6)
        elif taken_aside:
            group.recv(x, 0, tag=6)
        if group.rank == 1:
            group.recv(np.ones(count, np.int32), 0, tag=5)
        group.barrier()

    return caught(group, exchange)


@pytest.mark.parametrize("count", [4, 1 << 20])
@pytest.mark.parametrize("taken_aside", [False, True])
def test_a_mismatch_of_message_sizes_names_both_lines(taken_aside: bool, count: int) -> None:
    with ranks_on("ab") as ranks:
        errors = ranks.run(sends_another, [taken_aside] * 2, [count] * 2)
    message = str(same_on_all(errors, CollectiveMismatch))
    line = re.escape(text_at(__file__, 0).removesuffix(":0")) + r":\d+"
    assert re.search(rf"{8 * count} bytes of float64.* at {line}", message)
    assert re.search(rf"{4 * count} bytes of int32.* at {line}", message)


SHAPES = ["ab", "aab", "aabb", "abc", "abca"]


@pytest.mark.parametrize("names", SHAPES)
@pytest.mark.parametrize("other", ["dtype", "count", "root", "large", "gather", "barrier"])
def test_calls_that_disagree_are_an_error_on_every_rank(other: str, names: str) -> None:
    def call(group: Any) -> None:
        CALLS[other if group.rank == group.size - 1 else "all_reduce"](group)

    with ranks_on(names) as ranks:
        errors = ranks.run(lambda group: caught(group, call))
    error = same_on_all(errors, CollectiveMismatch)
    assert "all_reduce(dtype=float64, count=4, op=SUM)" in str(error)


@pytest.mark.parametrize("names", SHAPES)
def test_a_timeout_names_the_missing_rank_on_every_rank(names: str) -> None:
    def call(group: Any) -> DistError:
        if group.rank == group.size - 1:
            return stand_aside(group)
        return caught(group, lambda g: g.all_reduce(np.ones(4)))

    with ranks_on(names, timeout=1.0) as ranks:
        errors = ranks.run(call)
    error = same_on_all(errors, CollectiveTimeout)
    assert error.op == "all_reduce"
    assert "timed out on rank" in str(error)


@pytest.mark.parametrize("names", SHAPES)
@pytest.mark.parametrize("who", [0, -1])
def test_an_abort_ends_every_ranks_wait_at_once(names: str, who: int) -> None:
    def call(group: Any) -> tuple[DistError, float]:
        start = time.monotonic()
        if group.rank == who % group.size:
            group.abort("enough of this")
            return caught(group, lambda g: g.barrier()), 0.0
        return caught(group, lambda g: g.barrier()), time.monotonic() - start

    with ranks_on(names) as ranks:
        outcomes = ranks.run(call)
    error = same_on_all([error for error, _ in outcomes], Aborted)
    assert "enough of this" in str(error)
    assert max(seconds for _, seconds in outcomes) < 10.0, "it is not the group's timeout"


def test_the_first_of_many_causes_wins_on_all_hosts() -> None:
    def call(group: Any) -> DistError:
        group.backend("cpu").abort(Aborted(f"rank {group.rank} says so"))
        return caught(group, lambda g: g.barrier())

    with ranks_on("aabbcc") as ranks:
        same_on_all(ranks.run(call), Aborted)


def test_the_error_for_a_departed_ranks_message_names_the_receive() -> None:
    def call(group: Any) -> BaseException | None:
        group.barrier()
        if group.rank == 0:
            group.backend("cpu").close()
            return None
        return caught(group, lambda g: g.recv(np.ones(4), 0))

    with ranks_on("ab") as ranks:
        error = ranks.run(call)[1]
    assert "still waits for it in recv" in str(error)


APART = """
os.environ["NC10D_HOST_ID"] = {names!r}[rank]
group = join(timeout={timeout})
x = np.ones({count})
group.all_reduce(x)
say("ready")
start = time.monotonic()
try:
    while True:
        group.all_reduce(x)
except dist.DistError as error:
    say(type(error).__name__, error.rank, str(error))
"""


def job(names: str, count: int = 1 << 16, timeout: float = 60.0) -> Job:
    return Job(APART.format(names=names, count=count, timeout=timeout), len(names))


@pytest.mark.parametrize(
    ("names", "count"),
    [
        ("ab", 1 << 16),
        ("abc", 1 << 16),
        ("aabb", 1 << 20),
        pytest.param("aab", 1 << 16, marks=pytest.mark.long),
        pytest.param("aabb", 1 << 16, marks=pytest.mark.long),
    ],
)
def test_a_killed_rank_is_named_on_every_host_at_once(names: str, count: int) -> None:
    with job(names, count) as ranks:
        all_say(ranks, "ready")
        start = time.monotonic()
        ranks[-1].kill()
        messages = {rank.line() for rank in ranks[:-1]}
        assert time.monotonic() - start < 30.0, "it is not the group's timeout"
    (text,) = messages
    assert text.startswith(f"PeerLost {len(names) - 1} "), text
    assert f"pid {ranks[-1].pid}" in text


@pytest.mark.slow
def test_a_stopped_rank_is_only_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NC10D_PEER_TIMEOUT", "3")
    with job("ab", count=1 << 20) as ranks:
        all_say(ranks, "ready")
        ranks[1].kill(signal.SIGSTOP)
        with pytest.raises(queue.Empty):  # longer than a vanished host would last
            ranks[0].line(5.0)
        ranks[1].kill(signal.SIGCONT)
        ranks[1].kill(signal.SIGTERM)
        assert ranks[0].line(10.0).startswith("PeerLost 1 ")
