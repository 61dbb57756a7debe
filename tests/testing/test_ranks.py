"""Errors on their way from a rank to whoever runs the test."""

from __future__ import annotations

from nc10d.outcome import fresh
from nc10d.testing.ranks import _portable


def told(error: BaseException) -> int:
    return sum(map(len, getattr(error, "__notes__", ())))


def test_an_error_that_ranks_share_is_told_once() -> None:
    error = ValueError("why")
    lengths = {told(_portable(error)) for _ in range(5)}
    assert len(lengths) == 1
    assert "why" in error.__notes__[0]


def test_a_chain_of_errors_does_not_tell_its_causes_notes_again() -> None:
    error: BaseException = _portable(RuntimeError("root"))
    first = told(error)
    for _ in range(12):
        outer = RuntimeError("root")
        outer.__cause__ = error
        error = _portable(outer)
    assert told(error) < 40 * first
    copy = fresh(error)
    assert told(_portable(copy)) < 40 * first
