"""all_reduce_leaves: a sum over a fixed tree, with the same bits on any number of ranks."""

from __future__ import annotations

import hashlib
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nc10d as dist
from nc10d.arrays.dtypes import DType, ElementKind
from nc10d.group.process_group import ProcessGroup
from nc10d.kernels.simd import WIDEN
from nc10d.ops import AVG, SUM, ReduceOp
from nc10d.testing import Ranks, reference, run_local, run_ranks
from nc10d.testing.strategies import mixed_values

SIZES = range(1, 9)
Array = np.ndarray[Any, np.dtype[Any]]


def summed(leaves: list[Array], op: ReduceOp) -> Array:
    """Return the sum along the tree, by NumPy alone."""
    dtype = leaves[0].dtype
    wide = np.dtype(np.float32) if is_narrow(dtype) else dtype
    held = [x.astype(wide) for x in leaves]
    with np.errstate(all="ignore"):
        while len(held) > 1:
            held = [a + b for a, b in zip(held[::2], held[1::2], strict=True)]
        if op is AVG:
            held[0] = reference.fold([held[0]], AVG) if len(leaves) == 1 else held[0] / len(leaves)
            held[0] = np.trunc(held[0]) if dtype.kind in "iu" else held[0]
        return held[0].astype(dtype)


def is_narrow(dtype: np.dtype[Any]) -> bool:
    return dtype.itemsize <= 2 and dtype.kind in "fV"


def on_rank(
    group: ProcessGroup, dtype: DType, count: int, leaves: int, op: ReduceOp, seed: int
) -> Array:
    mine = [numbers(dtype, count, seed + leaf) for leaf in dist.leaf_range(leaves)]
    out = np.empty(count, dtype.numpy)
    dist.all_reduce_leaves(out, mine, leaves, op=op)
    return out


