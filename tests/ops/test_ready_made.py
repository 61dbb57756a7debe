"""Ready-made reductions against plain NumPy, and whether the order of ranks changes a bit."""

import itertools
import pickle
import subprocess
import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import nc10d
from nc10d.group.process_group import ProcessGroup
from nc10d.ops import ReduceOp
from nc10d.testing import reference, run_ranks

Pair = np.dtype([("value", "f8"), ("index", "i8")])
Moments = np.dtype([("n", "f8"), ("mean", "f8"), ("m2", "f8")])
SPECIAL = [0.0, -0.0, 1.0, 1.0, 2.0, -3.0, np.inf, -np.inf, np.nan]


def pairs(values: Any, first: int) -> Any:
    found = np.zeros(len(values), Pair)
    found["value"], found["index"] = values, first + np.arange(len(values))
    return found


@given(st.lists(st.sampled_from(SPECIAL), min_size=1, max_size=6))
def test_argmax_and_argmin_are_numpys(values: list[float]) -> None:
    ranks = [pairs([value], rank) for rank, value in enumerate(values)]
    for op, find in ((nc10d.ARGMAX, np.argmax), (nc10d.ARGMIN, np.argmin)):
        (found,) = reference.all_reduce(ranks, op)[0]
        assert found["index"] == find(values)


@given(st.lists(st.sampled_from(SPECIAL), min_size=2, max_size=4), st.integers(1, 3))
def test_no_order_of_ranks_changes_an_exact_result(values: list[float], k: int) -> None:
    ranks = [pairs([value], rank) for rank, value in enumerate(values)]
    lists = [best(x, k) for x in ranks]
    for op, arrays in ((nc10d.ARGMAX, ranks), (nc10d.topk(k), lists)):
        assert op.pairwise.exact
        orders = itertools.permutations(arrays)
        results = {reference.all_reduce(order, op)[0].tobytes() for order in orders}
        assert len(results) == 1


def best(x: Any, k: int) -> Any:
    """The k first of x by value, NaN before all, then by index; padded by -inf."""
    rows = sorted(x.tolist(), key=lambda row: (row[0] == row[0], -row[0], row[1]))
    rows += [(-np.inf, 10**9 + i) for i in range(k)]
    found = np.zeros(1, [("value", "f8", (k,)), ("index", "i8", (k,))])
    found["value"], found["index"] = zip(*rows[:k], strict=True)
    return found


@given(st.integers(1, 4), st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=1, max_size=4))
def test_topk_merges_sorted_lists(k: int, ranks: list[list[float]]) -> None:
    arrays = [pairs(values, 100 * rank) for rank, values in enumerate(ranks)]
    whole = best(np.concatenate(arrays), k)
    merged = reference.all_reduce([best(x, k) for x in arrays], nc10d.topk(k))[0]
    known = whole["value"] > -np.inf
    assert np.array_equal(merged["value"], whole["value"])
    assert np.array_equal(merged["index"][known], whole["index"][known])


LOGICAL = {"LAND": np.logical_and, "LOR": np.logical_or, "LXOR": np.logical_xor}


@pytest.mark.parametrize("name", LOGICAL)
@pytest.mark.parametrize("dtype", ["?", "i4", "f8", "c8"])
def test_logical_operations_see_zero_as_false(name: str, dtype: str) -> None:
    ranks = [np.array(row, dtype) for row in itertools.product([0, 2], repeat=3)]
    op = getattr(nc10d, name)
    found = reference.all_reduce(ranks[:3], op)[0]
    assert np.array_equal(found, LOGICAL[name].reduce(ranks[:3]).astype(dtype))
    assert np.array_equal(reference.all_reduce(ranks[3:4], op)[0], (ranks[3] != 0).astype(dtype))


@given(st.lists(st.lists(st.integers(-9, 9), max_size=5), min_size=1, max_size=4))
def test_welford_gives_the_moments_of_all_samples(samples: list[list[int]]) -> None:
    ranks = [np.zeros(1, Moments) for _ in samples]
    for x, values in zip(ranks, samples, strict=True):
        if values:
            x[0] = len(values), np.mean(values), np.var(values) * len(values)
    (found,) = reference.all_reduce(ranks, nc10d.WELFORD)[0]
    whole = [value for values in samples for value in values]
    assert found["n"] == len(whole)
    if whole:
        assert np.isclose(found["mean"], np.mean(whole), atol=1e-13)
        assert np.isclose(found["m2"], np.var(whole) * len(whole), atol=1e-12)


def ulps(x: Any, exact: Any) -> Any:
    return np.abs(x - exact) / np.spacing(np.abs(exact).astype("f8"))


def test_logsumexp_is_within_two_ulps() -> None:
    chance = np.random.default_rng(5)
    a = chance.standard_normal(3000) * 10.0 ** chance.integers(-3, 3, 3000)
    b = a + chance.standard_normal(3000) * 10.0 ** chance.integers(-3, 2, 3000)
    exact = np.logaddexp(a.astype("longdouble"), b.astype("longdouble"))
    far = np.abs(exact) > 1  # next to 0 the result is a small difference of large numbers
    found = reference.all_reduce([a, b], nc10d.LOGSUMEXP)[0]
    assert ulps(found, exact)[far].max() < 2


def test_logsumexp_of_infinities_and_nan() -> None:
    a = np.array([np.inf, -np.inf, -np.inf, np.nan, 0.0, 1.0, np.inf, -1e308])
    b = np.array([1.0, -np.inf, 2.0, 1.0, np.nan, np.inf, -np.inf, 1e308])
    found = reference.all_reduce([a, b], nc10d.LOGSUMEXP)[0]
    with np.errstate(all="ignore"):
        expected = np.logaddexp(a, b)
    assert np.array_equal(found, expected, equal_nan=True)


