"""Errors on their way from a rank to whoever runs the test."""

from __future__ import annotations

import time
from typing import Any

import pytest

from nc10d.outcome import fresh
from nc10d.testing.members import portable
from nc10d.testing.ranks import run_ranks


def told(error: BaseException) -> int:
    return sum(map(len, getattr(error, "__notes__", ())))


def test_an_error_that_ranks_share_is_told_once() -> None:
    error = ValueError("why")
    lengths = {told(portable(error)) for _ in range(5)}
    assert len(lengths) == 1
    assert "why" in error.__notes__[0]


def test_a_chain_of_errors_does_not_tell_its_causes_notes_again() -> None:
    error: BaseException = portable(RuntimeError("root"))
    first = told(error)
    for _ in range(12):
        outer = RuntimeError("root")
        outer.__cause__ = error
        error = portable(outer)
    assert told(error) < 40 * first
    copy = fresh(error)
    assert told(portable(copy)) < 40 * first


def only_rank_one_is_wrong(group: Any) -> None:
    assert group.rank == 0, "mine"
    group.barrier()


def test_what_one_rank_raises_is_raised_at_once_and_not_the_others_wait() -> None:
    start = time.monotonic()
    with pytest.raises(AssertionError, match="mine"):
        run_ranks(only_rank_one_is_wrong, 2, timeout=60.0)
    assert time.monotonic() - start < 30.0
