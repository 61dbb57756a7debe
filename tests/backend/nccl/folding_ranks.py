"""Laws of reductions in rank order on devices, used by tests and tools/gpu_check.py.

Results are the reference's, bit for bit, whatever the size of a group: known reductions by
`ordered`, and reductions of one's own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from device_ranks import Strided, device, ones, value
from fold_twins import launched, register_twin

import nc10d as dist
from nc10d import cuda
from nc10d.arrays.dtypes import DType, element_of
from nc10d.backend.nccl.launch.planner import LaunchPlanner
from nc10d.cuda.driver import call, driver
from nc10d.errors import UnsupportedPlatform
from nc10d.group.process_group import ProcessGroup
from nc10d.kernels.gpu import gpu_ptx
from nc10d.kernels.gpu.gpu_reduce import fold_name, fold_ptx
from nc10d.ops import AVG, BXOR, MAX, PRODUCT, SUM, ReduceOp, premul_sum
from nc10d.testing import reference
from nc10d.testing.reference import same_bits

HostArray = np.ndarray[Any, np.dtype[Any]]
BEST = np.dtype([("value", "f4"), ("token", "i4")])
AFFINE = np.dtype([("slope", "f8"), ("offset", "f8")])
MOMENTS = np.dtype([("count", "f8"), ("middle", "f8"), ("square", "f8")])
MATRIX = np.dtype([("m", "f4", (2, 2)), ("steps", "i4")])
PACKED = np.dtype([("kind", "i1"), ("value", "f4")])


@dist.reduction(BEST)
def best(a, b):  # type: ignore[no-untyped-def]
    return b if b.value > a.value or (b.value == a.value and b.token < a.token) else a


@dist.reduction(AFFINE)
def affine(a, b):  # type: ignore[no-untyped-def]
    """The map a, then b: not commutative, and a multiplication with an addition."""
    return a.slope * b.slope, a.offset * b.slope + b.offset


def variance(a):  # type: ignore[no-untyped-def]
    return a.count, a.middle, a.square / a.count


@dist.reduction(MOMENTS, finish=variance)
def welford(a, b):  # type: ignore[no-untyped-def]
    n = a.count + b.count
    apart = b.middle - a.middle
    middle = a.middle + apart * (b.count / n)
    return n, middle, a.square + b.square + apart * apart * (a.count * b.count / n)


@dist.reduction(MATRIX)
def product(a, b, out):  # type: ignore[no-untyped-def]
    """A record with an array: written in place."""
    for i in range(2):
        for j in range(2):
            out.m[i, j] = a.m[i, 0] * b.m[0, j] + a.m[i, 1] * b.m[1, j]
    out.steps = a.steps + b.steps


@dist.reduction(PACKED)
def packed(a, b):  # type: ignore[no-untyped-def]
    return b if b.value > a.value else a


@dist.reduction(np.float32, map=lambda a: a * a, finish=lambda a: math.sqrt(a))
def length(a, b):  # type: ignore[no-untyped-def]
    return a + b


@dist.reduction(np.float16, any_order=True)
def larger(a, b):  # type: ignore[no-untyped-def]
    return max(a, b)


def numbers(dtype: np.dtype[Any], rank: int, count: int) -> HostArray:
    """Return a rank's values, with which another order of a sum has other bits."""
    random = np.random.default_rng([rank, count])
    real = random.standard_normal(2 * count) * 10.0 ** random.integers(-3, 4, 2 * count)
    if dtype.kind == "c":
        return real.view(np.complex128).astype(dtype)
    return (real[:count] if dtype.kind not in "iu" else real[:count] * 100).astype(dtype)


def records(dtype: np.dtype[Any], rank: int, count: int) -> HostArray:
    """Return a rank's records: small ints, and floats as in `numbers`."""
    x = np.zeros(count, dtype)
    for place, name in enumerate(dtype.names or ()):
        whole = numbers(np.dtype("f8"), 7 * rank + place, x[name].size).reshape(x[name].shape)
        x[name] = np.floor(np.abs(whole)) % 5 if x[name].dtype.kind == "i" else whole
    if dtype is MOMENTS:
        x["count"] = 1
    return x


