"""Every rank launches each bucket once and in plan order, in any order of arrival."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nc10d.reducer.schedule import Schedule


@st.composite
def buckets(draw):
    """Some parameters, cut into buckets, in any order."""
    params = draw(st.permutations(range(draw(st.integers(1, 12)))))
    cuts = sorted(draw(st.sets(st.integers(1, len(params) - 1)))) if len(params) > 1 else []
    return [list(params[a:b]) for a, b in zip([0, *cuts], [*cuts, len(params)], strict=True)]


def arrivals(buckets):
    count = sum(map(len, buckets))
    marks = st.lists(st.integers(0, 3), min_size=count, max_size=count)
    return marks.flatmap(
        lambda marks: st.tuples(
            st.just(marks), st.permutations([p for p, n in enumerate(marks) for _ in range(n)])
        )
    )


def model(buckets, seen, marks):
    """The number of launched buckets: the leading buckets with all expected marks."""
    full = [all(seen.count(p) == marks[p] for p in bucket) for bucket in buckets]
    return full.index(False) if False in full else len(full)


@given(data=st.data(), buckets=buckets())
def test_at_any_time_the_leading_full_buckets_are_launched(data, buckets):
    marks, order = data.draw(arrivals(buckets))
    schedule = Schedule(buckets)
    left = [*schedule.begin(marks)]
    assert left == [*range(model(buckets, [], marks))]
    for at, param in enumerate(order, 1):
        with pytest.raises(RuntimeError, match="ended without"):
            schedule.require_complete()
        left.extend(schedule.mark(param))
        assert left == [*range(model(buckets, order[:at], marks))]
    assert left == [*range(len(buckets))]
    schedule.require_complete()


@given(data=st.data(), buckets=buckets(), size=st.integers(1, 4))
def test_ranks_that_synchronize_at_every_bucket_never_wait_in_a_cycle(data, buckets, size):
    """A bucket ends when all ranks have launched it; collectives are matched by their order."""
    orders = [data.draw(arrivals(buckets)) for _ in range(size)]
    schedules = [Schedule(buckets) for _ in range(size)]
    sent = [[*s.begin(marks)] for s, (marks, _) in zip(schedules, orders, strict=True)]
    todo = [list(order) for _, order in orders]
    while any(todo):
        rank = data.draw(st.sampled_from([r for r in range(size) if todo[r]]))
        sent[rank].extend(schedules[rank].mark(todo[rank].pop(0)))
        assert all(len(set(met)) == 1 for met in zip(*sent, strict=False))
    assert sent == [[*range(len(buckets))]] * size


@given(data=st.data(), buckets=buckets(), passes=st.integers(2, 3))
def test_a_pass_does_not_depend_on_the_previous_pass(data, buckets, passes):
    schedule = Schedule(buckets)
    for _ in range(passes):
        marks, order = data.draw(arrivals(buckets))
        cut = data.draw(st.integers(0, len(order)))
        left = [*schedule.begin(marks)]
        for param in order[:cut]:
            left.extend(schedule.mark(param))
        assert left == [*range(model(buckets, order[:cut], marks))]
        expected = [p for p, n in enumerate(marks) if order[:cut].count(p) < n]
        assert schedule.missing() == expected


NAMES = ["layer.weight", "layer.bias", "head.weight"]


def test_a_gradient_that_comes_more_often_than_learnt_is_named():
    schedule = Schedule([[0]])
    schedule.begin([2])
    assert not schedule.mark(0)
    assert schedule.mark(0)
    with pytest.raises(RuntimeError, match="parameter 0 was marked ready more than 2 times"):
        schedule.mark(0)


def test_a_long_list_of_names_is_cut():
    schedule = Schedule([range(12)])
    schedule.begin()
    with pytest.raises(RuntimeError, match=r"parameter 9 and 2 more\."):
        schedule.require_complete()


def test_a_gradient_that_was_declared_unused_may_not_come():
    schedule = Schedule([[0, 1]], NAMES)
    schedule.begin([1, 0])
    with pytest.raises(RuntimeError, match=r"layer\.bias is ready, but it was declared unused"):
        schedule.mark(1)


def test_nothing_may_come_before_a_pass_has_begun():
    with pytest.raises(RuntimeError, match="no pass has begun"):
        Schedule([[0]]).mark(0)


@pytest.mark.parametrize("marks", [[1], [1, 1, 1], [1, -1]])
def test_marks_are_a_count_for_each_parameter(marks):
    with pytest.raises(ValueError, match="marks must be 2 counts"):
        Schedule([[0, 1]]).begin(marks)
