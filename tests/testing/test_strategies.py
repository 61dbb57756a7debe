"""The strategies keep their contract: valid calls, on new memory, with known results."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nc10d import ops as O
from nc10d.arrays.dtypes import check_reduce, dtype_of
from nc10d.testing import reference, strategies
from nc10d.testing.local_backend import run_local
from nc10d.testing.reference import compute

sized_calls = strategies.worlds().flatmap(
    lambda size: st.tuples(st.just(size), strategies.calls(size))
)
sized_programs = strategies.worlds(3).flatmap(
    lambda size: st.tuples(st.just(size), strategies.programs(size))
)


@given(strategies.dtypes().flatmap(lambda d: st.tuples(st.just(d), strategies.reduce_ops(d))))
def test_reductions_are_allowed_for_their_dtype(drawn):
    check_reduce(*drawn)


@given(st.data(), strategies.worlds())
def test_arrays_per_rank_agree_where_they_must(data, size):
    same = data.draw(strategies.same_shape_per_rank(size))
    assert len({(x.shape, dtype_of(x.dtype)) for x in same}) == 1
    ragged = data.draw(strategies.ragged_per_rank(size))
    assert len({x.dtype for x in ragged}) == 1
    assert len(same) == len(ragged) == size


@given(sized_calls)
def test_a_call_makes_fresh_memory_each_time(drawn):
    size, call = drawn
    first, second = call.make(size - 1), call.make(size - 1)
    for x, y in zip(strategies.outputs(first), strategies.outputs(second), strict=True):
        assert reference.same_bits(x, y)
        assert not np.shares_memory(x, y)


@given(sized_calls)
def test_expected_results_do_not_depend_on_layout(drawn):
    _, call = drawn
    plain = strategies.CollectiveCall(call.kind, call.inputs, call.op, call.root, call.flat)
    for mine, theirs in zip(call.expected(), plain.expected(), strict=True):
        for x, y in zip(mine, theirs, strict=True):
            assert reference.same_bits(x, y)


@given(sized_calls)
def test_flat_and_listed_forms_hold_the_same_elements(drawn):
    size, call = drawn
    if call.flat:
        listed = strategies.CollectiveCall(call.kind, call.inputs, call.op, call.root)
        for mine, theirs in zip(call.expected(), listed.expected(), strict=True):
            flat = [np.ravel(x) for x in (mine or theirs)]
            assert sum(map(len, flat)) == sum(x.size for x in theirs)
    assert len(call.expected()) == size


@settings(deadline=None, max_examples=30)
@given(sized_programs)
def test_a_program_can_be_issued_to_a_group(drawn):
    size, program = drawn

    def rank_main(group):
        ops = [call.make(group.rank) for call in program]
        for op in ops:
            strategies.issue(group, op)
        return [strategies.outputs(op) for op in ops]

    found = run_local(rank_main, size)
    for number, call in enumerate(program):
        for rank, expected in enumerate(call.expected()):
            for x, y in zip(found[rank][number], expected, strict=True):
                assert reference.same_bits(x, y)


def test_expected_results_are_the_oracles_results():
    call = strategies.CollectiveCall(O.AllReduce, [np.array([1.0]), np.array([2.0])])
    assert [out[0].tolist() for out in call.expected()] == [[3.0], [3.0]]
    ops = [call.make(0), call.make(1)]
    compute(ops)
    assert ops[0].x.tolist() == [3.0]
