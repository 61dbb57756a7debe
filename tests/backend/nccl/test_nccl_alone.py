"""Laws of a single rank on NCCL, over the emulators: blocking and nonblocking."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import device_ranks as on
import lone_ranks as lone
import pytest
from emulated import emulated_ranks, needs_emulators
from folding_ranks import FOLDING
from reducing_ranks import REDUCING

from nc10d.testing.ranks import Ranks

pytestmark = needs_emulators

LONE = [
    lone.a_collective_keeps_its_place_in_a_stream,
    lone.a_graph_repeats_what_it_has_captured,
    lone.an_abort_ends_the_group,
    lone.registered_memory_is_reduced_like_other,
    on.memory_is_registered_until_it_is_closed,
    on.an_array_that_has_moved_is_looked_up_again,
    on.a_block_is_its_calls,
    on.a_plan_is_launched_again_and_again,
    on.callbacks_and_await_come_when_it_is_over,
    on.both_kinds_of_arrays_in_one_group,
    on.a_group_with_a_device_is_bound_to_it_at_once,
    *FOLDING,
    *REDUCING,
]


@pytest.fixture(scope="module", params=["0", "1"], ids=["blocking", "nonblocking"])
def one_rank(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    given = {"NC10D_NCCL_NONBLOCKING": request.param, "NC10D_EMULATED_GPUS": "1"}
    with emulated_ranks(1, **given) as ranks:
        yield ranks


@pytest.mark.parametrize("law", [*LONE, lone.arrays_of_numba], ids=lambda law: law.__name__)
def test_single_rank_laws_hold_on_a_device(one_rank: Ranks, law: Callable[..., None]) -> None:
    one_rank.run(on.afresh, [law])
