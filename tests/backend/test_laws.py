"""Laws of the design on the real backend: the same bits in every mode; calls composed of calls."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from on_ranks import on_ranks

import nc10d as dist
from nc10d import ops as O
from nc10d.arrays.dtypes import DType, ElementKind
from nc10d.group.process_group import ProcessGroup
from nc10d.testing import Ranks, reference
from nc10d.testing.layouts import LAYOUTS, lay
from nc10d.testing.modes import MODES, perform
from nc10d.testing.reference import same_bits
from nc10d.testing.strategies import issue, mixed_values, same_shape_per_rank

Array = np.ndarray[Any, np.dtype[Any]]
SIZES = (1, 2, 3, 4, 5)
ROUNDED = (DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16, DType.COMPLEX64)
relaxed = settings(max_examples=40, deadline=None)


At = Callable[[int], Ranks]


def normal(dtype: DType, count: int, seed: int) -> Array:
    """Draw numbers whose sums depend on the order of addition."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(count) * 10.0 ** rng.integers(-3, 4, count)
    return (x + 1j * x[::-1] if dtype.family is ElementKind.COMPLEX else x).astype(dtype.numpy)


# The same bits every way


def every_way(group: ProcessGroup, dtype: DType, count: int) -> list[Array]:
    """Return an all_reduce's results, made in every mode, on every layout, and by a kept plan."""
    mine = normal(dtype, count, group.rank)
    found = []
    for layout in LAYOUTS:
        for mode in MODES:
            ops = perform(group, lambda layout=layout: O.AllReduce(lay(mine, layout)), mode)
            found += [np.ascontiguousarray(op.x) for op in ops]
    x, y = mine.copy(), np.ones(3)
    with dist.coalescing_manager(group) as block:
        group.all_reduce(y)
        group.all_reduce(x)
    for again in (False, True):
        found.append(x.copy())
        x[...], y[...] = mine, 1
        work = block.plan().launch(async_op=again)
        if work is not None:
            work.wait()
    return [*found, x]


def all_the_same(answers: list[list[Array]], wanted: Array) -> None:
    for rank, found in enumerate(answers):
        for index, x in enumerate(found):
            assert same_bits(x, wanted), (rank, index)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ROUNDED, ids=lambda d: d.label)
def test_bits_do_not_depend_on_mode_layout_rank_or_run(
    ranks_of: At, dtype: DType, size: int
) -> None:
    for count in (1, 37, 5000, 90_001):
        wanted = reference.all_reduce([normal(dtype, count, r) for r in range(size)])[0]
        for _ in range(2):
            answers = ranks_of(size).run(every_way, [dtype] * size, [count] * size)
            all_the_same(answers, wanted)


@pytest.mark.slow
def test_processes_get_the_bits_that_threads_get() -> None:
    with Ranks(3, "processes") as processes:
        for count in (37, 90_001):
            arrays = [normal(DType.FLOAT32, count, r) for r in range(3)]
            answers = processes.run(every_way, [DType.FLOAT32] * 3, [count] * 3)
            all_the_same(answers, reference.all_reduce(arrays)[0])


# Calls composed of calls


