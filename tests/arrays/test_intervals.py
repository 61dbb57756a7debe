"""Intervals share bytes exactly if their sets of addresses do."""

from itertools import combinations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from nc10d.arrays.intervals import columns_disjoint, conflict, disjoint, intersect

INTERVALS = st.tuples(st.integers(0, 12), st.integers(0, 4)).map(lambda s: (s[0], s[0] + s[1]))
USES = st.lists(st.tuples(INTERVALS, st.booleans()), max_size=4)


def shared(a, b):
    return bool(set(range(*a)) & set(range(*b)))


@given(a=INTERVALS, b=INTERVALS)
@example(a=(0, 4), b=(2, 2))
def test_intervals_intersect_if_they_share_an_address(a, b):
    assert intersect(a, b) == shared(a, b)


@given(intervals=st.lists(INTERVALS, max_size=6))
@example(intervals=[(0, 4), (2, 2), (3, 5)])
def test_intervals_are_disjoint_if_each_pair_is(intervals):
    expected = not any(shared(a, b) for a, b in combinations(intervals, 2))
    assert disjoint(intervals) == expected
    full = np.array([pair for pair in intervals if pair[0] < pair[1]], np.int64).reshape(-1, 2)
    assert columns_disjoint(full[:, 0], full[:, 1] - full[:, 0]) == expected


@given(some=USES, others=USES)
def test_uses_conflict_where_a_shared_byte_is_written(some, others):
    expected = any((a[1] or b[1]) and shared(a[0], b[0]) for a in some for b in others)
    assert conflict(some, others) == expected
