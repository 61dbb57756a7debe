"""The dependencies between the operations of a block: pure functions."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nc10d.backend.polled.block_order import dependencies_of
from nc10d.ops import AllGather, AllReduce, Barrier, Broadcast, Recv, Send

BASE = np.zeros(24)
slices = st.builds(slice, st.integers(0, 23), st.integers(1, 24))
calls = st.tuples(st.sampled_from([AllReduce, Send, Recv]), slices)


def make(kind: Any, part: slice) -> Any:
    return kind(BASE[part]) if kind is AllReduce else kind(BASE[part], 0)


@given(st.lists(calls, min_size=1, max_size=6))
def test_an_operation_waits_for_all_earlier_ones_that_share_what_either_writes(
    drawn: list[tuple[Any, slice]],
) -> None:
    found = dependencies_of([make(*call) for call in drawn])
    for place, (kind, part) in enumerate(drawn):
        for earlier, (other, theirs) in enumerate(drawn[:place]):
            shared = set(range(24)[part]) & set(range(24)[theirs])
            expected = bool(shared) and (kind, other) != (Send, Send)
            assert (earlier in found.get(place, ())) == expected


def test_reading_together_is_free_and_writing_is_not() -> None:
    x, y = np.zeros(3), np.zeros(3)
    outs = [np.zeros(3) for _ in range(4)]
    assert dependencies_of([AllGather(outs[:2], x), AllGather(outs[2:], x), Barrier()]) == {}
    assert dependencies_of([Broadcast(x, 0), AllGather([y, outs[0]], x)]) == {1: {0}}