@given(st.integers(1, 5), st.integers(2, 4), st.integers(0, 99))
def test_softmax_parts_merge_to_the_whole(d: int, size: int, seed: int) -> None:
    chance = np.random.default_rng(seed)
    scores, values = chance.standard_normal((size, 3)) * 4, chance.standard_normal((size, 3, d))
    scores[seed % size] = -np.inf  # a part that has no weight
    parts = np.zeros((size, 1 + d))
    for part, score, value in zip(parts, scores, values, strict=True):
        part[0] = np.logaddexp.reduce(score)
        if part[0] > -np.inf:
            part[1:] = np.exp(score - part[0]) @ value
    found = reference.all_reduce([*parts], nc10d.softmax_merge(d))[0]
    total = np.logaddexp.reduce(scores.ravel())
    assert np.isclose(found[0], total)
    assert np.allclose(found[1:], np.exp(scores.ravel() - total) @ values.reshape(-1, d))


READY: list[tuple[ReduceOp, np.dtype[Any]]] = [
    (nc10d.ARGMAX, Pair),
    (nc10d.ARGMIN, np.dtype([("a", "u1"), ("b", "i4")])),
    (nc10d.LOGSUMEXP, np.dtype("f8")),
    (nc10d.LOGSUMEXP, np.dtype("f4")),
    (nc10d.LOGSUMEXP, np.dtype("f2")),
    (nc10d.softmax_merge(3), np.dtype([("logsumexp", "f4"), ("value", "f4", (3,))])),
    (nc10d.WELFORD, Moments),
    (nc10d.WELFORD, np.dtype([("n", "f4"), ("mean", "f4"), ("m2", "f4")])),
    (nc10d.topk(2), np.dtype([("value", "f4", (2,)), ("index", "i8", (2,))])),
    (nc10d.topk(2), np.dtype([("value", ml_dtypes.bfloat16, (2,)), ("index", "i4", (2,))])),
    (nc10d.softmax_merge(3), np.dtype([("logsumexp", "f2"), ("value", "f2", (3,))])),
    (nc10d.LXOR, np.dtype("u2")),
]


def drawn(dtype: np.dtype[Any], seed: int) -> Any:
    chance, found = np.random.default_rng(seed), np.zeros(65, dtype)
    for part in [found[name] for name in dtype.names] if dtype.names else [found]:
        part[...] = np.sort(chance.integers(0, 9, part.shape))[..., ::-1]
    return found


def compiled(group: ProcessGroup) -> None:
    for op, dtype in READY:
        ranks = [drawn(dtype, rank) for rank in range(group.size)]
        x = ranks[group.rank].copy()
        group.all_reduce(x, op)
        assert reference.same_bits(x, reference.all_reduce(ranks, op)[0]), (op, dtype)


def test_compiled_code_gives_the_bits_of_the_reference() -> None:
    run_ranks(compiled, 3)


def test_the_same_parameter_gives_the_same_reduction() -> None:
    assert nc10d.topk(3) is nc10d.topk(3)
    assert nc10d.MAXLOC is nc10d.ARGMAX
    with pytest.raises(ValueError, match="topk: expected an int from 1 to 32, got 0"):
        nc10d.topk(0)


@pytest.mark.parametrize("wrong", [0, 33, 2.0, "2", -1])
def test_a_parameter_of_another_kind_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="expected an int from 1 to 32"):
        nc10d.topk(wrong)


PICKLED = "import pickle, sys; print(pickle.loads(bytes.fromhex(sys.argv[1])).name)"


@pytest.mark.parametrize("op", [nc10d.ARGMAX, nc10d.topk(3), nc10d.SUM.ordered], ids=str)
def test_another_process_gets_a_ready_made_reduction_by_its_name(op: ReduceOp) -> None:
    command = [sys.executable, "-c", PICKLED, pickle.dumps(op).hex()]
    assert subprocess.run(command, capture_output=True, text=True).stdout.strip() == op.name


def test_fields_keep_the_order_of_their_names() -> None:
    layout: Any = {"names": ["value", "index"], "formats": ["f4", "i4"], "offsets": [4, 0]}
    ranks = [np.zeros(1, np.dtype(layout)) for _ in range(2)]
    ranks[0]["value"], ranks[0]["index"], ranks[1]["index"] = 2, 4, 5
    assert reference.all_reduce(ranks, nc10d.ARGMAX)[0].tolist() == [(2.0, 4)]


@pytest.mark.parametrize(
    ("op", "dtype", "text"),
    [
        (nc10d.ARGMAX, "f4", "reduces .value, index."),
        (nc10d.ARGMAX, ("f4", (2,)), "reduces .value, index."),
        (nc10d.LOGSUMEXP, "i4", "LOGSUMEXP reduces floats"),
        (nc10d.WELFORD, [("n", "i8"), ("mean", "f8"), ("m2", "f8")], "WELFORD reduces"),
        (nc10d.topk(3), "f4", "two arrays whose last dimension is 3"),
        (nc10d.softmax_merge(4), "f4", "a last dimension of 5,"),
        (nc10d.softmax_merge(65), ("f8", (66,)), "d at most 64 for float64"),
    ],
)
def test_other_arrays_are_refused(op: ReduceOp, dtype: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        reference.all_reduce([np.zeros(7, dtype)], op)
