"""Medians with intervals, and the rules by which a cell is compared."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.estimates import Estimate, compare, coverage, estimate, slower, too_near

TIMES = st.lists(st.floats(1e-7, 10.0), min_size=1, max_size=40)


@given(TIMES)
def test_a_median_lies_in_its_interval_which_lies_in_the_range(times: list[float]) -> None:
    found = estimate(times)
    assert min(times) <= found.low <= found.median <= found.high <= max(times)


@given(TIMES, st.randoms(use_true_random=False))
def test_the_order_of_rounds_is_no_matter(times: list[float], chance: random.Random) -> None:
    assert estimate(chance.sample(times, len(times))) == estimate(times)


@pytest.mark.parametrize(
    ("count", "trimmed", "surely"), [(5, 0, 0.9375), (1, 0, 0.0), (8, 1, 0.9297), (9, 1, 0.9609)]
)
def test_how_surely_order_statistics_hold_the_median(
    count: int, trimmed: int, surely: float
) -> None:
    assert coverage(count, trimmed) == pytest.approx(surely, abs=1e-4)


@pytest.mark.parametrize(("count", "low"), [(1, 0), (4, 0), (5, 0), (8, 0), (9, 1), (20, 5)])
def test_an_interval_is_as_narrow_as_its_confidence_allows(count: int, low: int) -> None:
    found = estimate([float(i) for i in range(count)])
    assert (found.low, found.high) == (low, count - 1 - low)


def test_an_interval_covers_the_median_with_its_confidence() -> None:
    chance = random.Random(1)
    samples = [[chance.expovariate(1.0) for _ in range(9)] for _ in range(2000)]
    hits = sum(found.low <= 0.6931 <= found.high for found in map(estimate, samples))
    assert 0.94 < hits / 2000 < 0.98


def sharp(us: float) -> Estimate:
    """A median that is known exactly."""
    return Estimate(us * 1e-6, us * 1e-6, us * 1e-6)


@pytest.mark.parametrize(
    ("nbytes", "ours", "peer", "word"),
    [
        (1024, 9.0, 10.0, "ahead"),
        (1024, 10.4, 10.0, "tied"),
        (1024, 10.6, 10.0, "behind"),
        (8, 2.9, 2.0, "tied"),
        (8, 3.1, 2.0, "behind"),
        (8, 12.4, 10.0, "tied"),
        (0, 12.6, 10.0, "behind"),
    ],
)
def test_the_rule_for_a_cell_depends_on_its_size(
    nbytes: int, ours: float, peer: float, word: str
) -> None:
    assert compare(nbytes, sharp(ours), {"mpich": sharp(peer)}).word == word


def test_intervals_that_overlap_are_a_tie() -> None:
    wide = Estimate(2e-6, 1e-6, 3e-6)
    assert compare(1024, wide, {"gloo": sharp(1)}).word == "tied"
    assert compare(1024, wide, {"gloo": sharp(3)}).word == "tied"
    assert compare(1024, wide, {"gloo": sharp(0.9)}).word == "behind"
    assert compare(1024, wide, {"gloo": sharp(3.1)}).word == "ahead"


@given(TIMES, TIMES)
def test_to_overlap_is_mutual_and_to_share_a_time(some: list[float], others: list[float]) -> None:
    found, other = estimate(some), estimate(others)
    shared = max(found.low, other.low) <= min(found.high, other.high)
    assert found.overlaps(other) == other.overlaps(found) == shared


def test_the_best_peer_counts() -> None:
    found = compare(1024, sharp(4), {"gloo": sharp(9), "mpich": sharp(2), "openmpi": sharp(3)})
    assert (found.best, found.ratio, found.word) == ("mpich", 0.5, "behind")


def test_large_reductions_must_be_well_ahead() -> None:
    assert too_near("all_reduce", 1 << 20, 1.49)
    assert not too_near("all_reduce", 1 << 20, 1.5)
    assert not too_near("all_reduce", 64 << 10, 1.0)
    assert not too_near("broadcast", 1 << 20, 1.0)


def test_a_round_takes_as_long_as_its_slowest_rank() -> None:
    assert slower([{"a": [1.0, 4.0]}, {"a": [2.0, 3.0]}]) == {"a": [2.0, 4.0]}


@pytest.mark.parametrize(("us", "text"), [(1.234, "1.23"), (12.34, "12.3"), (1234.5, "1234")])
def test_figures_have_the_places_that_mean_something(us: float, text: str) -> None:
    assert str(sharp(us)).startswith(f"{text} (")
