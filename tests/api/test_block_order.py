"""A coalescing block has the effect of its calls in order, however their arrays overlap.

Calls are drawn at random; some are messages around the ring. The same calls are made alone, then
in a block, sync and async: every element must be the same.
"""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from overlapping_blocks import CALLS, Call, early, every_way, shares_alone

from nc10d.testing import Ranks


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(3, timeout=30) as found:
        yield found


@settings(max_examples=150, deadline=None)
@given(CALLS, st.sampled_from(["i4", "f8", "i2", "u1"]), st.sampled_from("CF"))
def test_a_block_is_its_calls_in_order(
    ranks: Ranks, calls: list[Call], dtype: str, order: str
) -> None:
    ranks.run(every_way, [calls] * 3, [dtype] * 3, [order] * 3)


def test_a_message_in_a_block_carries_the_result_of_the_call_before_it(ranks: Ranks) -> None:
    calls = [("sum", 0, 0), ("message", 3, 0), ("avg", 4, 0), ("message", 4, 0), ("max", 2, 0)]
    ranks.run(every_way, [calls] * 3, ["f4"] * 3, ["C"] * 3)


def test_ranks_with_disjoint_arrays_follow_a_rank_with_overlapping_arrays(ranks: Ranks) -> None:
    for _ in range(3):
        ranks.run(shares_alone)


@pytest.mark.parametrize("src", [1, None])
def test_an_early_message_waits_for_its_turn(ranks: Ranks, src: int | None) -> None:
    ranks.run(early, [src] * 3)
