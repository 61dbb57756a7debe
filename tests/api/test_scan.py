"""Prefix reductions: scan and exscan in every form."""

from typing import Any

import numpy as np
import pytest

import nc10d as dist
from nc10d import ops as O
from nc10d.arrays.dtypes import DType, allows, identity
from nc10d.backend.nccl.launch.nccl_calls import CallContext, calls_of
from nc10d.group.process_group import ProcessGroup
from nc10d.ops.reductions import EXAMPLES
from nc10d.testing import reference, run_local, run_ranks
from nc10d.testing.strategies import mixed_values

SIZE = 4


def own(rank: int) -> Any:
    return np.arange(3.0) + 10 * rank


ALL = [own(rank) for rank in range(SIZE)]
SCAN = reference.scan(ALL)
EXSCAN, WITH_IDENTITY = reference.exscan(ALL), reference.exscan(ALL, identity=True)


def test_the_reference_by_hand() -> None:
    assert [x.tolist() for x in reference.scan(ALL[:3])] == [[0, 1, 2], [10, 12, 14], [30, 33, 36]]
    assert [x.tolist() for x in reference.exscan(ALL[:3])] == [[0, 1, 2], [0, 1, 2], [10, 12, 14]]
    assert reference.exscan(ALL, O.MAX, identity=True)[0].tolist() == [-np.inf] * 3


def in_every_form(group: ProcessGroup) -> None:
    rank, kept = group.rank, own(group.rank)

    def equal(x: Any, expected: Any) -> None:
        assert reference.same_bits(x, expected[rank])

    x = kept.copy()
    dist.scan(x)
    equal(x, SCAN)
    x = kept.copy()
    work = dist.exscan(x, async_op=True)
    assert work.wait()
    equal(x, EXSCAN)
    x = kept.copy()
    dist.exscan(x, identity=True)
    equal(x, WITH_IDENTITY)
    out = np.zeros(3)
    dist.scan(kept, out=out)
    equal(out, SCAN)
    dist.exscan(kept, out=out, identity=True)
    equal(out, WITH_IDENTITY)
    assert reference.same_bits(kept, own(rank)), "out= keeps the input"
    x, y = kept.copy(), kept.copy()
    with dist.coalescing_manager():
        dist.scan(x)
        dist.exscan(y, O.MAX)
    equal(x, SCAN)
    equal(y, reference.exscan(ALL, O.MAX))
    x = kept.copy()[::-1]
    group.scan(x)
    equal(x, [each[::-1] for each in SCAN])
    x = kept.copy()
    group.exscan(x, O.SUM, identity=True)
    equal(x, WITH_IDENTITY)


@pytest.mark.parametrize("kind", ["threads", "simulated"])
def test_every_form_of_the_calls(kind: Any) -> None:
    run_ranks(in_every_form, SIZE, kind)


def test_every_form_of_the_calls_without_the_engine() -> None:
    run_local(in_every_form, SIZE)


@pytest.mark.ranks(2, strict=False)
def test_rank_0_gets_the_identity_of_every_reduction_of_every_type(world: ProcessGroup) -> None:
    for dtype in DType:
        for op in EXAMPLES:
            if allows(dtype, op):
                x = mixed_values(dtype, 5, world.rank)
                world.exscan(x, op, identity=True)
                if world.rank == 0:
                    assert reference.same_bits(x, np.full(5, identity(dtype, op))), (dtype, op)


def past_a_slot(group: ProcessGroup) -> None:
    rows = [mixed_values(DType.FLOAT32, 300_001, rank) for rank in range(group.size)]
    for call, expected in (
        (group.scan, reference.scan(rows, O.AVG)),
        (group.exscan, reference.exscan(rows, O.AVG)),
    ):
        x = rows[group.rank].copy()
        call(x, O.AVG)
        assert reference.same_bits(x, expected[group.rank])
    x = rows[group.rank].copy()
    group.exscan(x, O.MIN, identity=True)
    assert reference.same_bits(x, reference.exscan(rows, O.MIN, identity=True)[group.rank])


@pytest.mark.parametrize("size", [1, 3])
def test_arrays_that_take_many_rounds(size: int) -> None:
    run_ranks(past_a_slot, size)


@pytest.mark.ranks(2, strict=False)
def test_mistakes_are_errors_and_change_nothing(world: ProcessGroup) -> None:
    with pytest.raises(TypeError, match="complex numbers have no order"):
        world.scan(np.zeros(2, complex), O.MAX)
    with pytest.raises(ValueError, match="exscan: tensor"):
        world.exscan(np.broadcast_to(np.zeros(1), 4))
    x = own(world.rank)
    with pytest.raises(dist.CollectiveMismatch, match="exscan"):
        (world.scan if world.rank else world.exscan)(x)
    assert reference.same_bits(x, own(world.rank))


@pytest.mark.parametrize("op", [O.Scan(own(0)), O.ExScan(own(0))])
def test_nccl_refuses_a_scan(op: O.Op) -> None:
    place = CallContext(0, 2, lambda name: True, lambda *_: 0, 0)
    with pytest.raises(TypeError, match=r"NCCL has no .*scan: the CPU's backend has it"):
        calls_of(op, place)
