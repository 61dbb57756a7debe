"""Registered arrays: ordinary arrays that collectives read in place."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from on_ranks import on_ranks

import nc10d as dist
from nc10d.arrays.dtypes import DType, ElementKind
from nc10d.backend.cpu.algorithms.reduction import Reduction
from nc10d.group.process_group import ProcessGroup
from nc10d.group.world import own_world
from nc10d.ops import AVG, MAX, SUM, ReduceOp, premul_sum
from nc10d.testing import Ranks, reference, run_ranks
from nc10d.testing.reference import same_bits
from nc10d.testing.strategies import mixed_values

Array = np.ndarray[Any, np.dtype[Any]]
LARGE = 100_003  # float32 elements: above the size from which arrays are read in place


@pytest.fixture(scope="module")
def processes() -> Iterator[Ranks]:
    with Ranks(3, "processes", timeout=60) as found:
        yield found


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    with Ranks(2, "processes", timeout=60) as found:
        yield found


def values(rank: int, count: int) -> Array:
    return np.random.default_rng(rank).standard_normal(count).astype(np.float32)


def made(group: ProcessGroup, x: Array, start: int | None) -> Array:
    """Return a copy: registered, from element `start` of a page on, or plain if `start` is None."""
    if start is None:
        return x.copy()
    whole = dist.empty(start + x.size, x.dtype, group)
    whole[start:] = x.reshape(-1)
    return whole[start:].reshape(x.shape)


def every_collective(group: ProcessGroup, starts: list[int | None], count: int) -> None:
    """Collectives on arrays registered on some ranks: the results must be those of plain arrays."""
    size, mine = group.size, starts[group.rank]
    inputs = [values(rank, count * size) for rank in range(size)]
    x = made(group, inputs[group.rank], mine)
    for op in (SUM, AVG, MAX, premul_sum(0.5)):
        y = made(group, x, mine)
        group.all_reduce(y, op)
        assert same_bits(y, reference.all_reduce(inputs, op)[group.rank])
    out = made(group, np.zeros(count, np.float32), mine)
    group.reduce_scatter_tensor(out, x)
    assert same_bits(out, np.split(reference.all_reduce(inputs)[0], size)[group.rank])
    group.reduce_scatter(out, [made(group, c, mine) for c in np.split(x, size)])
    assert same_bits(out, np.split(reference.all_reduce(inputs)[0], size)[group.rank])
    whole = made(group, np.zeros(count * size * size, np.float32), mine)
    group.all_gather_into_tensor(whole, x)
    assert same_bits(whole, np.concatenate(inputs))
    swapped = made(group, np.zeros_like(x), mine)
    group.all_to_all_single(swapped, x)
    assert same_bits(swapped, np.concatenate([np.split(i, size)[group.rank] for i in inputs]))
    group.broadcast(swapped, 1)
    assert same_bits(swapped, np.concatenate([np.split(i, size)[1] for i in inputs]))
    around(group, x, inputs, mine)


def around(group: ProcessGroup, x: Array, inputs: list[Array], mine: int | None) -> None:
    following, previous = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    got = made(group, np.zeros_like(x), mine)
    sent = group.isend(x, following)
    group.recv(got, previous)
    sent.wait()
    assert same_bits(got, inputs[previous])


STARTS = st.sampled_from([None, 0, 1])
COUNTS = st.sampled_from([1, 1000, LARGE, 1_000_000])


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(st.lists(STARTS, min_size=3, max_size=3), COUNTS)
def test_results_are_those_of_plain_arrays(
    processes: Ranks, starts: list[int | None], count: int
) -> None:
    processes.run(every_collective, [starts] * 3, [count] * 3)


@settings(max_examples=20, deadline=None)
@given(st.lists(STARTS, min_size=2, max_size=2), COUNTS)
def test_two_ranks_results_are_those_of_plain_arrays(
    pair: Ranks, starts: list[int | None], count: int
) -> None:
    pair.run(every_collective, [starts] * 2, [count] * 2)


@pytest.mark.parametrize("starts", [[0, 0], [1, None], [None, 0]])
def test_two_threads_results_are_those_of_plain_arrays(starts: list[int | None]) -> None:
    run_ranks(partial(every_collective, starts=starts, count=LARGE), 2)


def gradients(group: ProcessGroup, name: str, count: int, which: list[bool], cut: int) -> None:
    dtype = next(d for d in DType if d.label == name)
    inputs = [mixed_values(dtype, count, seed) for seed in (1, 2)]
    for op in (SUM, AVG):
        start = 0 if which[group.rank] else None
        whole = made(group, np.resize(inputs[group.rank], count + cut), start)
        x = whole[:count]
        group.all_reduce(x, op)
        assert same_bits(x, reference.all_reduce(inputs, op)[0]), (name, op)
        assert same_bits(whole[count:], np.resize(inputs[group.rank], count + cut)[count:])


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("op", [SUM, AVG, MAX])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.INT32])
def test_which_reductions_write_to_both_arrays(size: int, op: ReduceOp, dtype: DType) -> None:
    both = Reduction(op, dtype, size).how.both
    assert (both is not None) == (size == 2 and op is not MAX and dtype is DType.FLOAT32)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(
        [d.label for d in DType if d.family in (ElementKind.FLOAT, ElementKind.COMPLEX)]
    ),
    st.integers(60_000, 200_000),
    st.sampled_from([[True, True], [True, False], [False, True]]),
    st.integers(0, 5000),
)
def test_two_ranks_add_into_both_arrays_at_once(
    pair: Ranks, name: str, count: int, which: list[bool], cut: int
) -> None:
    pair.run(gradients, [name] * 2, [count] * 2, [which] * 2, [cut] * 2)


def parts_of_one(group: ProcessGroup) -> None:
    """Reduce views, reshapes and strided parts of registered memory, like other arrays."""
    x = dist.zeros((700, 700), np.float32, group)
    x[...] = group.rank
    want = sum(range(group.size))
    for part in (x, x[100:400], x[:, ::2], x.reshape(-1)[7:-9], x.T):
        part[...] = group.rank
        group.all_reduce(part)
        assert (part == want).all()


def test_any_part_of_a_registered_array_will_do(processes: Ranks) -> None:
    processes.run(parts_of_one)


def gives_back(group: ProcessGroup) -> None:
    arena: Any = group.backend("cpu").group.context.arena  # type: ignore[attr-defined]
    dist.zeros(1, group=group)
    gc.collect()
    before = arena.used()
    x = dist.empty(1_000_000, np.uint8, group)
    part = x[5:10]
    assert arena.used() >= before + 1_000_000 - 4096
    del x
    gc.collect()
    part[:] = 1
    dist.zeros(1, group=group)
    assert arena.used() >= before + 1_000_000 - 4096, "a part of it is still in use"
    del part
    gc.collect()
    dist.zeros(1, group=group)
    assert arena.used() <= before + 4096


def test_memory_comes_back_with_the_last_part() -> None:
    run_ranks(gives_back, 1)


def outlives(group: ProcessGroup) -> Array:
    x = dist.from_numpy(np.arange(5), group)
    work = group.all_reduce(dist.from_numpy(np.ones(LARGE), group), async_op=True)
    assert work is not None
    work.wait()
    return x


def test_an_array_outlives_its_group() -> None:
    for x in run_ranks(outlives, 2):
        assert np.array_equal(x, np.arange(5))
        x += 1


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: dist.empty(-1), ValueError, "negative size"),
        (lambda: dist.empty((2, -3)), ValueError, "negative size"),
        (lambda: dist.empty(2, object), TypeError, "references"),
        (lambda: dist.zeros(1 << 50), MemoryError, "no"),
    ],
)
@on_ranks(1)
def test_an_array_that_cannot_be_made_is_an_error(
    world: ProcessGroup, call: Callable[[], Array], error: type[Exception], text: str
) -> None:
    del world
    with pytest.raises(error, match=text):
        call()


ENDS = """
import numba
import nc10d as dist

dist.init_process_group("cpu", rank=0, world_size=1, store=dist.HashStore())


@numba.njit
def first(x):
    return x[0]


kept = dist.zeros(1000)
assert first(kept) == 0
"""


def test_an_array_that_lives_to_the_end_of_its_program_prints_nothing() -> None:
    ended = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("", "")


@on_ranks(1)
def test_shapes_may_be_numpys_numbers(world: ProcessGroup) -> None:
    x = dist.zeros((np.int32(2), np.int64(30_000)), np.float32, world)
    assert x.shape == (2, 30_000)
    assert dist.empty(np.prod(x.shape), group=world).size == x.size


def test_other_backends_give_plain_arrays() -> None:
    with own_world():
        dist.init_process_group("fake", rank=0, world_size=2)
        assert dist.zeros((2, 3), np.int16).shape == (2, 3)
        assert dist.from_numpy([1, 2]).tolist() == [1, 2]
        dist.destroy_process_group()
