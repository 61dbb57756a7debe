"""Reductions of one's own: every call that reduces, for records, fields, rows and tensors."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from own_reduction_cases import OPS, Best, Matrix, best, fields, in_every_form, made, product, rows

import nc10d as dist
from nc10d.api import functional
from nc10d.group.process_group import ProcessGroup
from nc10d.testing import Ranks, reference, run_local, run_ranks


@pytest.fixture(scope="module", params=[1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
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


def test_rows_of_numbers_stand_for_records(ranks: Ranks) -> None:
    ranks.run(rows)


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
    best_k = torch.topk(torch.tensor([5.0, 1.0, 3.0]) - group.rank, 2)  # a named tuple
    out = torch.zeros(2), torch.zeros(2, dtype=torch.int64)
    dist.all_reduce(best_k, dist.topk(2), out=out)
    assert out[0].tolist() == [5.0, 4.0 if group.size > 1 else 3.0]
    assert best_k[0].tolist() == [5.0 - group.rank, 3.0 - group.rank]
    with pytest.raises(ValueError, match="all_reduce: tensor and out must not share memory"):
        dist.all_reduce(best_k, dist.topk(2), out=(out[0], best_k[1]))
    with pytest.raises(TypeError, match="out must be a tuple where tensor is"):
        dist.all_reduce(best_k, dist.topk(2), out=out[0])


def test_torch_tensors_hold_fields_and_rows(ranks: Ranks) -> None:
    ranks.run(tensors)


def results(group: ProcessGroup) -> None:
    size, rank = group.size, group.rank
    given = np.arange(2.0 * size) * (rank + 1), np.full(2 * size, rank)
    value, index = functional.all_reduce(given, dist.ARGMAX)
    assert np.array_equal(value, np.arange(2.0 * size) * size)
    assert index.wait().tolist() == [0] + [size - 1] * (2 * size - 1)
    assert given[1].tolist() == [rank] * 2 * size
    value, index = functional.reduce_scatter_tensor(given, dist.ARGMAX, 0)
    assert value.wait().tolist() == [2 * rank * size, (2 * rank + 1) * size]
    with pytest.raises(ValueError, match="cut along dimension 0, not 1"):
        functional.reduce_scatter_tensor(given, dist.ARGMAX, 1)
    padded = np.dtype([("value", "u1"), ("token", "f8")], align=True)
    narrow = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e5m2)
    for dtype in (Best, padded, Best[["token", "value"]], *narrow):
        found = functional.broadcast(np.zeros(3, dtype), 0)
        assert np.asarray(found).dtype == dtype


def test_functional_calls_take_fields_and_records(ranks: Ranks) -> None:
    ranks.run(results)


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


def finished(group: ProcessGroup) -> None:
    op = dist.reduction("f8", finish=lambda a: a + 10, identity=0)(lambda a, b: a + b)
    x = np.ones(2)
    dist.exscan(x, op, identity=True)
    assert x.tolist() == [0 if group.rank == 0 else 10 + group.rank] * 2


def test_an_identity_is_given_as_it_is() -> None:
    run_ranks(finished, 2)


MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "dtype": (lambda: dist.all_reduce(np.zeros(3), best), "best reduces {value: float32"),
    "sum": (lambda: dist.all_reduce(np.zeros(3, Best)), "nc10d.reduction"),
    "no field": (lambda: dist.all_reduce((), best), "not 0 arrays with a field each"),
    "a field of a number": (
        lambda: dist.all_reduce((np.zeros(3),), dist.LOGSUMEXP),
        "not 1 arrays with a field each",
    ),
    "one field": (lambda: dist.all_reduce((np.zeros(3, "f4"),), best), "best reduces"),
    "other order": (
        lambda: dist.all_reduce((np.zeros(3, "i4"), np.zeros(3, "f4")), best),
        "best reduces",
    ),
    "a large row": (
        lambda: dist.all_reduce(np.zeros((2, 129)), dist.softmax_merge(128)),
        "d at most 64 for float64; not arrays of float64 .last dimension 129",
    ),
    "not called": (lambda: dist.all_reduce(np.zeros(3), dist.topk), r"nc10d.topk\(...\)$"),
    "tuple for SUM": (lambda: dist.all_reduce((np.zeros(3), np.zeros(3))), "got a tuple"),
    "no identity": (lambda: dist.exscan(made(Best, 1, 0), best, identity=True), "no identity"),
    "nested": (lambda: dist.broadcast(np.zeros(3, [("p", Best)]), 0), "'p' is structured"),
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
        with pytest.raises(ValueError, match="the arrays hold 3 and 2 records"):
            dist.all_reduce((np.zeros(3, "f4"), np.zeros(2, "i4")), best)
        x = np.zeros(3, "f4")
        with pytest.raises(ValueError, match="must not share memory"):
            dist.all_reduce((x, x.view("i4")), best)

    run_local(job, 1)


def reshaped(group: ProcessGroup) -> None:
    for _ in range(2):
        dist.all_reduce(np.ones((4, 3)), dist.WELFORD)
    for shape in ((6, 2), (12,)):
        with pytest.raises(TypeError, match="WELFORD reduces"):
            dist.all_reduce(np.ones(shape), dist.WELFORD)


def test_rows_of_another_length_are_refused_after_right_ones() -> None:
    run_ranks(reshaped, 1)


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
        with pytest.raises(dist.CollectiveMismatch, match="value: float32"):
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


@pytest.fixture
def detail() -> Any:
    level = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    yield
    dist.set_debug_level(level)


def test_fields_are_checked_for_races_like_other_arrays(detail: None) -> None:
    run_ranks(fields, 2)