def numbers(dtype: DType, count: int, seed: int) -> Array:
    """Return numbers of many sizes, whose sums depend on the order."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(count) * 10.0 ** rng.integers(-2, 3, count)
    return x.astype(dtype.numpy)


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[int, Ranks]]:
    started = {size: Ranks(size, "threads", timeout=60) for size in SIZES}
    yield started
    for ranks in started.values():
        ranks.close()


FLOATS = [d for d in DType if d.family in (ElementKind.FLOAT, ElementKind.COMPLEX)]


@settings(deadline=None, max_examples=30)
@given(
    dtype=st.sampled_from([*FLOATS, DType.INT32, DType.UINT8, DType.BOOL]),
    count=st.sampled_from([0, 1, 7, 64, 1000, 4099, 30_000]),
    size=st.sampled_from(SIZES),
    exponent=st.integers(0, 4),
    average=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_every_number_of_ranks_has_the_trees_sum(
    worlds: dict[int, Ranks],
    dtype: DType,
    count: int,
    size: int,
    exponent: int,
    average: bool,
    seed: int,
) -> None:
    leaves = max(2**exponent, 1 << (size - 1).bit_length())
    op = AVG if average and dtype.family in (ElementKind.FLOAT, ElementKind.INT) else SUM
    want = summed([numbers(dtype, count, seed + leaf) for leaf in range(leaves)], op)
    row = [dtype], [count], [leaves], [op], [seed]
    for got in worlds[size].run(on_rank, *(each * size for each in row)):
        assert reference.same_bits(got, want)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16, DType.INT16], ids=str)
@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_large_arrays_are_summed_by_windows(size: int, dtype: DType) -> None:
    count = (2 << 20) // dtype.itemsize + 5
    want = summed([numbers(dtype, count, leaf) for leaf in range(8)], AVG)
    row = [dtype], [count], [8], [AVG], [0]
    for got in run_ranks(on_rank, size, "threads", *(each * size for each in row)):
        assert reference.same_bits(got, want)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_and_infinities_are_those_of_the_tree(dtype: DType) -> None:
    def run(group: ProcessGroup) -> Array:
        out = np.empty(300, dtype.numpy)
        dist.all_reduce_leaves(out, [mixed_values(dtype, 300, n) for n in dist.leaf_range(4)], 4)
        return out

    want = summed([mixed_values(dtype, 300, leaf) for leaf in range(4)], SUM)
    for size in (1, 3, 4):
        for got in run_local(run, size):
            assert reference.same_bits(got, want)


GOLDEN = {
    ("float64", 4, 1): "80c795ef8c57fc4f",
    ("float64", 8, 100): "788d83c7e36a22fe",
    ("float64", 16, 5000): "ac1b6d4ff24d7125",
    ("float32", 4, 1): "217e458adddca184",
    ("float32", 8, 100): "8ed8048eb1868f7b",
    ("float32", 16, 5000): "3a786bbea9fc3332",
    ("float16", 4, 1): "4f594b1c96ddb8a8",
    ("float16", 8, 100): "00fd6f6473e287fb",
    ("float16", 16, 5000): "c1465d104d2b3928",
    ("bfloat16", 4, 1): "25c810c509c6eac7",
    ("bfloat16", 8, 100): "20109c02aa8e478c",
    ("bfloat16", 16, 5000): "d26a89b2eef97a9d",
    ("float8_e4m3fn", 4, 1): "3f3ef786b34d6dd7",
    ("float8_e4m3fn", 8, 100): "e012a5765a29d162",
    ("float8_e4m3fn", 16, 5000): "9ebdb1e7c2ff9f59",
    ("complex64", 4, 1): "d5ba424549cf1956",
    ("complex64", 8, 100): "2aef0da12d7408b3",
    ("complex64", 16, 5000): "8900159fbd8a0e2c",
    ("int32", 4, 1): "084e5123d78ea4a2",
    ("int32", 8, 100): "d0e231d8b0453e0c",
    ("int32", 16, 5000): "0ed41e19f82caaf0",
}
"""The digest of the sum and the average, by dtype, number of leaves and number of elements."""


@pytest.mark.parametrize(("dtype", "leaves", "count"), GOLDEN)
def test_the_bits_are_those_of_the_past(dtype: str, leaves: int, count: int) -> None:
    element = DType[dtype.upper()]
    for size in (1, 2, 3, 4, 8):
        if size > leaves:
            continue
        found = hashlib.sha256()
        for op in (SUM, AVG) if element.family is not ElementKind.COMPLEX else (SUM,):
            row = [element], [count], [leaves], [op], [42]
            outs = run_local(on_rank, size, *(each * size for each in row))
            assert len({out.tobytes() for out in outs}) == 1
            found.update(outs[0].tobytes())
        assert found.hexdigest()[:16] == GOLDEN[dtype, leaves, count], size


def in_every_form(group: ProcessGroup) -> None:
    leaves = [numbers(DType.FLOAT32, 12, n).reshape(3, 4) for n in range(4)]
    want = summed(leaves, SUM)
    mine = [leaves[n] for n in dist.leaf_range(4)]
    for make in (np.zeros((3, 4), np.float32), np.zeros((4, 3), np.float32).T):
        dist.all_reduce_leaves(make, mine, leaves=4, group=group)
        assert reference.same_bits(np.ascontiguousarray(make), want)
    out = np.zeros((3, 4), np.float32)
    dist.all_reduce_leaves(out, [np.asfortranarray(x) for x in mine], 4, op=SUM.ordered)
    assert reference.same_bits(out, want)
    for x, n in zip(mine, dist.leaf_range(4), strict=True):
        assert reference.same_bits(x, numbers(DType.FLOAT32, 12, n).reshape(3, 4))
    if len(mine) == 1:
        x = mine[0].copy()
        dist.all_reduce_leaves(x, [x], 4)
        assert reference.same_bits(x, want)


@pytest.mark.parametrize("size", [2, 4])
def test_every_form_of_the_call(size: int) -> None:
    run_local(in_every_form, size)
    run_ranks(in_every_form, size, "simulated")


def passes(group: ProcessGroup) -> Any:
    params = [np.zeros(3, np.int64), np.zeros(4, np.float32)]
    reducer = dist.Reducer(params, group, leaves=8)
    for leaf in dist.leaf_range(8):
        reducer.begin()
        for index, gradient in enumerate(reducer.gradients):
            gradient.fill(100 + 8 * leaf)
            reducer.grad_ready(index)
        reducer.finish()
    return [x.tolist() for x in reducer.gradients]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_reducer_has_means_of_ints_too(size: int) -> None:
    assert run_local(passes, size) == [[[128] * 3, [128.0] * 4]] * size


@pytest.mark.ranks(2, strict=False)
def test_mistakes_are_errors_before_anything_is_sent(world: ProcessGroup) -> None:
    x = np.ones(3)
    call = dist.all_reduce_leaves
    first, last = (0, 3) if world.rank == 0 else (4, 7)
    for mine in ([x], [x] * 5, x, None):
        held = f"mine must be a list of 4 arrays, leaves {first} to {last} of 8"
        with pytest.raises(ValueError, match=held):
            call(x.copy(), mine)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="power of two, at most 65536, got 6"):
        call(x.copy(), [x] * 3, 6)
    with pytest.raises(ValueError, match="1 leaves are not enough for 2 ranks"):
        dist.leaf_range(1)
    with pytest.raises(ValueError, match="op must be SUM or AVG, got MAX"):
        call(x.copy(), [x], 2, op=dist.MAX)
    with pytest.raises(TypeError, match="the average of truth values"):
        call(np.zeros(1, bool), [np.zeros(1, bool)], 2, op=AVG)
    with pytest.raises(TypeError, match=r"mine\[0\] must have the dtype of out, float64"):
        call(x.copy(), [x.astype(np.float32)], 2)
    with pytest.raises(ValueError, match=r"mine\[0\] must have 3 elements, as many as out"):
        call(x.copy(), [np.ones(4)], 2)
    with pytest.raises(ValueError, match="out and mine"):
        call(x, [x[:3], x.copy()], 4)
    with (
        pytest.raises(ValueError, match="all_reduce_leaves is not possible inside a coalescing"),
        dist.coalescing_manager(),
    ):
        call(x.copy(), [x], 2)
    out = x.copy()
    call(out, [x], 2)
    assert out.tolist() == [2.0] * 3


@pytest.mark.parametrize("count", [3, 5000])
def test_ranks_that_differ_in_the_tree_or_the_reduction_are_a_mismatch(count: int) -> None:
    def run(group: ProcessGroup, leaves: int, op: ReduceOp) -> None:
        x = [np.ones(count)] * len(dist.leaf_range(leaves))
        with pytest.raises(dist.CollectiveMismatch, match="all_reduce_leaves with 4 leaves, SUM"):
            dist.all_reduce_leaves(np.ones(count), x, leaves, op=op)

    run_ranks(run, 3, "threads", [4, 4, 8], [SUM] * 3)
    run_ranks(run, 3, "threads", [4] * 3, [SUM, AVG, SUM])


@pytest.mark.parametrize(("size", "leaves", "most"), [(2, 2, 1.0), (1, 4, 1.0 + 8 * 2)])
def test_buckets_share_the_memory_in_which_narrow_floats_are_widened(
    size: int, leaves: int, most: float
) -> None:
    """`most` is in float32 arrays as long as a bucket; with 4 leaves, a bucket keeps 2 sums."""
    count, buckets = 300_000, 8

    def run(group: ProcessGroup) -> int:
        params = [np.zeros(count, DType.BFLOAT16.numpy) for _ in range(buckets)]
        each = [[i] for i in range(buckets)]
        reducer = dist.Reducer(params, group, leaves=leaves, bucket_indices=each)
        dist.barrier(group)
        tracemalloc.start()
        for _ in reducer.leaves.mine:  # type: ignore[union-attr]
            reducer.begin()
            for param in range(buckets):
                reducer.grad_ready(param)
            reducer.finish()
        dist.barrier(group)
        found, _ = tracemalloc.get_traced_memory()
        dist.barrier(group)  # the ranks are threads, and have kept their memory until here
        return found

    try:
        found = max(run_local(run, size))
    finally:
        tracemalloc.stop()
    assert found / (size * 4 * count) == pytest.approx(most, abs=0.5)


def test_a_rank_outside_the_group_does_nothing() -> None:
    def run(group: ProcessGroup) -> None:
        some = dist.new_group([0])
        x = np.zeros(2)
        if group.rank == 0:
            dist.all_reduce_leaves(x, [np.ones(2)] * 2, 2, some)
            assert x.tolist() == [2.0, 2.0]
        else:
            with pytest.warns(RuntimeWarning, match="all_reduce_leaves"):
                dist.all_reduce_leaves(x, [], 2, some)
            assert dist.leaf_range(2, some) == range(0)

    run_ranks(run, 2, "threads")


def test_narrow_floats_are_rounded_once() -> None:
    """0.0625 is an eighth of the step between numbers at 64: each would be lost on its own."""

    def run(group: ProcessGroup) -> float:
        values = [64.0, *[0.0625] * 7]
        dtype = DType.BFLOAT16.numpy
        mine = [np.full(1, values[n], dtype) for n in dist.leaf_range(8)]
        out = np.zeros(1, dtype)
        dist.all_reduce_leaves(out, mine)
        return float(out[0])

    assert {x for size in (1, 3, 8) for x in run_local(run, size)} == {64.5}
    assert set(WIDEN) >= {DType.BFLOAT16, DType.FLOAT16}