Values = Callable[[np.dtype[Any], int, int], HostArray]
KNOWN: list[tuple[ReduceOp, np.dtype[Any]]] = [
    (SUM.ordered, np.dtype("f4")),
    (SUM.ordered, DType.BFLOAT16.numpy),
    (AVG.ordered, np.dtype("f2")),
    (premul_sum(0.3).ordered, np.dtype("f4")),
    (PRODUCT.ordered, np.dtype("c8")),
    (AVG.ordered, np.dtype("i2")),
    (BXOR.ordered, np.dtype("u4")),
    (SUM.ordered, DType.FLOAT8_E4M3FN.numpy),
]
OWN: list[tuple[ReduceOp, np.dtype[Any]]] = [
    (best, BEST),
    (affine, AFFINE),
    (welford, MOMENTS),
    (product, MATRIX),
    (packed, PACKED),
    (length, np.dtype("f4")),
    (larger, np.dtype("f2")),
    (dist.LOGSUMEXP, np.dtype("f4")),
]
COUNTS = (0, 5, 1037)


def known_reductions_fold_in_rank_order(group: ProcessGroup) -> None:
    for op, dtype in KNOWN:
        for count in COUNTS:
            every_call_is_the_reference(group, op, dtype, count, numbers)


def own_reductions_fold_in_rank_order(group: ProcessGroup) -> None:
    for op, dtype in OWN:
        values = records if dtype.names else numbers
        for count in COUNTS:
            every_call_is_the_reference(group, op, dtype, count, values)


def every_call_is_the_reference(
    group: ProcessGroup, op: ReduceOp, dtype: np.dtype[Any], count: int, values: Values
) -> None:
    size, root = group.size, group.size - 1
    prepare(op, dtype)
    given = [values(dtype, rank, count) for rank in range(size)]
    x = put(group, given[group.rank])
    group.all_reduce(x, op)
    check(x, reference.all_reduce(given, op)[group.rank])
    x = put(group, given[group.rank])
    group.reduce(x, root, op)
    check(x, reference.reduce(given, root, op)[group.rank])
    wide = [values(dtype, rank, size * count) for rank in range(size)]
    expected = reference.reduce_scatter([np.split(v, size) for v in wide], op)[group.rank]
    out, inp = put(group, np.zeros(count, dtype)), put(group, wide[group.rank])
    group.reduce_scatter_tensor(out, inp, op)
    check(out, expected)
    out, parts = put(group, np.zeros(count, dtype)), np.split(wide[group.rank], size)
    group.reduce_scatter(out, [put(group, part) for part in parts], op)
    check(out, expected)
    group.reduce_scatter_tensor(inp[group.rank * count : (group.rank + 1) * count], inp, op)
    check(inp[group.rank * count : (group.rank + 1) * count], expected)


def put(group: ProcessGroup, x: HostArray) -> cuda.DeviceArray:
    return cuda.to_device(x, device(group))


def prepare(op: ReduceOp, dtype: np.dtype[Any]) -> None:
    """Register the twin of a kernel, for an emulated device."""
    register_twin(op, element_of(dtype))


def check(x: cuda.DeviceArray, expected: HostArray) -> None:
    cuda.synchronize(x.device)
    assert same_bits(cuda.to_host(x), expected)


def rows_of_numbers_are_records(group: ProcessGroup) -> None:
    """An array of numbers whose rows have as many as a record."""
    pair = np.dtype([("slope", "f8"), ("offset", "f8")])
    prepare(affine, pair)
    given = [records(pair, rank, 33) for rank in range(group.size)]
    x = put(group, given[group.rank].view(np.float64).reshape(33, 2))
    group.all_reduce(x, affine)
    check(x, reference.fold(given, affine).view(np.float64).reshape(33, 2))


