"""The CPU backend against the oracle: any collectives, any mode, threads and processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nc10d as dist
from nc10d.testing.ranks import Ranks
from nc10d.testing.reference import same_bits
from nc10d.testing.strategies import CollectiveCall, issue, outputs, programs, worlds

MODES = ("sync", "async", "coalesced", "alternating")
At = Callable[..., Ranks]
relaxed = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def perform(group: Any, ops: list[Any], mode: str) -> list[list[Any]]:
    """Carry out a rank's operations in a mode; return the arrays they wrote."""
    if mode == "coalesced":
        with dist.coalescing_manager(group):
            for op in ops:
                issue(group, op)
    else:
        works = []
        for index, op in enumerate(ops):
            later = mode == "async" or (mode == "alternating" and index % 2 == 0)
            work = issue(group, op, later)
            if later:
                works.append(work)
        for work in works:
            work.wait()
    return [outputs(op) for op in ops]


def agree(got: list[list[list[Any]]], calls: list[CollectiveCall]) -> None:
    """Compare each rank's arrays, call by call, with the oracle: bit for bit."""
    for index, call in enumerate(calls):
        for rank, wanted in enumerate(call.expected()):
            for mine, right in zip(got[rank][index], wanted, strict=True):
                assert same_bits(mine, right), (call.kind.__name__, call.op, rank, mine, right)


@relaxed
@given(data=st.data(), size=worlds(5), mode=st.sampled_from(MODES))
def test_threads_agree_with_the_oracle(ranks_of: At, data: Any, size: int, mode: str) -> None:
    calls = data.draw(programs(size))
    ops = [[call.make(rank) for call in calls] for rank in range(size)]
    agree(ranks_of(size).run(perform, ops, [mode] * size), calls)


@settings(relaxed, max_examples=40)
@given(data=st.data(), size=st.sampled_from([2, 3]), mode=st.sampled_from(MODES))
def test_processes_agree_with_the_oracle(ranks_of: At, data: Any, size: int, mode: str) -> None:
    calls = data.draw(programs(size))
    ops = [[call.make(rank) for call in calls] for rank in range(size)]
    agree(ranks_of(size, "processes").run(perform, ops, [mode] * size), calls)
