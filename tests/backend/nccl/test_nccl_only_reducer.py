"""A Reducer in a group that has NCCL alone: used parameters and sparse rows, over the emulators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from device_ranks import afresh, device, value
from emulated import emulated_ranks, needs_emulators

from nc10d import cuda
from nc10d.api.join import Join, Joinable, JoinHook
from nc10d.group.process_group import ProcessGroup
from nc10d.reducer import Reducer
from nc10d.reducer.gradients import SparseGradient
from nc10d.testing.ranks import Ranks

pytestmark = needs_emulators


def put(group: ProcessGroup, x: Any) -> cuda.DeviceArray:
    return cuda.to_device(np.asarray(x), device(group))


def used_parameters_are_those_of_all_ranks(group: ProcessGroup) -> None:
    """Parameter 1 is used by rank 1 alone, parameter 2 by no rank: it keeps its gradient."""
    params = [put(group, np.zeros(4, np.float32)) for _ in range(3)]
    reducer = Reducer(params, group, find_unused_parameters=True)
    for x in reducer.gradients:
        x.fill_from(np.full(4, 9.0, np.float32))
    unused = {1, 2} - {group.rank}
    if 1 in unused:
        reducer.gradients[1].fill_from(np.zeros(4, np.float32))
    reducer.begin(unused)
    for param in {0, 1, 2} - unused:
        reducer.gradients[param].fill_from(np.full(4, 2.0 + 4 * group.rank, np.float32))
        reducer.grad_ready(param)
    reducer.finish()
    assert reducer.used == [True, True, False]
    assert [value(x) for x in reducer.gradients] == [4.0, 3.0, 9.0]


def rows_on_a_device_are_averaged(group: ProcessGroup) -> None:
    params = [put(group, np.zeros((5, 2), np.float32))]
    reducer = Reducer(params, group, expect_sparse=[True])
    places = np.array([[0, 3]]) if group.rank == 0 else np.array([[3, 3, 4]])
    rows = np.ones((places.shape[1], 2), np.float32)
    given = SparseGradient(put(group, places), put(group, rows))
    reducer.begin()
    reducer.grad_ready(0, given)
    reducer.finish()
    for x in (given, reducer.gradients[0]):
        indices, values = (
            cuda.to_host(y) if isinstance(y, cuda.DeviceArray) else y for y in (x.indices, x.values)
        )
        whole = SparseGradient(indices, values).dense((5, 2))
        assert whole[:, 0].tolist() == [0.5, 0.0, 0.0, 1.5, 0.5]
    assert isinstance(given.values, cuda.DeviceArray)


def a_place_outside_is_refused(group: ProcessGroup) -> None:
    reducer = Reducer([put(group, np.zeros((5, 2)))], group, expect_sparse=[True])
    reducer.begin()
    given = SparseGradient(put(group, [[5]]), put(group, np.ones((1, 2))))
    with pytest.raises(ValueError, match="outside of its shape"):
        reducer.grad_ready(0, given)
    reducer.grad_ready(0, SparseGradient(put(group, [[4]]), put(group, np.ones((1, 2)))))
    reducer.finish()


def different_parameters_are_refused(group: ProcessGroup) -> None:
    with pytest.raises(ValueError, match=r"rank 0 has .*\(4,\).*, rank 1 has .*\(5,\)"):
        Reducer([put(group, np.zeros(4 + group.rank))], group)
    if "cpu" not in group.config.devices:
        with pytest.raises(ValueError, match="no backend for cpu arrays"):
            group.all_reduce(np.zeros(3))


class Batches(Joinable):
    """Has as many batches as its rank, plus one."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self._group = group
        self.shadowed = 0

    @property
    def join_process_group(self) -> ProcessGroup:
        return self._group

    @property
    def join_device(self) -> str:
        return "cuda"

    def join_hook(self, **_: Any) -> JoinHook:
        return Shadow(self)


class Shadow(JoinHook):
    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def main_hook(self) -> None:
        self._batches.shadowed += 1


def uneven_batches_end_together(group: ProcessGroup) -> None:
    batches = Batches(group)
    with Join([batches]):
        for _ in range(1 + group.rank):
            Join.notify_join_context(batches)
    assert batches.shadowed == group.size - 1 - group.rank


LAWS = [
    uneven_batches_end_together,
    used_parameters_are_those_of_all_ranks,
    rows_on_a_device_are_averaged,
    a_place_outside_is_refused,
    different_parameters_are_refused,
]


@pytest.fixture(scope="module", params=["nccl", "cpu:cpu,cuda:nccl"])
def two(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with emulated_ranks(2, request.param) as ranks:
        yield ranks


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_a_reducer_works(two: Ranks, law: Callable[..., None]) -> None:
    two.run(afresh, [law] * 2)