def reduced_by_parts(group: ProcessGroup, x: Array, op: O.ReduceOp) -> dict[str, Array]:
    size, root = group.size, group.size - 1
    direct = x.copy()
    group.all_reduce(direct, op)
    chunk = np.zeros_like(x[: x.size // size])
    group.reduce_scatter_tensor(chunk, x, op)
    whole = np.zeros_like(x)
    group.all_gather_into_tensor(whole, chunk)
    rooted = x.copy()
    group.reduce(rooted, root, op)
    if group.rank != root:
        assert same_bits(rooted, x), "reduce touched an array that is not the root's"
    group.broadcast(rooted, root)
    shown = [np.zeros_like(x) for _ in range(size)]
    group.all_gather(shown, x)
    parts = [np.zeros_like(chunk) for _ in range(size)]
    group.all_to_all(parts, np.split(x, size))
    assert same_bits(reference.fold(parts, op), chunk)
    return {"direct": direct, "parts": whole, "rooted": rooted, "own": reference.fold(shown, op)}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("op", [O.SUM, O.AVG, O.MAX, O.premul_sum(0.3)], ids=repr)
def test_all_reduce_equals_reduce_scatter_and_all_gather(
    ranks_of: At, size: int, op: O.ReduceOp
) -> None:
    for count in (size, 60, 6000, 120_000):
        for dtype in (DType.FLOAT32, DType.FLOAT16):
            xs = [normal(dtype, count, 9 + r) for r in range(size)]
            for found in ranks_of(size).run(reduced_by_parts, xs, [op] * size):
                for name, x in found.items():
                    assert same_bits(x, found["direct"]), (name, count, dtype)


def moved_about(group: ProcessGroup, x: Array) -> None:
    """Gather and scatter, all_to_all twice and broadcasts restore or equal the gathered arrays."""
    size, rank = group.size, group.rank
    every = [np.zeros_like(x) for _ in range(size)]
    group.all_gather(every, x)
    for root in range(size):
        mine = [np.zeros_like(x) for _ in range(size)] if rank == root else None
        group.gather(x, mine, root)
        assert mine is None or all(map(same_bits, mine, every))
        back = np.zeros_like(x)
        group.scatter(back, mine, root)
        assert same_bits(back, x), "scatter undoes gather"
        shown = x.copy() if rank == root else np.zeros_like(x)
        group.broadcast(shown, root)
        assert same_bits(shown, every[root])
    there, again = ([np.zeros_like(x) for _ in range(size)] for _ in range(2))
    group.all_to_all(there, [x] * size)
    assert all(map(same_bits, there, every)), "who sends the same to all shows it to all"
    group.all_to_all(again, there)
    assert all(same_bits(y, x) for y in again), "all_to_all undoes itself"


@relaxed
@given(data=st.data(), size=st.sampled_from(SIZES))
def test_arrays_moved_there_and_back_are_unchanged(ranks_of: At, data: Any, size: int) -> None:
    ranks_of(size).run(moved_about, data.draw(same_shape_per_rank(size)))


def ragged(group: ProcessGroup, counts: list[int]) -> None:
    size, rank = group.size, group.rank
    every = [np.full(n, r + 0.5) for r, n in enumerate(counts)]
    got = [np.full(n, -1.0) for n in counts]
    group.all_gather(got, every[rank].copy())
    assert all(map(same_bits, got, every))
    out = np.zeros(counts[rank])
    group.reduce_scatter(out, [np.full(n, float(rank)) for n in counts])
    assert (out == sum(range(size))).all()
    rows = np.arange(float(sum(counts) * 2)).reshape(-1, 2) + 1000 * rank
    coming = np.zeros((counts[rank] * size, 2))
    group.all_to_all_single(coming, rows, [counts[rank]] * size, counts)
    start = 2 * sum(counts[:rank])
    piece = np.arange(start, start + 2.0 * counts[rank]).reshape(-1, 2)
    assert np.array_equal(coming, np.concatenate([piece + 1000 * r for r in range(size)]))


@relaxed
@given(counts=st.lists(st.sampled_from([0, 0, 1, 3, 64, 5000, 40_000]), min_size=1, max_size=5))
def test_sizes_may_differ_by_rank_and_be_zero(ranks_of: At, counts: list[int]) -> None:
    ranks_of(len(counts)).run(ragged, [counts] * len(counts))


# The rules for elements


def each_reduced(group: ProcessGroup, x: Array, ops: list[O.ReduceOp]) -> list[Array]:
    results = [x.copy() for _ in ops]
    for y, op in zip(results, ops, strict=True):
        group.all_reduce(y, op)
    return results


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [DType.INT8, DType.INT64, DType.INT32], ids=lambda d: d.label)
def test_the_average_of_integers_truncates_toward_zero(
    ranks_of: At, size: int, dtype: DType
) -> None:
    first = np.arange(-12, 13, dtype=dtype.numpy)
    xs = [first, *[np.zeros_like(first)] * (size - 1)]
    for (mean,) in ranks_of(size).run(each_reduced, xs, [[O.AVG]] * size):
        assert mean.tolist() == [int(v / size) for v in range(-12, 13)]


@pytest.mark.parametrize("dtype", ROUNDED, ids=lambda d: d.label)
def test_premul_is_scaling_and_then_summing(ranks_of: At, dtype: DType) -> None:
    # A power of two scales without rounding, also where the factor is rounded to the dtype.
    xs = [normal(dtype, 500, r) for r in range(3)]
    scaled = [(x * np.asarray(0.25, x.dtype)).astype(x.dtype) for x in xs]
    premul = ranks_of(3).run(each_reduced, xs, [[O.premul_sum(0.25)]] * 3)
    summed = ranks_of(3).run(each_reduced, scaled, [[O.SUM]] * 3)
    assert all(same_bits(p[0], s[0]) for p, s in zip(premul, summed, strict=True))


FLOATS = [d for d in DType if d.family is ElementKind.FLOAT]


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.label)
@pytest.mark.parametrize("count", [3, 100_003])
def test_nan_of_any_rank_wins_in_min_and_max(ranks_of: At, dtype: DType, count: int) -> None:
    for size in (1, 2, 4):
        for odd in range(size):
            xs = [np.full(count, r - 1, dtype.numpy) for r in range(size)]
            xs[odd][count // 2 :: 7] = np.nan
            places = np.isnan(xs[odd].astype(np.float32))
            for found in ranks_of(size).run(each_reduced, xs, [[O.MIN, O.MAX]] * size):
                for x in found:
                    assert np.array_equal(np.isnan(x.astype(np.float32)), places)


# Arrays that are only read, and arrays that only operations hold


@on_ranks(2, 3)
def test_an_input_may_be_read_only(world: ProcessGroup) -> None:
    size, rank = world.size, world.rank
    x = np.arange(3.0 * size)
    parts = np.split(x, size)
    for array in (x, *parts):
        array.flags.writeable = False
    mine = parts[rank]
    world.all_gather_into_tensor(np.zeros_like(x), mine)
    world.reduce_scatter_tensor(np.zeros_like(mine), x)
    world.reduce_scatter(np.zeros_like(mine), parts)
    world.all_to_all([np.zeros_like(mine) for _ in parts], parts)
    world.gather(mine, [np.zeros_like(mine) for _ in parts] if rank == 0 else None, 0)
    world.scatter(np.zeros_like(mine), parts if rank == 0 else None, 0)
    world.broadcast(x if rank == 1 else np.zeros_like(x), 1)
    world.reduce(np.zeros_like(x) if rank == 1 else x, 1)
    if rank == 0:
        world.send(x, 1)
    elif rank == 1:
        world.recv(np.zeros_like(x), 0)
    assert x.tolist() == list(range(3 * size))


@on_ranks(3)
def test_an_operation_keeps_its_arrays_alive(world: ProcessGroup) -> None:
    """Only the operations hold the arrays; their memory must not be reused meanwhile."""
    following, previous = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    got = [np.zeros(5000) for _ in range(20)]
    for number in range(20):
        world.isend(np.full(5000, float(number)), following, tag=number)
        world.all_reduce(np.full(5000, float(number)), async_op=True)
    gc.collect()
    noise = [np.full(5000, -1.0) for _ in range(40)]
    for number, x in enumerate(got):
        world.recv(x, previous, tag=number)
        assert (x == number).all(), number
    assert len(noise) == 40
    world.barrier()


@on_ranks(1, 2, 3)
def test_a_batch_made_again_sees_its_arrays_as_they_are(world: ProcessGroup) -> None:
    """Change values, memory and size of arrays between calls: each call sees the change."""
    x, y = np.ones(100), np.ones(40)
    for turn in range(6):
        x[...], y[...] = 1, 2
        with dist.coalescing_manager(world):
            world.all_reduce(x)
            world.all_reduce(y)
        assert (x == world.size).all(), turn
        assert (y == 2 * world.size).all(), turn
        if turn in (2, 3):
            x.resize(100 * 10**turn, refcheck=False)
        if turn == 4:
            x = x[::-1]


@on_ranks(1, 2, 3)
def test_a_plan_sees_its_arrays_as_they_are(world: ProcessGroup) -> None:
    """Change the arrays of a kept plan between launches: each launch sees the change."""
    x, y = np.ones(100), np.ones(40)
    with dist.coalescing_manager(world) as block:
        world.all_reduce(x)
        world.all_reduce(y)
    plan = block.plan()
    for turn in range(8):
        x[...], y[...] = 1, 2
        work = plan.launch(async_op=turn % 2 == 1)
        if work is not None:
            work.wait()
        assert (x == world.size).all(), turn
        assert (y == 2 * world.size).all(), turn
        if turn in (2, 5):
            x.resize(100 * 10 ** (turn // 2), refcheck=False)


# Blocks


def each_uses_what_the_one_before_left(group: ProcessGroup, pick: slice) -> None:
    def calls(x: Array, out: Array) -> None:
        group.all_reduce(x)
        group.all_reduce(x[pick])
        group.all_reduce(x)
        group.all_gather_into_tensor(out, x)
        group.broadcast(out, group.size - 1)
        group.reduce_scatter_tensor(x, out)

    x, y = np.full(600, group.rank + 1.0), np.full(600, group.rank + 1.0)
    out, other = np.zeros(600 * group.size), np.zeros(600 * group.size)
    calls(x, out)
    with dist.coalescing_manager(group):
        calls(y, other)
    assert np.array_equal(y, x), (y[:4], x[:4])
    assert np.array_equal(other, out)


def test_collectives_of_a_block_follow_each_other(ranks_of: At) -> None:
    for size in (1, 2, 3, 5):
        ranks_of(size).run(each_uses_what_the_one_before_left, [slice(100, 400)] * size)


def test_slices_of_a_block_follow_each_other_too(ranks_of: At) -> None:
    for pick in (slice(None, None, 2), slice(None, None, -1), slice(500, 3, -7)):
        ranks_of(3).run(each_uses_what_the_one_before_left, [pick] * 3)


def fails_within(group: ProcessGroup, x: Array, async_ops: bool, pending: list[Any]) -> None:
    with dist.coalescing_manager(group, async_ops=async_ops):
        group.all_reduce(x)
        pending.append(group.broadcast(x, 0, async_op=True))
        raise KeyError("mine")


@on_ranks(1, 2, 3)
def test_an_exception_in_a_block_leaves_the_group_unchanged(world: ProcessGroup) -> None:
    x, launches = np.full(4, 1.0), world.seq
    for async_ops in (False, True):
        pending: list[Any] = []
        with pytest.raises(KeyError):
            fails_within(world, x, async_ops, pending)
        with pytest.raises(RuntimeError, match="nothing was launched"):
            pending[0].wait()
    assert world.seq == launches
    assert (x == 1).all()
    world.all_reduce(x)
    with dist.coalescing_manager(world):
        world.all_reduce(x)
    assert (x == world.size**2).all()


@on_ranks(1)
def test_a_single_rank_is_a_group_too(world: ProcessGroup) -> None:
    x = mixed_values(DType.FLOAT32, 50, 1)
    for op in (O.SUM, O.AVG, O.MIN, O.premul_sum(1.0)):
        y = x.copy()
        world.all_reduce(y, op)
        assert same_bits(y, x)
    out = np.zeros_like(x)
    issue(world, O.AllGather(out, x))
    assert same_bits(out, x)
    with pytest.raises(ValueError, match="another rank"):
        world.send(x, 0)
