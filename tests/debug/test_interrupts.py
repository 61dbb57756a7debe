"""Ctrl-C in the table of faults: calls that don't wait, or end for another cause, are reported."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.faults import interrupts
from benchmarks.libraries.nc10d import Nc10d


def deaf(group: Any) -> None:
    """Ignore Ctrl-C."""
    try:
        time.sleep(0.5)
    except KeyboardInterrupt:
        raise RuntimeError("it timed out") from None


def waits_for_nobody(group: Any) -> None:
    """Return at once."""


@pytest.mark.parametrize(
    ("call", "expected"), [(deaf, "RuntimeError 1x"), (waits_for_nobody, "nothing 1x")]
)
def test_a_call_that_no_interrupt_ends_is_reported(
    monkeypatch: pytest.MonkeyPatch, call: Callable[[Any], object], expected: str
) -> None:
    monkeypatch.setattr(interrupts, "waits", lambda library: {"one": call})
    library = Nc10d()
    library.warm()
    assert interrupts.interrupted(library, 1).words == f"KeyboardInterrupt 1x, {expected}"
