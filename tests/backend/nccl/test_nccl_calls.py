"""The NCCL calls of an operation are the same on all ranks, and NCCL's own where they exist."""

from __future__ import annotations

from typing import Any

import pytest

from nc10d.arrays.dtypes import DType
from nc10d.arrays.validate import validate
from nc10d.backend.nccl.launch.nccl_calls import CallContext, calls_of
from nc10d.cuda.memory import DeviceArray
from nc10d.ops import Gather, Op, Scatter

SIZE, ROOT = 3, 1
SENDING = {"ncclSend", "ncclRecv"}


def array(count: int, address: int = 4096) -> DeviceArray:
    return DeviceArray(address, (count,), DType.FLOAT32, 0, None)


def chunks(counts: list[int]) -> list[DeviceArray]:
    return [array(n, 65536 * (rank + 1)) for rank, n in enumerate(counts)]


def gather(rank: int, counts: list[int]) -> Gather:
    return Gather(chunks(counts) if rank == ROOT else None, array(counts[rank]), ROOT)


def scatter(rank: int, counts: list[int]) -> Scatter:
    return Scatter(array(counts[rank]), chunks(counts) if rank == ROOT else None, ROOT)


def gather_single(rank: int, count: int) -> Gather:
    whole = array(SIZE * count, 65536) if rank == ROOT else None
    return Gather(whole, array(count), ROOT, even=True)


def scatter_single(rank: int, count: int) -> Scatter:
    whole = array(SIZE * count, 65536) if rank == ROOT else None
    return Scatter(array(count), whole, ROOT, even=True)


def names(op: Op, rank: int, has: bool) -> set[Any]:
    validate(op, rank, SIZE)
    place = CallContext(rank, SIZE, lambda _: has, lambda *_: 0, 0)
    return {call[0] for call in calls_of(op, place)}


@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize("has", [True, False])
def test_the_kind_of_a_call_decides_and_not_a_ranks_sizes(rank: int, has: bool) -> None:
    for make, own in ((gather_single, "ncclGather"), (scatter_single, "ncclScatter")):
        assert names(make(rank, 8), rank, has) <= ({own} if has else SENDING)
    for counts in ([8, 8, 8], [8, 8, 9], [0, 8, 8]):
        for make in (gather, scatter):
            assert names(make(rank, counts), rank, has) <= SENDING


@pytest.mark.parametrize("has", [True, False])
def test_no_elements_are_no_calls(has: bool) -> None:
    for rank in range(SIZE):
        assert names(gather_single(rank, 0), rank, has) == set()
        assert names(scatter_single(rank, 0), rank, has) == set()
