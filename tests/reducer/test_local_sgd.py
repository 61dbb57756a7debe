"""Post-local SGD averages over all ranks, then over a subgroup or not at all."""

import numpy as np
import pytest

from nc10d.reducer.hooks.local_sgd import PostLocalSGDState, average_parameters, post_localSGD_hook
from nc10d.reducer.reducer import Reducer
from nc10d.testing import run_local


def trained(group, local):
    subgroup = group.split_group([[0, 1], [2, 3]])
    state = PostLocalSGDState(group, subgroup, 2, post_local_gradient_allreduce=local)
    params = [np.zeros(2), np.zeros(3)]
    reducer = Reducer(params, group, cap_bytes=8, first_bytes=8)
    reducer.register_comm_hook(state, post_localSGD_hook)
    found = []
    for _ in range(4):
        reducer.begin()
        for param in (1, 0):
            reducer.grad_ready(param, np.full(2 + param, float(group.rank)))
        reducer.finish()
        assert len({float(g[0]) for g in reducer.gradients}) == 1
        found.append(float(reducer.gradients[0][0]))
    average_parameters(reducer.gradients, group)
    found.append(float(reducer.gradients[1][2]))
    return found


@pytest.mark.parametrize("local", [True, False])
def test_gradients_are_averaged_among_fewer_ranks_after_the_start(local):
    later = [0.5, 0.5, 2.5, 2.5] if local else [0, 1, 2, 3]
    expected = [[1.5, 1.5, mine, mine, 1.5] for mine in later]
    assert run_local(trained, 4, [local] * 4) == expected


def test_a_state_needs_a_subgroup_unless_nothing_is_reduced():
    with pytest.raises(ValueError, match="needs a subgroup"):
        PostLocalSGDState(None, None, 1)
    PostLocalSGDState(None, None, 1, post_local_gradient_allreduce=False)
