"""The libnccl emulator: what a real one does, between processes, held against the reference."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from driving import OPS, TYPES, Gpu, Nccl

from build import find_headers
from nc10d import ops as O
from nc10d.dtypes import DType, allows
from nc10d.group import ProcessGroup
from nc10d.testing import Ranks, reference
from nc10d.testing.strategies import mixed_values

SIZE = 3
Array = np.ndarray[Any, np.dtype[Any]]

pytestmark = pytest.mark.skipif(find_headers() is None, reason="no cuda.h and nccl.h")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(SIZE, "processes", timeout=20.0) as found:
        yield found


class World:
    """One rank's communicator, stream and arrays, from the first need to the process's end."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.gpu = Gpu(group.rank)
        self.nccl = Nccl()
        self.comm = self.nccl.init(group)
        self.stream = self.gpu.stream()

    def call(self, name: str, *args: Any) -> None:
        self.nccl(name, *args, self.comm, self.stream)

    def wait(self) -> None:
        self.gpu("cuStreamSynchronize", self.stream)


_mine: list[World] = []


def world(group: ProcessGroup) -> World:
    if not _mine:
        _mine.append(World(group))
    return _mine[0]


def values(dtype: DType, rank: int, chunk: int = 0, count: int = 37) -> Array:
    return mixed_values(dtype, (count,), 100 * rank + chunk)


def each(dtype: DType) -> list[list[Array]]:
    return [[values(dtype, r, c) for c in range(SIZE)] for r in range(SIZE)]


# Collectives of every type


def reductions(group: ProcessGroup, label: str) -> dict[str, list[Array]]:
    """Reduce in three calls by every operation that the type has."""
    here, dtype, code = world(group), DType[label], TYPES[DType[label].label]
    rows, results = each(dtype)[group.rank], {}
    for name, op in OPS.items():
        if not allows(dtype, O.ReduceOp(O.RedOp[name])):
            continue
        x, flat = rows[0], np.concatenate(rows)
        whole, root, apart = here.gpu.put(x), here.gpu.put(x), here.gpu.put(flat)
        here.call("ncclAllReduce", whole, whole, x.size, code, op)
        here.call("ncclReduce", root, root, x.size, code, op, 1)
        here.call("ncclReduceScatter", apart, apart, x.size, code, op)
        here.wait()
        results[name] = [here.gpu.get(at, x) for at in (whole, root, apart)]
    return results


NUMBERS = [d.name for d in DType if d.label in TYPES]


@pytest.mark.parametrize("label", NUMBERS)
def test_every_reduction_of_every_type_is_the_reference(ranks: Ranks, label: str) -> None:
    rows = each(DType[label])
    first = [row[0] for row in rows]
    answers = ranks.run(reductions, [label] * SIZE)
    for name in answers[0]:
        op = O.ReduceOp(O.RedOp[name])
        wanted = zip(
            reference.all_reduce(first, op),
            reference.reduce(first, 1, op),
            reference.reduce_scatter(rows, op),
            strict=True,
        )
        for rank, right in enumerate(wanted):
            assert all(map(reference.same_bits, answers[rank][name], right)), (name, rank)
