"""One memory twice in a list is treated once or refused; in a block, calls are in order."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from overlapping_blocks import IN_PLACE, gathers_in_place

import nc10d as dist
from nc10d import functional as F
from nc10d.arrays.arguments import check_elements, each_once
from nc10d.group.process_group import ProcessGroup
from nc10d.testing import Ranks
from nc10d.testing.local_backend import LocalHub

SIZE = 2
DTYPES = ("f8", "f4", "f2", "i8", "i4", "u1", "c16")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(scope="module", params=["cpu", "local"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    options = LocalHub() if request.param == "local" else None
    with Ranks(SIZE, "threads", request.param, 20.0, options) as started:
        yield started


def each_dtype(group: ProcessGroup, run: Callable[[ProcessGroup, Any], list[Any]]) -> None:
    for dtype in DTYPES:
        x = np.arange(1, 5).astype(dtype) * (group.rank + 1)
        for got in run(group, x):
            assert (got == np.arange(1, 5) * 3).all(), (dtype, got)


def reduced_once(group: ProcessGroup, x: Any) -> list[Any]:
    work = dist.all_reduce_coalesced([x, x, x.reshape(2, 2)], async_op=True)
    assert work is not None
    work.wait()
    return [x]


def reduced_once_strided(group: ProcessGroup, x: Any) -> list[Any]:
    wide = np.zeros((4, 2), x.dtype)
    wide[:, 0] = x
    dist.all_reduce_coalesced([wide[:, 0], wide[:, 1], wide[:, 0]])
    assert (wide[:, 1] == 0).all()
    return [wide[:, 0]]


def functional(group: ProcessGroup, x: Any) -> list[Any]:
    return [np.asarray(found) for found in F.all_reduce_coalesced([x, x], "sum")]


def one_input_for_two_outputs(group: ProcessGroup, x: Any) -> list[Any]:
    lists = [[np.zeros_like(x), np.zeros_like(x)] for _ in range(SIZE)]
    dist.all_gather_coalesced(lists, [x, x])
    return [lists[0][at] + lists[1][at] for at in range(2)]


def in_place(group: ProcessGroup, x: Any) -> list[Any]:
    lists = [[x if rank == group.rank else np.zeros_like(x)] for rank in range(SIZE)]
    dist.all_gather_coalesced(lists, [x])
    return [lists[0][0] + lists[1][0]]


def as_in_order(group: ProcessGroup, x: Any) -> list[Any]:
    """In a block the second call reads the result of the first."""
    with dist.coalescing_manager():
        dist.all_reduce(x)
        dist.all_reduce(x)
    return [x // 2 if x.dtype.kind in "iu" else x / 2]


@pytest.mark.parametrize(
    "form",
    [
        reduced_once,
        reduced_once_strided,
        functional,
        one_input_for_two_outputs,
        in_place,
        as_in_order,
    ],
    ids=lambda form: form.__name__,
)
def test_one_memory_twice_is_treated_once(ranks: Ranks, form: Any) -> None:
    ranks.run(each_dtype, [form] * SIZE)


@pytest.mark.parametrize("form", IN_PLACE)
def test_an_input_may_be_the_ranks_own_chunk_of_the_output(ranks: Ranks, form: str) -> None:
    ranks.run(gathers_in_place, [form] * SIZE)


def lists_of(x: Any) -> dict[str, Callable[[], Any]]:
    y, whole = x.copy(), np.zeros(SIZE * x.size)
    whole_list = [whole[:4], whole[4:]]
    return {
        "a part of another": lambda: dist.all_reduce_coalesced([x[:3], y, x[1:]]),
        "shifted": lambda: dist.all_reduce_coalesced([x[::2], x[:2]]),
        "outputs": lambda: dist.all_gather_coalesced([[x, x], whole_list], [y, y]),
        "an output and an input": lambda: dist.all_gather_coalesced(
            [[x, whole[:4]], [y, whole[4:]]], [y.copy(), x]
        ),
        "all_gather": lambda: dist.all_gather([x, x], y),
        "gather": lambda: dist.gather(y, [x, x] if dist.get_rank() == 0 else None),
        "all_to_all": lambda: dist.all_to_all([x, x], [y, y]),
        "scatter": lambda: dist.scatter(x, [x, x] if dist.get_rank() == 0 else None),
        "reduce_scatter": lambda: dist.reduce_scatter(x[:3], [x[:3], x[1:]]),
    }


def overlapping_lists_are_refused(group: ProcessGroup) -> None:
    x = np.arange(4.0)
    for name, call in lists_of(x).items():
        if group.rank and name in ("gather", "scatter"):
            continue
        with pytest.raises(ValueError, match="must not share memory"):
            call()
        assert (x == np.arange(4.0)).all(), name
    group.barrier()  # nothing was sent


def test_lists_that_overlap_are_refused_before_anything_is_sent(ranks: Ranks) -> None:
    ranks.run(overlapping_lists_are_refused)


def test_empty_arrays_are_all_kept() -> None:
    empty = np.zeros(0)
    assert len(each_once("call", "xs", [empty, empty, empty[:0]])) == 3


def test_an_element_may_share_memory_with_itself_only() -> None:
    whole = np.zeros(4)
    check_elements("call", [[whole]], [whole[:2]])
    with pytest.raises(ValueError, match=r"outputs\[0\] and inputs\[1\] must not share memory"):
        check_elements("call", [[whole[:2]], [np.zeros(2)]], [np.ones(2), whole[1:3]])
