"""Measured collectives are checked: a wrong element on any rank, at any time, is counted."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nc10d.arrays.dtypes import DType
from nc10d.bench.measure import BenchJob, Row, measure
from nc10d.bench.workloads import COLLECTIVES, FACTORS, pattern
from nc10d.testing import run_local, run_ranks

# Each collective's method of a group, and the place of the output among its arguments.
OUTPUT = {
    "all_reduce": ("all_reduce", 0),
    "reduce": ("reduce", 0),
    "broadcast": ("broadcast", 0),
    "all_gather": ("all_gather_into_tensor", 0),
    "reduce_scatter": ("reduce_scatter_tensor", 0),
    "all_to_all": ("all_to_all_single", 0),
    "gather": ("gather", 1),
    "scatter": ("scatter", 0),
    "send_recv": ("recv", 0),
    "all_gather_list": ("all_gather", 0),
    "reduce_scatter_list": ("reduce_scatter", 0),
    "all_to_all_list": ("all_to_all", 0),
}
RECEIVES = {name: [0, 1] for name in OUTPUT} | {"gather": [0]}
Spoil = Callable[[Any], None]


class Spoilt:
    """A group with a method that gives wrong results on this rank, from call `since` on."""

    def __init__(self, group: Any, method: str, place: int, since: int, spoil: Spoil) -> None:
        self._group = group
        self._method = method
        self._place = place
        self._left = since
        self._spoil = spoil

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._group, name)
        return self._call if name == self._method else real

    def _call(self, *arguments: Any) -> None:
        out = arguments[self._place]
        out = out[0] if isinstance(out, list) else out
        before = out.copy()
        getattr(self._group, self._method)(*arguments)
        self._left -= 1
        if self._left < 0:
            self._spoil((out, before))


def one_off(arrays: Any) -> None:
    """Spoil a single element."""
    arrays[0].flat[-1] += 1


def nothing_done(arrays: Any) -> None:
    """Leave the output as it was."""
    arrays[0][...] = arrays[1]


# These collectives leave the rank's array unchanged anyway.
HARMLESS = [("reduce", 1, nothing_done), ("broadcast", 0, nothing_done)]
SPOILT = [(n, r, spoil) for n in OUTPUT for r in RECEIVES[n] for spoil in (one_off, nothing_done)]


@pytest.mark.parametrize(("name", "rank", "spoil"), [s for s in SPOILT if s not in HARMLESS])
def test_wrong_elements_are_counted_on_every_rank(name: str, rank: int, spoil: Spoil) -> None:
    job = BenchJob(name, 64, DType.INT64, iterations=3, repeats=2)
    calls = 1 + job.iterations * job.repeats + 1

    def wrong(group: Any, since: int) -> int:
        spoilt = Spoilt(group, *OUTPUT[name], since, spoil) if group.rank == rank else group
        return measure(spoilt, job).wrong

    for since in (0, calls - 1):
        first, second = run_local(wrong, 2, [since] * 2)
        assert first == second > 0
        if spoil is one_off:
            assert first == (2 if since == 0 else 1)  # counted before and after the rounds
    assert run_local(wrong, 2, [calls] * 2) == [0, 0]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_every_collective_of_every_type_is_right(world: Any, name: str) -> None:
    rows = [measure(world, BenchJob(name, 96, dtype, 1, 1)) for dtype in DType]
    assert [row.job.dtype.label for row in rows if row.wrong] == []


def test_the_engines_results_are_checked_too() -> None:
    def wrong(group: Any) -> list[Row]:
        types = (DType.BFLOAT16, DType.FLOAT8_E5M2)
        return [
            measure(group, BenchJob(name, 4096, d, 2, 1)) for name in COLLECTIVES for d in types
        ]

    for rows in zip(*run_ranks(wrong, 2), strict=True):
        assert rows[0] == rows[1], "every rank returns the same row"
        assert rows[0].wrong == 0


def test_a_row_has_the_bytes_that_were_moved() -> None:
    def rows(group: Any) -> list[Row]:
        names = ("all_reduce", "all_gather", "barrier")
        return [measure(group, BenchJob(name, 10, DType.COMPLEX128, 1, 1)) for name in names]

    found = run_local(rows, 3)[0]
    assert [(row.count, row.nbytes) for row in found] == [(1, 16), (3, 48), (0, 0)]


@given(st.sampled_from(sorted(FACTORS)), st.integers(1, 64), st.floats(1e-9, 10.0))
def test_busbw_is_the_load_of_the_busiest_link(name: str, ranks: int, seconds: float) -> None:
    row = Row(BenchJob(name, 1000, DType.UINT8, 1, 1), 1000, "none", seconds, 0, ranks)
    assert row.algbw == pytest.approx(1e-6 / seconds)
    assert 0 <= row.busbw <= 2 * row.algbw


@pytest.mark.parametrize("dtype", DType)
def test_contributions_are_exact_and_differ_between_neighbours(dtype: DType) -> None:
    wide = pattern(0, 12, DType.FLOAT64)
    narrow = pattern(0, 12, dtype)
    assert narrow.dtype == dtype.numpy
    if dtype is not DType.BOOL:
        assert np.array_equal(narrow.astype(np.complex128), wide)
    assert np.count_nonzero(pattern(0, 12, dtype) != pattern(1, 12, dtype)) == 12
