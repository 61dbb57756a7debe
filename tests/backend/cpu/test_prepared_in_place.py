"""A call in place, whose one array is this rank's piece of the other, is prepared like others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from entered_functions import python_frames

from nc10d.testing import Ranks

SIZE, COUNT = 2, 3
Call = Callable[..., Any]


def pieces(whole: Any) -> list[Any]:
    return list(whole.reshape(SIZE, -1))


CALLS: dict[str, Call] = {
    "all_gather_into_tensor": lambda g, whole, x: g.all_gather_into_tensor(whole, x),
    "all_gather": lambda g, whole, x: g.all_gather(pieces(whole), x),
    "reduce_scatter_tensor": lambda g, whole, x: g.reduce_scatter_tensor(x, whole),
    "reduce_scatter": lambda g, whole, x: g.reduce_scatter(x, pieces(whole)),
    "gather": lambda g, whole, x: g.gather(x, None if g.rank else pieces(whole)),
    "gather_single": lambda g, whole, x: g.gather_single(x, None if g.rank else whole),
    "scatter": lambda g, whole, x: g.scatter(x, None if g.rank else pieces(whole)),
    "scatter_single": lambda g, whole, x: g.scatter_single(x, None if g.rank else whole),
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(SIZE) as started:
        yield started


def values(rank: int) -> Any:
    return np.arange(SIZE * COUNT) + 100.0 * rank


@pytest.mark.parametrize("name", CALLS)
def test_a_call_in_place_does_what_it_does_with_arrays_apart(ranks: Ranks, name: str) -> None:
    def run(group: Any) -> bool:
        same = []
        for _ in range(3):
            whole, apart = values(group.rank), values(group.rank)
            x = pieces(whole)[group.rank]
            y = x.copy()
            CALLS[name](group, whole, x)
            CALLS[name](group, apart, y)
            gathers = "gather" in name
            same += [(whole == apart).all() if gathers else (x == y).all()]
        return all(same)

    assert ranks.run(run) == [True] * SIZE


@pytest.mark.parametrize("name", [*CALLS][:4])
def test_a_piece_at_another_place_is_refused_although_the_call_is_prepared(
    ranks: Ranks, name: str
) -> None:
    def run(group: Any) -> None:
        whole = values(group.rank)
        for _ in range(3):
            CALLS[name](group, whole, pieces(whole)[group.rank])
        begin = group.rank * COUNT
        for wrong in (whole[1 - group.rank :][:COUNT], whole[begin + 1 :][:COUNT], whole[1:4]):
            if len(wrong) == COUNT:
                with pytest.raises(ValueError, match="share memory"):
                    CALLS[name](group, whole, wrong)
        CALLS[name](group, whole, pieces(whole)[group.rank])

    ranks.run(run)


def test_a_call_in_place_takes_as_few_frames_as_any_prepared_call() -> None:
    def run(group: Any) -> list[int]:
        whole = np.ones(4)
        x, y = whole[:4], np.ones(4)
        fewest = []
        for piece in (x, y):
            call = partial(group.all_gather_into_tensor, whole, piece)
            fewest.append(min(python_frames(call) for _ in range(10)))
        return fewest

    with Ranks(1) as alone:
        (counts,) = alone.run(run)
    assert counts[0] == counts[1] <= 4
