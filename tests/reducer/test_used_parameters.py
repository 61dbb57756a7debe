"""A parameter counts as used if any rank used it since the last agreement."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nc10d.reducer.stats import UsedParameters
from nc10d.testing import run_local

COUNT = 6
PASSES = st.lists(st.sets(st.integers(0, COUNT - 1)), min_size=1, max_size=3)


def agree(group, sessions):
    parameters = UsedParameters(COUNT)
    found = []
    for passes in sessions:
        for param in itertools.chain.from_iterable(passes):
            parameters.local[param] = 1
        parameters.agree(group)
        found.append(parameters.wait())
    return found


@settings(deadline=None, max_examples=30)
@given(data=st.data(), size=st.integers(1, 3), sessions=st.integers(1, 2))
def test_ranks_agree_on_the_union_of_their_used_parameters(data, size, sessions):
    drawn = [[data.draw(PASSES) for _ in range(sessions)] for _ in range(size)]
    used = [set().union(*(p for rank in drawn for p in rank[s])) for s in range(sessions)]
    expected = [[param in session for param in range(COUNT)] for session in used]
    assert run_local(agree, size, drawn) == [expected] * size


@pytest.mark.ranks(2)
def test_a_mark_while_ranks_agree_belongs_to_the_next_pass(world):
    parameters = UsedParameters(2)
    parameters.local[world.rank] = 1
    parameters.agree(world)
    parameters.local[0] = 1
    first = parameters.wait()
    parameters.agree(world)
    assert (first, parameters.wait()) == ([True, True], [True, False])


def test_a_wait_without_agree_is_refused():
    with pytest.raises(RuntimeError, match="call agree"):
        UsedParameters(1).wait()
