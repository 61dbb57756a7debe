"""NCCL beyond collectives, over the emulators: windows, estimates, suspension."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import lone_ranks as lone
import nccl_features as features
import pytest
from captured_training import a_captured_training_step_reads_nothing
from device_ranks import afresh
from emulated import emulated_ranks, emulators, needs_emulators

from nc10d.testing.ranks import Ranks

pytestmark = needs_emulators


@pytest.fixture(scope="module", params=["0", "1"], ids=["blocking", "nonblocking"])
def nonblocking(request: pytest.FixtureRequest) -> Iterator[str]:
    with emulators(NC10D_NCCL_NONBLOCKING=request.param):
        yield request.param


@pytest.fixture(scope="module", params=[1, 2])
def ranks(nonblocking: str, request: pytest.FixtureRequest) -> Iterator[tuple[Ranks, int]]:
    with Ranks(request.param, "processes", "cpu:cpu,cuda:nccl", timeout=20.0) as found:
        yield found, request.param


@pytest.mark.parametrize("law", features.FEATURES, ids=lambda law: law.__name__)
def test_laws_of_features_hold(
    ranks: tuple[Ranks, int], nonblocking: str, law: Callable[..., None]
) -> None:
    if nonblocking == "1" and law is features.an_estimate_launches_nothing:
        law = features.nonblocking_groups_have_no_estimate
    them, size = ranks
    them.run(afresh, [law] * size)


OF_TWO = [
    features.a_rank_that_does_not_suspend_is_named,
    features.a_group_that_not_all_ranks_grow_is_refused_on_all,
]


@pytest.mark.parametrize("law", OF_TWO, ids=lambda law: law.__name__)
def test_laws_of_two_ranks_hold(law: Callable[..., None]) -> None:
    with emulated_ranks() as two:
        two.run(law)


@pytest.mark.parametrize("release", features.RELEASES)
def test_a_release_before_a_function_is_refused_by_name(release: str) -> None:
    with emulated_ranks(1, "nccl", NC10D_EMULATED_NCCL_VERSION=release) as one:
        one.run(features.functions_of_later_releases_are_refused)


def test_a_machine_without_symmetric_memory_is_a_refusal_on_all_ranks() -> None:
    with emulated_ranks(2, "nccl", NC10D_EMULATED_NO_WINDOWS="1") as two:
        two.run(afresh, [features.a_machine_has_no_windows] * 2)


def test_a_captured_training_step_reads_nothing(ranks: tuple[Ranks, int]) -> None:
    them, size = ranks
    them.run(afresh, [a_captured_training_step_reads_nothing] * size)


@pytest.mark.parametrize("law", [lone.pool_of_numba, lone.torchs_allocator_is_nccls])
@pytest.mark.parametrize("blocking", ["0", "1"], ids=["blocking", "nonblocking"])
def test_other_libraries_allocate_through_nccl(law: Callable[..., None], blocking: str) -> None:
    given = {"NC10D_NCCL_NONBLOCKING": blocking, "NC10D_EMULATED_GPUS": "1"}
    with emulated_ranks(1, "nccl", **given) as one:
        one.run(law)


def test_a_group_grows(nonblocking: str) -> None:
    with Ranks(3, "processes", "cpu:cpu,cuda:nccl", timeout=20.0) as three:
        three.run(features.a_group_grows)
