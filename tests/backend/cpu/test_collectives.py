"""The CPU backend against the oracle: any collectives, any mode, threads and processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nc10d as dist
from nc10d.testing.ranks import Kind, Ranks
from nc10d.testing.reference import same_bits
from nc10d.testing.strategies import CollectiveCall, issue, outputs, programs, worlds

MODES = ("sync", "async", "coalesced", "alternating")
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


class Pools:
    """Ranks kept alive between examples, by kind and world size."""

    def __init__(self) -> None:
        self._ranks: dict[tuple[Kind, int], Ranks] = {}

    def get(self, kind: Kind, size: int) -> Ranks:
        key = (kind, size)
        if key not in self._ranks:
            self._ranks[key] = Ranks(size, kind)
        return self._ranks[key]

    def close(self) -> None:
        for ranks in self._ranks.values():
            ranks.close()


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    found = Pools()
    yield found
    found.close()


@relaxed
@given(data=st.data(), size=worlds(5), mode=st.sampled_from(MODES))
def test_threads_agree_with_the_oracle(pools: Pools, data: Any, size: int, mode: str) -> None:
    calls = data.draw(programs(size))
    ops = [[call.make(rank) for call in calls] for rank in range(size)]
    agree(pools.get("threads", size).run(perform, ops, [mode] * size), calls)


@settings(relaxed, max_examples=40)
@given(data=st.data(), size=st.sampled_from([2, 3]), mode=st.sampled_from(MODES))
def test_processes_agree_with_the_oracle(pools: Pools, data: Any, size: int, mode: str) -> None:
    calls = data.draw(programs(size))
    ops = [[call.make(rank) for call in calls] for rank in range(size)]
    agree(pools.get("processes", size).run(perform, ops, [mode] * size), calls)
