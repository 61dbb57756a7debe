"""The NCCL calls of an operation are the same on all ranks, and NCCL's own where they exist."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from nc10d.arrays.dtypes import DType
from nc10d.arrays.validate import validate
from nc10d.backend.nccl.launch.nccl_calls import Call, CallContext, calls_of
from nc10d.backend.nccl.launch.rank_order import OperationCalls, all_calls_of
from nc10d.cuda.memory import DeviceArray
from nc10d.ops import AVG, MAX, SUM, AllReduce, Gather, Op, Scatter

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
    context = CallContext(rank, SIZE, lambda _: has, lambda *_: 0, 0)
    return {call[0] for call in calls_of(op, context)}


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


def fold(op: Op, rank: int, size: int) -> OperationCalls:
    validate(op, rank, size)
    context = CallContext(
        *(rank, size, lambda _: True, lambda *_: 0, 0), kernel=lambda *_: 7, room=1 << 40
    )
    return all_calls_of(op, context)


def moved(calls: Sequence[Call], name: str) -> dict[int, int]:
    """Return the bytes of messages by peer."""
    return {call[4]: call[2] for call in calls if call[0] == name}


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("count", [0, 1, 5, 1000, 100_003])
def test_a_fold_in_rank_order_moves_the_bytes_of_a_ring(size: int, count: int) -> None:
    found = [fold(AllReduce(array(count), AVG.ordered), rank, size) for rank in range(size)]
    ring, folded = 4 * count * (size - 1) / size, 0
    for rank, own in enumerate(found):
        sent, taken = moved(own.calls, "ncclSend"), moved(own.calls, "ncclRecv")
        assert sent == {
            peer: moved(other.calls, "ncclRecv")[rank]
            for peer, other in enumerate(found)
            if rank in moved(other.calls, "ncclRecv")
        }
        assert abs(sum(sent.values()) - ring) <= 16 * size
        assert abs(sum(taken.values()) - ring) <= 16 * size * size
        assert len(own.calls) <= 2 * (size - 1)
        assert [call[0] for call in own.gathers] == [call[0] for call in found[0].gathers]
        gathered = sum(
            call[3] * (size if call[0] == "ncclAllGather" else 1) for call in own.gathers
        )
        assert gathered == 4 * count
        assert len(own.kernels) <= 1
        folded += sum(kernel[2 + 6] for kernel in own.kernels)
    assert folded == count, "each element is folded on a single rank, by a single launch"


def test_a_reduction_whose_order_is_no_matter_is_nccls_own() -> None:
    own = (MAX, DType.FLOAT32, 4), (SUM, DType.INT32, 4), (AVG, DType.INT64, 4)
    two = ((SUM, DType.FLOAT32, 2),)
    folded = (SUM, DType.FLOAT32, 3), (AVG, DType.FLOAT32, 2), (SUM, DType.INT16, 2)
    for cases, name in ((own + two, "ncclAllReduce"), (folded, "ncclSend")):
        for op, dtype, size in cases:
            x = DeviceArray(4096, (1000,), dtype, 0, None)
            assert {c[0] for c in fold(AllReduce(x, op.ordered), 0, size).calls} >= {name}
            assert bool(fold(AllReduce(x, op.ordered), 0, size).kernels) == (name == "ncclSend")
