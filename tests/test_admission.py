"""Strangers at a door: each has its time, and those who are too many push out the eldest."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nc10d.auth.admission import Admission
from nc10d.auth.handshake import UNPROVEN_SECONDS


@given(
    most=st.integers(1, 5),
    gaps=st.lists(st.floats(0, 1.5), max_size=20),
    proved=st.sets(st.integers(0, 19)),
)
def test_whoever_is_there_has_come_lately_and_is_one_of_few(
    most: int, gaps: list[float], proved: set[int]
) -> None:
    guests, now, came = Admission[int](most), 0.0, dict[int, float]()
    for number, gap in enumerate(gaps):
        now += gap
        for gone in guests.overdue(now):
            assert came[gone] + UNPROVEN_SECONDS <= now, "nobody goes before its time"
            guests.remove(gone)
        came[number] = now
        pushed = guests.admit(number, now)
        if pushed is not None:
            assert all(other >= pushed for other in range(number + 1) if other in guests)
            guests.remove(pushed)
        if number in proved:
            guests.remove(number)
        there = [one for one in came if one in guests]
        assert len(there) <= most
        assert all(now < came[one] + UNPROVEN_SECONDS for one in there)
        patience = guests.seconds_to_next(now)
        assert (patience is None) == (not there)
        assert patience is None or patience == came[there[0]] + UNPROVEN_SECONDS - now
