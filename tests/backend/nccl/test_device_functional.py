"""Functional collectives on device arrays without a framework, over the emulators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from device_ranks import device
from emulated import emulated_ranks, needs_emulators

from nc10d import cuda
from nc10d.api import functional as F
from nc10d.cuda.memory import device_of
from nc10d.group.process_group import ProcessGroup
from nc10d.testing.ranks import Ranks

pytestmark = needs_emulators

Put = Callable[[Any], Any]


def nc10ds(group: ProcessGroup) -> Put:
    return lambda x: cuda.to_device(x, device(group))


def numbas(group: ProcessGroup) -> Put:
    numba_cuda = pytest.importorskip("numba.cuda")

    def put(x: Any) -> Any:
        with numba_cuda.gpus[device(group)]:
            return numba_cuda.to_device(x)

    return put


def values(result: Any) -> Any:
    """Return a result's elements; using it makes the current stream wait."""
    x = F.wait_tensor(result)
    cuda.synchronize(device_of(x))
    return cuda.to_host(x)


def every_call_is_the_reference(group: ProcessGroup, library: str) -> None:
    put = {"nc10d": nc10ds, "numba": numbas}[library](group)
    me, size = group.rank, group.size
    all_of_them = [np.arange(12, dtype=np.float32).reshape(2, 6) + 100 * r for r in range(size)]
    own, whole = all_of_them[me], sum(all_of_them)
    x = put(own)
    kind = type(x)
    results = {
        "all_reduce": (F.all_reduce(x, "sum", group), whole),
        "broadcast": (F.broadcast(x, 1, group), all_of_them[1]),
        "all_gather 0": (F.all_gather_tensor(x, 0, group), np.concatenate(all_of_them)),
        "all_gather 1": (F.all_gather_tensor(x, -1, group), np.concatenate(all_of_them, 1)),
        "reduce_scatter 0": (
            F.reduce_scatter_tensor(x, "sum", 0, group),
            np.split(whole, size)[me],
        ),
        "reduce_scatter 1": (
            F.reduce_scatter_tensor(x, "avg", 1, group),
            np.split(whole / size, size, 1)[me],
        ),
        "all_to_all": (
            F.all_to_all_single(x, None, None, group),
            np.concatenate([np.split(y, size)[me] for y in all_of_them]),
        ),
        "permute": (F.permute_tensor(x, [1, 0], group), all_of_them[1 - me]),
    }
    for name, (result, wanted) in results.items():
        assert type(F.wait_tensor(result)) is kind, name
        assert np.array_equal(values(result), wanted), name
    for result in F.all_reduce_coalesced([x, x], "max", group):
        assert np.array_equal(values(result), all_of_them[-1])
    for result in F.all_gather_into_tensor_coalesced([x], group):
        assert np.array_equal(values(result), np.concatenate(all_of_them))
    assert np.array_equal(values(x), own), "an input was written"


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with emulated_ranks() as ranks:
        yield ranks


@pytest.mark.parametrize("library", ["nc10d", "numba"])
def test_functional_collectives_take_device_arrays(two: Ranks, library: str) -> None:
    two.run(every_call_is_the_reference, [library] * 2)