def fields_may_lie_in_arrays_of_their_own(group: ProcessGroup) -> None:
    """A pair of arrays in place of records, again and again on others; all stay alive."""
    alive = []
    cases = (dist.ARGMAX, ()), (dist.topk(2), (2,))
    for (op, row), count in itertools.product(cases, (0, 5, 700)):
        own, last = op.pairwise.own, row[0] if row else 1
        element = own.element((np.dtype("f4"), last), (np.dtype("i8"), last))
        prepare(op, element)
        value, index = element.names
        for turn in range(3):
            given = [records(element, rank + 10 * turn, count) for rank in range(group.size)]
            for x in given:
                x[index] = np.arange(x[index].size).reshape(x[index].shape)
                x[value] = -np.sort(-x[value], axis=-1) if row else np.floor(x[value])
            total, mine = reference.fold(given, op), given[group.rank]
            pair = put(group, mine[value].copy()), put(group, mine[index].copy())
            alive.append(pair)
            group.all_reduce(pair, op)
            check(pair[0], total[value].copy())
            check(pair[1], total[index].copy())
            out = put(group, np.zeros_like(mine[value])), put(group, np.zeros_like(mine[index]))
            whole = [np.concatenate([mine[name]] * group.size) for name in (value, index)]
            group.reduce_scatter_tensor(out, (put(group, whole[0]), put(group, whole[1])), op)
            check(out[0], total[value].copy())
            check(out[1], total[index].copy())
    held = Strided(pair[0], (700, 2), (4, 2800)), pair[1]
    with pytest.raises(ValueError, match="all_reduce: fields lie in contiguous arrays"):
        group.all_reduce(held, op)


def arrays_that_are_strided_or_lie_oddly_fold_alike(group: ProcessGroup) -> None:
    """A part that begins between two 16-byte words, and every other element of another."""
    op = SUM.ordered
    prepare(op, np.dtype("f4"))
    given = [numbers(np.dtype("f4"), rank, 2001) for rank in range(group.size)]
    total = reference.fold(given, op)
    x, y = (put(group, given[group.rank]) for _ in range(2))
    group.all_reduce(x[1:2000], op)
    check(x, np.concatenate([given[group.rank][:1], total[1:2000], given[group.rank][2000:]]))
    group.all_reduce(Strided(y, (1000,), (8,), 4), op)
    mixed = given[group.rank].copy()
    mixed[1::2] = total[1::2]
    check(y, mixed)


def a_block_and_its_plan_fold_in_order(group: ProcessGroup) -> None:
    """Ordered, own and plain reductions in a block, on the same and on other arrays."""
    ordered = AVG.ordered
    prepare(ordered, np.dtype("f4"))
    prepare(best, BEST)
    floats = [numbers(np.dtype("f4"), rank, 300) for rank in range(group.size)]
    given = [records(BEST, rank, 50) for rank in range(group.size)]
    x, y, z = (put(group, v[group.rank]) for v in (floats, given, floats))
    with group.coalescing_manager() as block:
        group.all_reduce(x, ordered)
        group.all_reduce(y, best)
        group.all_reduce(z, MAX.ordered)
        group.all_reduce(x, ordered)
    plan = block.plan()
    once = reference.fold(floats, ordered)
    twice = reference.fold([once] * group.size, ordered)
    check(x, twice)
    check(y, reference.fold(given, best))
    check(z, reference.fold(floats, MAX))
    for _ in range(3):
        x.fill_from(floats[group.rank])
        plan.launch()
        check(x, twice)


def works_of_folds_are_works(group: ProcessGroup) -> None:
    """An asynchronous fold, whose arrays the caller drops; the kernel is launched once."""
    op = SUM.ordered
    prepare(op, np.dtype("f8"))
    name, folds = fold_name(op.kind, DType.FLOAT64), group.size > 2
    given = [numbers(np.dtype("f8"), rank, 5000) for rank in range(group.size)]
    for _ in range(3):
        before = launched[name]
        work = group.all_reduce(put(group, given[group.rank]), op, async_op=True)
        work.wait_blocking()
        check(work.result()[0], reference.fold(given, op))
        assert launched[name] - before in (0, int(folds))
        assert launched[name] - before == int(folds) or not launched


@contextmanager
def captured(group: ProcessGroup) -> Iterator[tuple[cuda.Stream, list[Any]]]:
    """Capture a block; yield its stream, and a list with the graph after the block."""
    mine, runs = cuda.Stream(device(group)), list[Any]()
    mode = driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    with cuda.on_device(device(group)), cuda.stream(mine):
        call("cuStreamBeginCapture", mine.handle, mode)
        yield mine, runs
        runs.append(call("cuGraphInstantiate", call("cuStreamEndCapture", mine.handle), 0))


