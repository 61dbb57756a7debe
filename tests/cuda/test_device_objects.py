"""Arrays in objects arrive on the device that the receiver names, on emulated GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from emulated import emulated_ranks, needs_emulators

import nc10d as dist

pytestmark = needs_emulators


def located(group: Any) -> None:
    from nc10d import cuda

    places: list[Any] = [None, None]
    sent = {"w": np.arange(6.0).reshape(2, 3), "bits": np.ones(0, np.int8), "step": 3}
    dist.all_gather_object(places, sent, map_location="cuda:1")
    for found in places:
        assert (type(found["w"]), found["w"].device, found["step"]) == (cuda.DeviceArray, 1, 3)
        assert np.array_equal(cuda.to_host(found["w"]), sent["w"])
        assert found["bits"].shape == (0,)
        with pytest.raises(TypeError, match=r"in device memory: x.to_host\(\) returns a copy"):
            np.asarray(found["w"])
    with pytest.raises(ValueError, match="no such device"):
        dist.all_gather_object(places, sent, map_location=f"cuda:{cuda.device_count()}")


def test_arrays_arrive_on_the_device_that_is_named() -> None:
    with emulated_ranks(2, "cpu", 90.0) as two:
        two.run(located)
