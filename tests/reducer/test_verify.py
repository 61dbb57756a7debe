"""Ranks with different parameters all raise an error with the same text."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nc10d.reducer.plan import spec_of
from nc10d.reducer.verify import agree_on_order, memory_order, verify_parameters
from nc10d.testing import run_local

DTYPES = ["float32", "int64", "bfloat16"]
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)


def spec(shape, dtype):
    import ml_dtypes

    return spec_of((shape, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype))


def complaint(group, specs):
    names = [f"layer{i}" for i in range(len(specs))]
    try:
        verify_parameters(group, specs, names)
    except ValueError as error:
        return str(error)
    return None


SPECS = st.lists(st.builds(spec, SHAPES, st.sampled_from(DTYPES)), min_size=1, max_size=4)


@settings(deadline=None, max_examples=40)
@given(data=st.data(), first=SPECS, size=st.integers(1, 4))
def test_the_first_difference_is_named_on_every_rank(data, first, size):
    ranks = [list(first) for _ in range(size)]
    for specs in ranks[1:]:
        for param in data.draw(st.sets(st.integers(0, len(first) - 1), max_size=2)):
            specs[param] = data.draw(st.builds(spec, SHAPES, st.sampled_from(DTYPES)))
    where = [(p, r) for p in range(len(first)) for r in range(size) if ranks[r][p] != first[p]]
    errors = run_local(complaint, size, ranks)
    if not where:
        assert errors == [None] * size
        return
    param, rank = min(where)
    sides = [
        f"'layer{param}', {s.dtype.label} of shape {s.shape}"
        for s in (first[param], ranks[rank][param])
    ]
    words = (
        f"parameter {param} is not the same on all ranks: "
        f"rank 0 has {sides[0]}, rank {rank} has {sides[1]}"
    )
    assert errors == [words] * size


def swapped(group):
    names = ["body", "head", "größe"]
    if group.rank == 1:
        names[1:] = names[:0:-1]
    try:
        verify_parameters(group, [spec((2,), "float32")] * 3, names)
    except ValueError as error:
        return str(error)


def test_parameters_in_another_order_differ_by_their_names_alone():
    words = (
        "parameter 1 is not the same on all ranks: rank 0 has 'head', float32 of shape (2,), "
        "rank 1 has 'größe', float32 of shape (2,)"
    )
    assert run_local(swapped, 3) == [words] * 3


def test_different_numbers_of_parameters_are_named():
    ranks = [[spec((2,), "float32")] * n for n in (2, 2, 3)]
    errors = run_local(complaint, 3, ranks)
    words = "ranks have different numbers of parameters: rank 0 has 2, rank 2 has 3"
    assert errors == [words] * 3


def test_more_dimensions_than_any_parameter_has_are_refused():
    with pytest.raises(ValueError, match="at most 16 dimensions"):
        run_local(lambda g: verify_parameters(g, [spec((1,) * 17, "int64")], ["x"]), 1)


def test_the_order_is_rank_0s():
    found = run_local(agree_on_order, 3, [[2, 0, 1], [0, 1, 2], [1, 2, 0]])
    assert found == [[2, 0, 1]] * 3


def laid_out(group, transposed):
    x = np.zeros((3, 2, 4), np.float32)
    x = x.transpose(2, 0, 1) if transposed[group.rank] else np.zeros((4, 3, 2), np.float32)
    try:
        verify_parameters(group, [spec_of(x)], ["w"], [memory_order(x)])
    except ValueError as error:
        return str(error)


def test_parameters_with_another_memory_order_differ():
    """With another memory order, a gradient would be added to other elements."""
    words = (
        "parameter 0 is not the same on all ranks: rank 0 has 'w', float32 of shape (4, 3, 2), "
        "rank 1 has 'w', float32 of shape (4, 3, 2) with dimensions in the order (1, 2, 0)"
    )
    assert run_local(laid_out, 2, [[False, True]] * 2) == [words] * 2
    assert run_local(laid_out, 2, [[True, True]] * 2) == [None] * 2


@pytest.mark.parametrize(
    ("x", "order"),
    [
        (np.zeros((2, 3)), (0, 1)),
        (np.zeros((2, 3), order="F"), (1, 0)),
        (np.zeros((1, 3, 1, 2)), (1, 3)),
        (np.zeros((2, 3))[::-1], (0, 1)),
        (np.zeros(()), ()),
        (((2, 3), "float32"), ()),
    ],
)
def test_the_order_of_dimensions_is_that_of_strides(x, order):
    assert memory_order(x) == order
