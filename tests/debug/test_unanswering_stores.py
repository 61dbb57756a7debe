"""Stores that don't answer, in the table of faults: a slow machine gives the same row."""

from __future__ import annotations

import time
from typing import Any

import pytest

from benchmarks.faults import stores
from benchmarks.libraries.nc10d import Nc10d


class Slow(Nc10d):
    """A library whose clients connect late; a server that waits for no client is dead by then."""

    def reach(self, port: int, timeout: float, *, guarded: bool = False) -> Any:
        """Sleep, then return a client."""
        time.sleep(0.8)
        return super().reach(port, timeout, guarded=guarded)


def test_a_store_dies_under_its_client_however_late_that_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stores, "TIMEOUT", 0.2)
    assert stores.unanswered(Slow(), 1).words == (
        "ConnectTimeout 3x, DistNetworkError 1x, StoreTimeout 1x"
    )
