"""Groups whose ranks have ids of several hosts: everything that any group does."""

from __future__ import annotations

import functools
import gc
import os
import threading
from typing import Any

import numpy as np
import pytest
from lettered_hosts import on_hosts, ranks_on

import nc10d as dist
from nc10d.api.queries import coalescing_manager
from nc10d.arrays.dtypes import DType
from nc10d.backend.cpu.algorithms.hosts_reduce import CHAINED, SEGMENT
from nc10d.ops import AVG, MAX, SUM, ReduceOp, premul_sum
from nc10d.testing import check_backend, reference

EXACT = (DType.INT32, DType.UINT8, DType.BOOL)


@pytest.mark.slow
def test_ranks_on_separate_hosts_conform() -> None:
    assert check_backend(functools.partial(on_hosts, "abcde"), (2, 3), seed=5) > 200


SEVERAL = ["aab", "aabb", "abab", pytest.param("aaab", marks=pytest.mark.long)]


@pytest.mark.slow
@pytest.mark.parametrize("names", SEVERAL)
def test_hosts_with_several_ranks_conform(names: str) -> None:
    make_on = functools.partial(on_hosts, names)
    assert check_backend(make_on, (len(names),), dtypes=EXACT, seed=6) > 60


@pytest.mark.parametrize("names", ["ab", "aab", "abab", "abc", "aabbc"])
@pytest.mark.parametrize("op", [SUM, AVG, premul_sum(0.3), MAX], ids=str)
def test_the_folds_of_hosts_are_folded_in_the_order_of_hosts(names: str, op: ReduceOp) -> None:
    rng = np.random.default_rng(7)
    hosts = [[r for r, name in enumerate(names) if name == host] for host in dict.fromkeys(names)]
    for dtype, count in ((np.float32, 3), (np.float32, 5000), (np.float16, 90_000)):
        arrays = [rng.standard_normal(count).astype(dtype) for _ in names]
        want = across(arrays, hosts, op)
        with ranks_on(names) as ranks:
            for reduced in (in_place, asynchronous, in_a_block):
                for got in ranks.run(reduced, arrays, [op] * len(names)):
                    assert reference.same_bits(got, want), (dtype, count, reduced)


@pytest.mark.parametrize("names", ["abc", "aabbccdd"])
def test_large_arrays_come_down_a_chain_of_hosts(names: str) -> None:
    count = (CHAINED * len(set(names)) + 3 * SEGMENT) // 4 + 1
    with ranks_on(names) as ranks:
        for root in range(len(names)):
            assert all(ranks.run(receives, [root] * len(names), [count] * len(names)))


def receives(group: Any, root: int, count: int) -> bool:
    x = np.arange(count, dtype=np.float32) * (group.rank + 1)
    group.broadcast(x, root)
    return reference.same_bits(x, np.arange(count, dtype=np.float32) * (root + 1))


def across(arrays: list[Any], hosts: list[list[int]], op: ReduceOp) -> Any:
    """Fold each host's arrays in the order of ranks, then the hosts' results."""
    pair = MAX if op == MAX else SUM
    scaled = [reference.fold([x], op) if op.factor is not None else x for x in arrays]
    total = reference.fold(
        [reference.fold([scaled[r] for r in host], pair) for host in hosts], pair
    )
    return (total / len(arrays)).astype(total.dtype) if op == AVG else total


def in_place(group: Any, x: Any, op: ReduceOp) -> Any:
    x = x.copy()
    group.all_reduce(x, op)
    return x


def asynchronous(group: Any, x: Any, op: ReduceOp) -> Any:
    x = x.copy()
    group.all_reduce(x, op, async_op=True).wait()
    return x


def in_a_block(group: Any, x: Any, op: ReduceOp) -> Any:
    x, more = x.copy(), np.ones(7)
    with coalescing_manager(group):
        group.all_reduce(more)
        group.all_reduce(x, op)
    return x


def test_a_receive_that_precedes_its_send_gets_that_message() -> None:
    def echo(group: Any) -> list[float]:
        x, got = np.zeros(2), []
        for number in range(60):
            x[:] = number
            group.send(x, 1) if group.rank == 0 else group.recv(x, 0)
            x += 0.5 * group.rank
            group.recv(x, 1) if group.rank == 0 else group.send(x, 0)
            got.append(float(x.sum()))
        return got

    with ranks_on("ab") as ranks:
        assert ranks.run(echo) == [[2 * number + 1.0 for number in range(60)]] * 2


def test_nothing_stays_open() -> None:
    def descriptors() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    def sub_group(group: Any) -> None:
        group.barrier()

    with ranks_on("aab") as ranks:
        ranks.run(sub_group)
    before, threads = descriptors(), threading.active_count()
    for _ in range(3):
        with ranks_on("aab") as ranks:
            ranks.run(sub_group)
    assert descriptors() <= before
    assert threading.active_count() <= threads


def objects_of_any_size(group: Any) -> list[Any]:
    """Exchange the same objects several times: the later calls are prepared."""
    found: list[Any] = []
    for _ in range(3):
        for obj in ({"rank": group.rank}, bytes(2000), [0.5] * 2000):
            places, first = [None] * group.size, [obj]
            dist.all_gather_object(places, obj, group)
            dist.broadcast_object_list(first, 0, group)
            if group.rank == 0:
                dist.send_object_list([obj], 1, group)
            elif group.rank == 1:
                dist.recv_object_list(first, 0, group)
            found.append((places, first))
    return found


@pytest.mark.parametrize("names", ["ab", "aab"])
def test_objects_travel_between_hosts(names: str) -> None:
    with ranks_on(names) as ranks:
        for found in ranks.run(objects_of_any_size):
            dicts, *others = found[:3]
            assert dicts == ([{"rank": rank} for rank in range(len(names))], [{"rank": 0}])
            assert others == [([obj] * len(names), [obj]) for obj in (bytes(2000), [0.5] * 2000)]
            assert found == found[:3] * 3


def averaged(group: Any, cap: int, leaves: int) -> bytes:
    """Return the bits of the gradients that a Reducer averages in rank order, or over leaves."""
    params = [np.zeros(n, np.float32) for n in (3, 500, 41)]
    caps = {"first_bytes": cap, "cap_bytes": cap}
    reducer = dist.Reducer(params, group, ordered=not leaves, leaves=leaves, **caps)
    mine = [group.rank] if reducer.leaves is None else reducer.leaves.mine
    for leaf in mine:
        reducer.begin()
        rng = np.random.default_rng(leaf)
        for index, x in enumerate(params):
            reducer.grad_ready(index, rng.standard_normal(x.shape).astype(np.float32))
        reducer.finish()
    return b"".join(x.tobytes() for x in reducer.gradients)


def test_ordered_buckets_and_leaves_have_the_same_bits_on_any_hosts_with_any_buckets() -> None:
    in_order, by_leaves = set(), set()
    for names, cap in (("aaaa", 1 << 20), ("aabb", 64), ("abab", 1 << 20), ("abcd", 64)):
        with ranks_on(names) as ranks:
            in_order.update(ranks.run(averaged, [cap] * 4, [0] * 4))
            by_leaves.update(ranks.run(averaged, [cap] * 4, [8] * 4))
    for names in ("aba", "aab"):
        with ranks_on(names) as ranks:
            by_leaves.update(ranks.run(averaged, [1000] * 3, [8] * 3))
    assert len(in_order) == len(by_leaves) == 1