@contextmanager
def reserved() -> Iterator[list[int]]:
    """Yield the sizes of the rooms that this rank allocates in the block."""
    sizes: list[int] = []

    def counting(planner: LaunchPlanner, nbytes: int) -> cuda.DeviceArray:
        sizes.append(nbytes)
        return real(planner, nbytes)

    real = LaunchPlanner._new_room
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LaunchPlanner, "_new_room", counting)
        yield sizes


def launches_share_a_room_that_grows(group: ProcessGroup) -> None:
    """Nothing waits while the room grows; lists, whose launches are not cached, share it too."""
    op, several = AVG.ordered, int(group.size > 1)
    prepare(op, np.dtype("f4"))
    counts = 3000, 3000, 500, 40_000, 90_000
    given = [[numbers(np.dtype("f4"), r, n) for r in range(group.size)] for n in counts]
    folds = [reference.fold(ranks, op) for ranks in given]
    arrays = [put(group, ranks[group.rank]) for ranks in given]
    group.all_reduce(ones(group))
    with reserved() as rooms:
        for turn in range(3):
            for x, ranks, most in zip(arrays, given, (1, 1, 1, 2, 3), strict=True):
                x.fill_from(ranks[group.rank])
                group.all_reduce(x, op, async_op=True)
                assert len(rooms) == (3 if turn else most) * several
            for x, total in zip(arrays, folds, strict=True):
                check(x, total)
        parts = [put(group, given[3][group.rank]) for _ in range(group.size)]
        outs = [put(group, np.zeros(40_000, "f4")) for _ in range(5)]
        for out in outs:
            group.reduce_scatter(out, parts, op, async_op=True)
        assert len(rooms) in (3 * several, 4 * several)
        for out in outs:
            check(out, folds[3])


def a_graph_has_room_of_its_own(group: ProcessGroup) -> None:
    """For NCCL lets a graph run beside launches on other arrays, which emulators do not."""
    op = AVG.ordered
    prepare(op, np.dtype("f4"))
    given = [[numbers(np.dtype("f4"), r, n) for r in range(group.size)] for n in (7000, 70_000)]
    x, y = (put(group, ranks[group.rank]) for ranks in given)
    for _ in range(2):
        group.all_reduce(x, op)
    cuda.synchronize(device(group))
    with captured(group) as (mine, runs), reserved() as rooms:
        group.all_reduce(x, op)
        assert len(rooms) == int(group.size > 1)
    for _ in range(3):
        x.fill_from(given[0][group.rank])
        y.fill_from(given[1][group.rank])
        with cuda.on_device(device(group)):
            call("cuGraphLaunch", runs[0], mine.handle)
        mine.synchronize()
        group.all_reduce(y, op)
        check(x, reference.fold(given[0], op))
        check(y, reference.fold(given[1], op))


def a_deferred_launch_leaves_a_graph_its_memory(group: ProcessGroup) -> None:
    """A launch that waits behind a link, on a strided array that a graph reduces."""
    given = [numbers(np.dtype("f4"), r, 2000) for r in range(group.size)]
    total = reference.fold([x[::2] for x in given], MAX)
    whole, other = (put(group, given[group.rank]) for _ in range(2))
    x, new = (Strided(each, (1000,), (8,)) for each in (whole, other))
    group.all_reduce(x, MAX)
    known: Any = group.all_reduce(x, MAX, async_op=True)
    known.wait_blocking()
    at = known.cached.table.address
    with captured(group) as (mine, runs):
        group.all_reduce(x, MAX)
        group.all_reduce(new, MAX)  # whose copy is allocated here
    if group.size > 1:
        ahead, behind = ((group.rank + step) % group.size for step in (1, -1))
        sent, taken = ones(group), ones(group)
        backend: Any = group.backend("cuda")
        with backend.started.pending.lock:  # no link is formed meanwhile
            works = [group.isend(sent, ahead), group.irecv(taken, behind)]
            works.append(group.all_reduce(x, MAX, async_op=True))
        for work in works:
            work.wait_blocking()
        del work, works
    assert known.cached.table.address == at, "a deferred launch has its own"
    for _ in range(3):
        whole.fill_from(given[group.rank])
        with cuda.on_device(device(group)):
            call("cuGraphLaunch", runs[0], mine.handle)
        mine.synchronize()
        for each in (whole, other):
            assert same_bits(cuda.to_host(each)[::2].copy(), total)


