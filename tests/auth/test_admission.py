"""Unproven connections: each has a time limit; beyond the maximum, the oldest must go."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nc10d.auth.admission import UNPROVEN_SECONDS, Admission


@given(
    most=st.integers(1, 5),
    gaps=st.lists(st.floats(0, 1.5), max_size=20),
    proved=st.sets(st.integers(0, 19)),
)
def test_admitted_connections_are_recent_and_few(
    most: int, gaps: list[float], proved: set[int]
) -> None:
    admission, now, came = Admission[int](most), 0.0, dict[int, float]()
    for number, gap in enumerate(gaps):
        now += gap
        for late in admission.overdue(now):
            assert came[late] + UNPROVEN_SECONDS <= now, "none is overdue before its time"
            admission.remove(late)
        came[number] = now
        oldest = admission.admit(number, now)
        if oldest is not None:
            assert all(other >= oldest for other in range(number + 1) if other in admission)
            admission.remove(oldest)
        if number in proved:
            admission.remove(number)
        admitted = [other for other in came if other in admission]
        assert len(admitted) <= most
        assert all(now < came[other] + UNPROVEN_SECONDS for other in admitted)
        seconds = admission.seconds_to_next(now)
        assert (seconds is None) == (not admitted)
        assert seconds is None or seconds == came[admitted[0]] + UNPROVEN_SECONDS - now
