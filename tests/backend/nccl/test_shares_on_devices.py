"""Shares on devices: sent in stream order, and by a CUDA graph that repeats a whole step."""

from __future__ import annotations

from typing import Any

import numpy as np
from device_ranks import device, ones, value
from emulated import emulated_ranks, needs_emulators

from nc10d import cuda
from nc10d.cuda.driver import call, driver
from nc10d.optim import Shares

pytestmark = needs_emulators


def a_graph_averages_and_shares_again_and_again(group: Any) -> None:
    """A captured step: gradients are added, then every rank gets its owners' arrays."""
    gradient, params = ones(group), [ones(group), ones(group)]
    shares = Shares(params, [0, 1], group)
    group.all_reduce(gradient)
    shares.share()
    mine = cuda.Stream(device(group))
    relaxed = driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    with cuda.on_device(device(group)), cuda.stream(mine):
        call("cuStreamBeginCapture", mine.handle, relaxed)
        group.all_reduce(gradient)
        group.all_reduce(params[group.rank])  # ranks add up different arrays here
        shares.share()
        graph = call("cuStreamEndCapture", mine.handle)
        assert [value(x) for x in (gradient, *params)] == [2.0, 1.0, 1.0], "capturing runs nothing"
        runs = call("cuGraphInstantiate", graph, 0)
        for _ in range(3):
            call("cuGraphLaunch", runs, mine.handle)
    mine.synchronize()
    assert [value(x) for x in (gradient, *params)] == [2.0**4, 2.0**3, 2.0**3]


def arrays_in_host_and_device_memory_are_shared(group: Any) -> None:
    near, far = np.full(3, float(group.rank)), ones(group)
    if group.rank == 0:
        group.all_reduce(ones(group))
        group.all_reduce(far)
    else:
        group.all_reduce(far)
        group.all_reduce(ones(group))
    shares = Shares([near, far], [1, 0], group)
    for _ in range(2):
        shares.share()
    assert (near.tolist(), value(far)) == ([1.0] * 3, 2.0)


def test_shares_are_parts_of_graphs_and_lie_on_several_devices() -> None:
    with emulated_ranks() as two:
        two.run(a_graph_averages_and_shares_again_and_again)
        two.run(arrays_in_host_and_device_memory_are_shared)
