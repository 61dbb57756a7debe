"""Spans share bytes as sets of addresses do."""

from itertools import combinations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from nc10d.arrays.intervals import columns_disjoint, conflict, disjoint, intersect

SPANS = st.tuples(st.integers(0, 12), st.integers(0, 4)).map(lambda s: (s[0], s[0] + s[1]))
USES = st.lists(st.tuples(SPANS, st.booleans()), max_size=4)


def shared(one, other):
    return bool(set(range(*one)) & set(range(*other)))


@given(one=SPANS, other=SPANS)
@example(one=(0, 4), other=(2, 2))
def test_spans_meet_where_they_have_an_address_in_common(one, other):
    assert intersect(one, other) == shared(one, other)


@given(spans=st.lists(SPANS, max_size=6))
@example(spans=[(0, 4), (2, 2), (3, 5)])
def test_many_are_apart_if_any_two_are(spans):
    expected = not any(shared(one, other) for one, other in combinations(spans, 2))
    assert disjoint(spans) == expected
    full = np.array([span for span in spans if span[0] < span[1]], np.int64).reshape(-1, 2)
    assert columns_disjoint(full[:, 0], full[:, 1] - full[:, 0]) == expected


@given(some=USES, others=USES)
def test_uses_clash_where_a_shared_byte_is_written(some, others):
    expected = any((a[1] or b[1]) and shared(a[0], b[0]) for a in some for b in others)
    assert conflict(some, others) == expected
