"""Reductions of one's own: every call that reduces, for records, fields, rows and tensors."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nc10d as dist
from nc10d.group.process_group import ProcessGroup
from nc10d.ops import ReduceOp
from nc10d.testing import Ranks, reference, run_local, run_ranks

Best = np.dtype([("value", "f4"), ("token", "i4")])
Matrix = np.dtype([("m", "f8", (2, 2))])
Packed = np.dtype([("a", "i1"), ("b", "u2"), ("c", "f4"), ("d", "f8")])
Padded = np.dtype(
    {"names": ["x", "y"], "formats": ["i4", "f8"], "offsets": [4, 12], "itemsize": 21}
)


@dist.reduction(Best)
def best(a: Any, b: Any) -> Any:
    return b if b.value > a.value or (b.value == a.value and b.token < a.token) else a


@dist.reduction(Matrix, identity=([[1, 0], [0, 1]],))
def product(a: Any, b: Any, out: Any) -> None:
    for i in range(2):
        for j in range(2):
            out.m[i, j] = a.m[i, 0] * b.m[0, j] + a.m[i, 1] * b.m[1, j]


def doubled(a: Any) -> Any:
    return a.a, a.b, a.c, a.d + a.d


def negative(a: Any) -> Any:
    return a.a, a.b, -a.c, a.d


@dist.reduction(Packed, map=doubled, finish=negative, identity=(0, 0, 0.0, 0.0))
def packed(a: Any, b: Any) -> Any:
    return a.a ^ b.a, a.b + b.b, max(a.c, b.c), a.d - b.d


@dist.reduction(Padded)
def padded(a: Any, b: Any) -> Any:
    return a.x - b.x, min(a.y, b.y)


@dist.reduction("f4", identity=0)
def difference(a: Any, b: Any) -> Any:
    return a - b


OPS: dict[str, tuple[ReduceOp, np.dtype[Any]]] = {
    "best": (best, Best),
    "product": (product, Matrix),
    "packed": (packed, Packed),
    "padded": (padded, Padded),
    "difference": (difference, np.dtype("f4")),
    "welford": (dist.WELFORD, np.dtype([("n", "f8"), ("mean", "f8"), ("m2", "f8")])),
    "argmax": (dist.ARGMAX, Best),
    "lor": (dist.LOR, np.dtype("i8")),
}


def made(dtype: np.dtype[Any], count: int, seed: int) -> Any:
    """Elements with small whole numbers: products of many stay exact, and equal values occur."""
    chance, found = np.random.default_rng(seed), np.zeros(count, dtype)
    for part in [found[name] for name in dtype.names] if dtype.names else [found]:
        part[...] = chance.integers(0 if part.dtype.kind == "u" else -2, 3, part.shape)
    return found


def in_every_form(group: ProcessGroup, name: str, count: int) -> None:
    op, dtype = OPS[name]
    rank, size = group.rank, group.size
    ranks = [made(dtype, count, 100 * count + r) for r in range(size)]

    def check(call: Callable[[Any], object], expected: list[Any]) -> None:
        x = ranks[rank].copy()
        call(x)
        assert reference.same_bits(x, expected[rank]), (name, count, size)

    total = reference.all_reduce(ranks, op)
    check(lambda x: dist.all_reduce(x, op), total)
    check(lambda x: dist.all_reduce(x, op, async_op=True).wait(), total)
    check(lambda x: dist.reduce(x, size - 1, op), reference.reduce(ranks, size - 1, op))
    check(lambda x: dist.scan(x, op), reference.scan(ranks, op))
    check(lambda x: dist.exscan(x, op), reference.exscan(ranks, op))
    if op.pairwise.own is not None and op.pairwise.own.identity is not None:
        expected = reference.exscan(ranks, op, identity=True)
        check(lambda x: dist.exscan(x, op, identity=True), expected)
    strided = np.zeros((count, 2), dtype)[:, 1]
    strided[...] = ranks[rank]
    dist.all_reduce(strided, op)
    assert reference.same_bits(np.ascontiguousarray(strided), total[rank])
    out = np.zeros(count, dtype)
    dist.all_reduce(ranks[rank], op, out=out)
    assert reference.same_bits(out, total[rank])
    scattered(ranks, op, rank, size)
    x, y = ranks[rank].copy(), ranks[rank].copy()
    with dist.coalescing_manager():
        dist.all_reduce(x, op)
        dist.all_reduce(y, op)
    assert reference.same_bits(x, total[rank])
    assert reference.same_bits(y, total[rank])


def joined(arrays: list[Any]) -> Any:
    whole = np.zeros(sum(map(len, arrays)), arrays[0].dtype)  # np.concatenate drops padding
    for i, x in enumerate(arrays):
        whole[i * len(x) : (i + 1) * len(x)] = x
    return whole


def scattered(ranks: list[Any], op: ReduceOp, rank: int, size: int) -> None:
    lists = [[made(x.dtype, len(x), 7 * r + c) for c in range(size)] for r, x in enumerate(ranks)]
    expected = reference.reduce_scatter(lists, op)[rank]
    for flat in (False, True):
        out = np.zeros_like(expected)
        if flat:
            dist.reduce_scatter_tensor(out, joined(lists[rank]), op)
        else:
            dist.reduce_scatter(out, lists[rank], op)
        assert reference.same_bits(out, expected), (op, flat)


@pytest.fixture(scope="module", params=[1, 2, 3, 4])
def ranks(request: pytest.FixtureRequest) -> Any:
    with Ranks(request.param) as found:
        yield found


@pytest.mark.parametrize("name", OPS)
def test_every_call_folds_in_rank_order(ranks: Ranks, name: str) -> None:
    for count in (0, 1, 3, 257):
        ranks.run(in_every_form, [name] * ranks.world_size, [count] * ranks.world_size)


def large(group: ProcessGroup, name: str, count: int) -> None:
    op, dtype = OPS[name]
    places = np.arange(count) % 61
    ranks = [made(dtype, 61, r)[places] for r in range(group.size)]
    expected = reference.all_reduce([x[:61] for x in ranks], op)[0][places]
    x = ranks[group.rank].copy()
    dist.all_reduce(x, op)
    assert reference.same_bits(x, expected)
    held = dist.empty(x.nbytes, np.uint8).view(dtype)
    held[...] = ranks[group.rank]
    dist.all_reduce(held, op)
    assert reference.same_bits(held, expected), "in shared memory"


@pytest.mark.parametrize("name", ["product", "packed", "padded", "difference"])
def test_chunks_hold_whole_elements(ranks: Ranks, name: str) -> None:
    for nbytes in (300_000, 5_000_000):
        counts = [nbytes // OPS[name][1].itemsize] * ranks.world_size
        ranks.run(large, [name] * ranks.world_size, counts)


# Other arrays that stand for records


def rows(group: ProcessGroup) -> None:
    flat = [made(Matrix, 6, r) for r in range(group.size)]
    expected = reference.all_reduce(flat, product)[0].view("f8").reshape(3, 2, 4)
    x = flat[group.rank].view("f8").reshape(3, 2, 4).copy()
    dist.all_reduce(x, product)
    assert np.array_equal(x, expected)
    y = np.zeros((3, 2, 8))[:, :, ::2]
    y[...] = flat[group.rank].view("f8").reshape(3, 2, 4)
    dist.all_reduce(y, product)
    assert np.array_equal(y, expected)
    out = np.zeros((2, 4))
    dist.reduce_scatter_tensor(out, np.ones((group.size, 2, 4)), product)
    assert np.array_equal(out, np.full((2, 4), 2.0 ** (group.size - 1)))


def test_rows_of_numbers_stand_for_records(ranks: Ranks) -> None:
    ranks.run(rows)


def fields(group: ProcessGroup) -> None:
    rank, size = group.rank, group.size
    records = [made(Best, 40, r) for r in range(size)]
    expected = reference.all_reduce(records, best)[0]
    own = records[rank]
    value, token = own["value"].copy(), own["token"].copy()
    dist.all_reduce((value, token), best)
    assert np.array_equal(value, expected["value"])
    assert np.array_equal(token, expected["token"])
    view = np.zeros((40, 3), "i4")[:, 1]
    view[...], value = own["token"], own["value"].copy()
    work = dist.all_reduce((value, view), dist.ARGMAX, async_op=True)
    work.wait()
    assert np.array_equal(value, expected["value"])
    assert np.array_equal(view, expected["token"])
    if rank == 0:  # ranks may give records and fields: the elements are the same
        x = own.copy()
        dist.scan(x, best)
    else:
        x = np.zeros(40, Best)
        value, token = own["value"].copy(), own["token"].copy()
        dist.scan((value, token), best)
        x["value"], x["token"] = value, token
    assert reference.same_bits(x, reference.scan(records, best)[rank])
    whole = np.concatenate([own] * size)
    piece = np.zeros(40, "f4"), np.zeros(40, "i4")
    dist.reduce_scatter_tensor(piece, (whole["value"].copy(), whole["token"].copy()), best)
    assert np.array_equal(piece[0], expected["value"])
    chunks = [(own["value"].copy(), own["token"].copy()) for _ in range(size)]
    dist.reduce_scatter(piece, chunks, best)
    assert np.array_equal(piece[1], expected["token"])
    value, token, plain = own["value"].copy(), own["token"].copy(), np.ones(3)
    with dist.coalescing_manager():
        dist.all_reduce((value, token), best)
        dist.all_reduce(plain)
        dist.all_reduce(value, dist.MAX)
    assert np.array_equal(value, expected["value"])
    assert plain[0] == size


def test_arrays_hold_fields(ranks: Ranks) -> None:
    ranks.run(fields)


def tensors(group: ProcessGroup) -> None:
    torch = pytest.importorskip("torch")
    value, index = torch.arange(5.0) * (group.rank + 1), torch.full((5,), group.rank)
    dist.all_reduce((value, index), dist.ARGMAX)
    assert value.tolist() == [group.size * n for n in (0.0, 1, 2, 3, 4)]
    assert index.tolist() == [0] + [group.size - 1] * 4
    moments = torch.tensor([[1.0, group.rank, 0]], dtype=torch.float64)
    dist.all_reduce(moments, dist.WELFORD)
    sample = np.arange(group.size)
    expected = [group.size, sample.mean(), sample.var() * group.size]
    assert np.allclose(moments.numpy()[0], expected, rtol=1e-14)
    best_k = torch.tensor([5.0, 3.0]) - group.rank, torch.tensor([10, 20]) + group.rank
    dist.all_reduce(best_k, dist.topk(2))
    assert best_k[0].tolist() == [5.0, 4.0 if group.size > 1 else 3.0]


def test_torch_tensors_hold_fields_and_rows(ranks: Ranks) -> None:
    ranks.run(tensors)


# What ranks compare, and mistakes


def unlike(group: ProcessGroup) -> None:
    factor = np.float32(1.0 + group.rank)

    @dist.reduction("f4")
    def scaled(a: Any, b: Any) -> Any:
        return a + b * factor

    x = np.ones(3, "f4")
    with pytest.raises(dist.CollectiveMismatch) as caught:
        dist.all_reduce(x, scaled)
    text = str(caught.value)
    assert text.count("scaled#") == 2, text
    assert text.count("(test_own_reductions.py:") == 2, text
    assert x.tolist() == [1, 1, 1]


def test_functions_that_differ_are_a_mismatch_that_shows_both() -> None:
    run_local(unlike, 2)


def alike(group: ProcessGroup) -> None:
    factor = np.float32(2.0)

    @dist.reduction("f4")
    def scaled(a: Any, b: Any) -> Any:
        return a * b + factor

    x = np.full(3, 3.0, "f4")
    dist.all_reduce(x, scaled)
    assert x.tolist() == [11, 11, 11]


def test_equal_functions_are_one_reduction_wherever_they_are_made() -> None:
    run_ranks(alike, 2)


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "dtype": (lambda: dist.all_reduce(np.zeros(3), best), "best reduces {value: float32"),
    "sum": (lambda: dist.all_reduce(np.zeros(3, Best)), "nc10d.reduction"),
    "one field": (lambda: dist.all_reduce((np.zeros(3, "f4"),), best), "best reduces"),
    "other order": (
        lambda: dist.all_reduce((np.zeros(3, "i4"), np.zeros(3, "f4")), best),
        "best reduces",
    ),
    "tuple for SUM": (lambda: dist.all_reduce((np.zeros(3), np.zeros(3))), "got a tuple"),
    "no identity": (lambda: dist.exscan(made(Best, 1, 0), best, identity=True), "no identity"),
    "nested": (
        lambda: dist.broadcast(np.zeros(3, [("p", Best)]), 0),
        "field 'p' is structured itself",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_a_type_error_before_anything_is_sent(name: str) -> None:
    call, text = MISTAKES[name]

    def job(group: ProcessGroup) -> None:
        with pytest.raises(TypeError, match=text):
            call()
        dist.barrier()

    run_local(job, 2)


def test_fields_of_another_count_are_a_value_error() -> None:
    def job(group: ProcessGroup) -> None:
        with pytest.raises(ValueError, match=r"the arrays hold fields of \[3, 2\]"):
            dist.all_reduce((np.zeros(3, "f4"), np.zeros(2, "i4")), best)
        x = np.zeros(3, "f4")
        with pytest.raises(ValueError, match="must not share memory"):
            dist.all_reduce((x, x.view("i4")), best)

    run_local(job, 1)


def moved(group: ProcessGroup) -> None:
    x = made(Best, 5, group.rank)
    y = np.zeros(5, Best)
    dist.broadcast(x, 0)
    assert np.array_equal(x, made(Best, 5, 0))
    if group.rank == 0:
        dist.send(x, 1)
        dist.send(np.zeros(5, "i8"), 1)
    elif group.rank == 1:
        dist.recv(y, 0)
        assert np.array_equal(x, y)
        with pytest.raises(dist.CollectiveMismatch, match="bytes of .value: float32"):
            dist.recv(y, 0)


def test_records_are_moved_and_messages_compare_their_types() -> None:
    run_ranks(moved, 2)


@settings(max_examples=20, deadline=None)
@given(st.permutations(range(4)), st.lists(st.integers(0, 3), min_size=4, max_size=4))
def test_rank_order_is_all_that_a_fold_depends_on(order: list[int], seeds: list[int]) -> None:
    ranks = [made(Matrix, 3, seed) for seed in seeds]
    folded = reference.all_reduce([ranks[r] for r in order], product)[0]
    by_hand = np.linalg.multi_dot  # associative, not commutative
    expected = [by_hand([ranks[r]["m"][i] for r in order]) for i in range(3)]
    assert np.array_equal(folded["m"], expected)
