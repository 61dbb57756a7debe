"""Errors for a caller's mistakes name the call, the argument and the requirement."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wrong_calls import RANK, SIZE, WRONG, float_lists, floats, frozen, shared

from nc10d.arrays.arguments import LARGEST_TAG
from nc10d.arrays.validate import validate
from nc10d.ops import (
    SUM,
    AllGather,
    AllReduce,
    AllToAll,
    Barrier,
    Broadcast,
    Gather,
    Recv,
    Reduce,
    ReduceScatter,
    Scatter,
    Send,
)

ROOT = Path(__file__).parents[2]
GOOD = [
    AllReduce(floats(4)),
    AllReduce(floats(0)),
    AllReduce(np.array(1.0)),
    AllReduce(np.zeros((4, 4))[::2, ::-1]),
    Reduce(frozen(4), 0),
    Reduce(floats(4), np.int64(1)),
    Broadcast(frozen(4), RANK),
    AllGather(floats(12), floats(4)),
    AllGather(shared, shared[4:8]),
    AllGather(np.zeros((3, 2, 2), np.float32), floats(4)),
    AllGather(float_lists(1, 4, 0), floats(4)),
    AllGather([shared[0:1], shared[4:8], shared[8:9]], shared[4:8]),
    AllGather([np.zeros((4, 3), np.float32)[:, i] for i in range(3)], floats(4)),
    ReduceScatter(floats(4), floats(12)),
    ReduceScatter(shared[4:8], shared),
    ReduceScatter(floats(4), float_lists(1, 4, 7)),
    ReduceScatter(shared[4:8], [shared[0:1], shared[4:8], shared[8:9]]),
    AllToAll(floats(6), floats(6)),
    AllToAll(floats(5), floats(6), [1, 2, 2], [3, 2, 1]),
    AllToAll(floats(0), floats(0)),
    AllToAll(float_lists(1, 2, 3), float_lists(3, 2, 0)),
    Gather(None, floats(4), 0),
    Gather(float_lists(1, 4, 2), floats(4), RANK),
    Scatter(floats(4), None, 0),
    Scatter(floats(4), float_lists(1, 4, 2), RANK),
    Send(frozen(4), 0),
    Recv(floats(4), None, 7),
    Recv(floats(4), None, LARGEST_TAG),
    Barrier(),
]


@pytest.mark.parametrize("op", GOOD, ids=repr)
def test_valid_operations_pass(op: Any) -> None:
    validate(op, RANK, SIZE)


NO_CALLS: Any = [
    (object(), TypeError, "unknown operation"),
    (
        AllToAll(float_lists(1, 1, 1), float_lists(1, 1, 1), [1, 1, 1]),
        ValueError,
        "split sizes are for arrays",
    ),
]
"""Mistakes that no call can make."""


@pytest.mark.parametrize(("op", "error", "message"), [*WRONG, *NO_CALLS])
def test_mistakes_are_named(op: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        validate(op, RANK, SIZE)


@given(st.integers(0, 4), st.integers(0, 12), st.integers(0, 20), st.integers(0, 2))
def test_all_gather_in_the_same_memory_passes_only_in_place_or_disjoint(
    count: int, start: int, begin: int, rank: int
) -> None:
    memory = np.arange(24.0)
    whole, piece = memory[start : start + 3 * count], memory[begin : begin + count]
    apart = begin >= start + 3 * count or begin + count <= start
    in_place = begin == start + rank * count
    op = AllGather(whole, piece)
    if apart or in_place or not count:
        validate(op, rank, 3)
    else:
        with pytest.raises(ValueError, match="must not share memory"):
            validate(op, rank, 3)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.data())
def test_splits_pass_exactly_if_they_add_up(splits: list[int], data: st.DataObject) -> None:
    size, rank = len(splits), data.draw(st.integers(0, len(splits) - 1))
    rows = data.draw(st.sampled_from([sum(splits), sum(splits) + 1]))
    op = AllToAll(np.zeros((rows, 2)), np.zeros((sum(splits), 2)), splits, splits)
    if rows == sum(splits):
        validate(op, rank, size)
    else:
        with pytest.raises(ValueError, match="output_split_sizes"):
            validate(op, rank, size)


def test_a_check_changes_nothing() -> None:
    x = np.arange(4.0)
    before = x.copy()
    validate(AllReduce(x, SUM), 0, 2)
    assert np.array_equal(x, before)


@pytest.mark.parametrize("page", ["limits", "collectives"])
def test_a_page_names_the_largest_tag(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text()
    found = re.search(r"[Tt]ags\b.* 0 to 2\*\*(\d+) - 1", text)
    assert found
    assert 2 ** int(found[1]) - 1 == LARGEST_TAG
