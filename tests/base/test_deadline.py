"""Time passes for nc10d although a library has stopped Python's clocks, as some do in tests."""

from __future__ import annotations

import sys
import threading
import time
from functools import partial
from typing import Any

import numpy as np
import pytest

import nc10d as dist
from nc10d.testing import run_ranks

CLOCKS = ["monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "time", "time_ns"]


def stop_clocks(patch: pytest.MonkeyPatch) -> None:
    """Stop Python's clocks in `time` and wherever nc10d's modules have them."""
    real = [getattr(time, name) for name in CLOCKS]
    for name, module in list(sys.modules.items()):
        if name == "time" or name.startswith("nc10d"):
            for attribute, value in list(vars(module).items()):
                if any(value is clock for clock in real):
                    patch.setattr(module, attribute, partial(float, value()))


@pytest.mark.parametrize("call", ["HashStore", "TCPStore", "barrier", "recv"])
def test_a_call_times_out_although_pythons_clocks_stand_still(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tcp = call == "TCPStore"
    store = dist.TCPStore("127.0.0.1", is_master=True) if tcp else dist.HashStore()
    over = threading.Event()

    def rank(group: Any) -> None:
        if group.rank:  # it comes to no call
            assert over.wait(60)
            return
        calls = {
            "barrier": lambda: group.barrier(timeout=0.3),
            "recv": lambda: group.recv(np.ones(1), 1, timeout=0.3),
        }
        stop_clocks(monkeypatch)
        try:
            with pytest.raises((dist.CollectiveTimeout, dist.StoreTimeout)):
                calls.get(call, lambda: store.wait(["never"], 0.3))()
        finally:
            over.set()

    run_ranks(rank, 2)
    if isinstance(store, dist.TCPStore):
        store.close()
