"""PREMUL_SUM by ever new factors: a communicator keeps few of NCCL's operators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from device_ranks import afresh, full, value
from emulated import emulated_ranks, needs_emulators

from nc10d.group.process_group import ProcessGroup
from nc10d.ops import premul_sum
from nc10d.testing import Ranks

pytestmark = needs_emulators
MANY = 100
"""More than the emulator's MOST_OPS (calls.c)."""


def factors_may_be_many(group: ProcessGroup) -> None:
    """A plan and a cached launch are made anew when their operator is gone."""
    planned, known = full(group, 1.0), full(group, 1.0)
    group.all_reduce(planned)
    with group.coalescing_manager() as block:
        group.all_reduce(planned, premul_sum(2.0))
    plan, times = block.plan(), 1
    for turn in range(MANY):
        x = full(group, 1.0)
        group.all_reduce(x, premul_sum(1 + turn / 8))
        assert value(x) == 1 + turn / 8
        if not turn % 10:
            plan.launch()
            group.all_reduce(known, premul_sum(2.0))
            times += 1
            assert (value(planned), value(known)) == (2.0**times, 2.0 ** (times - 1))


def a_block_may_have_more_factors_than_are_kept(group: ProcessGroup) -> None:
    group.all_reduce(full(group, 1.0))
    for first in range(1, 200, 50):
        arrays = [full(group, 1.0) for _ in range(40)]
        for _ in range(2):
            with group.coalescing_manager():
                for place, x in enumerate(arrays):
                    group.all_reduce(x, premul_sum(float(first + place)))
        assert [value(x) for x in arrays] == [float(first + k) ** 2 for k in range(40)]


LAWS = [factors_may_be_many, a_block_may_have_more_factors_than_are_kept]


@pytest.fixture(scope="module", params=["0", "1"], ids=["blocking", "nonblocking"])
def one(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    given = {"NC10D_NCCL_NONBLOCKING": request.param, "NC10D_EMULATED_GPUS": "1"}
    with emulated_ranks(1, **given) as ranks:
        yield ranks


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_operators_are_made_and_destroyed(one: Ranks, law: Callable[[Any], None]) -> None:
    one.run(afresh, [law])
