"""Arrays in objects arrive on the device that the receiver names, on emulated GPUs."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

import nc10d as dist
from build import build
from nc10d.testing import Ranks

HERE = build() is not None
WANTED = bool(os.environ.get("NC10D_REQUIRE_NCCL"))
pytestmark = pytest.mark.skipif(not (HERE or WANTED), reason="no emulator: see .ci/run")


def located(group: Any) -> None:
    from nc10d import cuda

    places: list[Any] = [None, None]
    sent = {"w": np.arange(6.0).reshape(2, 3), "bits": np.ones(0, np.int8), "step": 3}
    dist.all_gather_object(places, sent, map_location="cuda:1")
    for found in places:
        assert (type(found["w"]), found["w"].device, found["step"]) == (cuda.DeviceArray, 1, 3)
        assert np.array_equal(cuda.to_host(found["w"]), sent["w"])
        assert found["bits"].shape == (0,)
    with pytest.raises(ValueError, match="no such device"):
        dist.all_gather_object(places, sent, map_location=f"cuda:{cuda.device_count()}")


def test_arrays_arrive_on_the_device_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = build()
    assert found is not None
    for name, value in found.environment().items():
        monkeypatch.setenv(name, value)
    with Ranks(2, "processes", "cpu", timeout=90) as two:
        two.run(located)