def a_deferred_fold_breaks_no_capture(group: ProcessGroup) -> None:
    """A fold that gets its room while the thread captures another stream."""
    op = AVG.ordered
    prepare(op, np.dtype("f4"))
    given = [numbers(np.dtype("f4"), r, 2000) for r in range(group.size)]
    x = put(group, given[group.rank])
    backend: Any = group.backend("cuda")
    with cuda.on_device(device(group)):
        launches = backend.started
    with launches.pending.lock:  # the thread that forms the communicator can't launch
        work: Any = group.all_reduce(x, op, async_op=True)
        launches.comm_streams.find("all").settled.wait()
        with captured(group):
            launches.pump()
        assert work.submitted.is_set()
    work.wait_blocking()
    check(x, reference.fold(given, op))


def a_graph_repeats_its_folds(group: ProcessGroup) -> None:
    prepare(affine, AFFINE)
    given = [records(AFFINE, rank, 100) for rank in range(group.size)]
    x, other = (put(group, given[group.rank]) for _ in range(2))
    for _ in range(2):  # the first call forms the group and is not kept
        group.all_reduce(x, affine)
    cuda.synchronize(device(group))
    x.fill_from(given[group.rank])
    with captured(group) as (mine, runs):
        group.all_reduce(x, affine)
        group.all_reduce(other, affine)  # for the first time
    check(x, given[group.rank])
    for _ in range(3):
        for array in (x, other):
            array.fill_from(given[group.rank])
        with cuda.on_device(device(group)):
            call("cuGraphLaunch", runs[0], mine.handle)
        mine.synchronize()
        for array in (x, other):
            check(array, reference.fold(given, affine))


def ranks_of_a_subgroup_fold_in_its_order(group: ProcessGroup) -> None:
    """A group with the ranks turned round folds the last rank first."""
    prepare(affine, AFFINE)
    turned = dist.new_group([*reversed(range(group.size))], sort_ranks=False)
    assert isinstance(turned, ProcessGroup)
    given = [records(AFFINE, rank, 40) for rank in range(group.size)]
    x = put(group, given[group.rank])
    turned.all_reduce(x, affine)
    ranks = dist.get_process_group_ranks(turned)
    check(x, reference.fold([given[rank] for rank in ranks], affine))
    dist.destroy_process_group(turned)


@contextmanager
def without_a_compiler() -> Iterator[None]:
    """Run a block as where numba-cuda is not installed."""

    def missing(*_: object) -> Any:
        raise UnsupportedPlatform("GPU kernels need numba-cuda")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu_ptx, "_version", missing)
        gpu_ptx._folder.cache_clear()
        fold_ptx.cache_clear()
        yield
    gpu_ptx._folder.cache_clear()


def folds_are_refused_before_anything_is_sent(group: ProcessGroup) -> None:
    x, y = ones(group), put(group, records(BEST, group.rank, 10))
    group.all_reduce(x)
    with without_a_compiler():
        for array, op in ((y, best), (x, AVG.ordered)):
            with pytest.raises(UnsupportedPlatform, match="numba-cuda"):
                group.all_reduce(array, op)
    with pytest.raises(TypeError, match="NCCL has no scan"):
        group.scan(y, best)
    with pytest.raises(TypeError, match="NCCL has no exscan"):
        group.exscan(y, best)
    odd = cuda.DeviceArray(y.address + 2, (3,), y.dtype, y.device, y)
    with pytest.raises(ValueError, match="not aligned to its elements"):
        group.all_reduce(odd, best)
    group.all_reduce(x)
    assert value(x) == group.size**2


FOLDING: Sequence[Callable[[ProcessGroup], None]] = [
    known_reductions_fold_in_rank_order,
    own_reductions_fold_in_rank_order,
    rows_of_numbers_are_records,
    fields_may_lie_in_arrays_of_their_own,
    arrays_that_are_strided_or_lie_oddly_fold_alike,
    a_block_and_its_plan_fold_in_order,
    works_of_folds_are_works,
    a_graph_repeats_its_folds,
    launches_share_a_room_that_grows,
    a_graph_has_room_of_its_own,
    a_deferred_launch_leaves_a_graph_its_memory,
    a_deferred_fold_breaks_no_capture,
    ranks_of_a_subgroup_fold_in_its_order,
    folds_are_refused_before_anything_is_sent,
]
