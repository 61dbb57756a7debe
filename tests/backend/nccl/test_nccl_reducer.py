"""A Reducer of device arrays, over the emulators: its means, its buckets, and its clock."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from emulated import emulated_ranks, needs_emulators

from nc10d import cuda
from nc10d.cuda.driver import call
from nc10d.group.process_group import ProcessGroup
from nc10d.reducer.logger import Logger
from nc10d.reducer.reducer import Reducer
from nc10d.reducer.timing import PARTS
from nc10d.testing.ranks import Ranks

pytestmark = needs_emulators
SHAPES = [(2, 3), (5,), (4, 2)]
SLOW = 50
"""Milliseconds that the device is busy in a part of a pass."""


def new(device: int, caps: int = 1 << 20) -> dict[str, Any]:
    """Return the arguments for a Reducer of arrays on one device."""

    def zeros(count: int, dtype: np.dtype[Any]) -> Any:
        return cuda.to_device(np.zeros(count, dtype), device)

    params = [cuda.to_device(np.zeros(shape, np.float32), device) for shape in SHAPES]
    return {"params": params, "cap_bytes": caps, "first_bytes": caps, "allocate": zeros}


def fill(reducer: Reducer, value: float) -> None:
    for param, gradient in enumerate(reducer.gradients):
        gradient.fill_from(np.full(SHAPES[param], value + param, np.float32))


def means(group: ProcessGroup) -> None:
    reducer = Reducer(group=group, **new(group.rank, caps=16))
    assert {bucket.device for bucket in reducer.plan.buckets} == {f"cuda:{group.rank}"}
    for _ in range(2):
        reducer.begin()
        fill(reducer, 2.0 * group.rank)
        for param in (2, 0, 1):
            reducer.grad_ready(param)
        reducer.finish()
        cuda.synchronize(group.rank)
        for param, gradient in enumerate(reducer.gradients):
            assert (gradient.to_host() == param + 1).all()


def test_gradients_that_lie_in_buckets_on_devices_become_the_means() -> None:
    with emulated_ranks() as two:
        two.run(means)


def each_device_of_a_process_has_buckets_of_its_own(group: ProcessGroup) -> None:
    one, two = new(0), new(1)
    allocate = {"cuda:0": one["allocate"], "cuda:1": two["allocate"]}
    params = one["params"] + two["params"]
    reducer = Reducer(params, group, allocate=allocate)
    found = [(sorted(bucket.params), bucket.device) for bucket in reducer.plan.buckets]
    assert found == [([3, 4, 5], "cuda:1"), ([0, 1, 2], "cuda:0")]
    assert [x.device for x in reducer.gradients] == [0] * 3 + [1] * 3


def parts_of_a_pass_last_as_long_as_the_device_takes(group: ProcessGroup) -> None:
    reducer = Reducer(group=group, **new(group.rank))
    logger = Logger(reducer)
    stream = cuda.Stream(group.rank)
    busy = {name: compute(stream) for name in ("forward_compute_time", "backward_compute_time")}
    for computing in ([], ["forward_compute_time"], ["backward_compute_time"]):
        with cuda.stream(stream):
            reducer.prepare_for_forward()
            for name in computing:
                if name.startswith("forward"):
                    busy[name]()
            reducer.begin()
            for name in computing:
                if name.startswith("backward"):
                    busy[name]()
            for param in range(len(SHAPES)):
                reducer.grad_ready(param)
            reducer.finish()
        found = reducer.durations()
        assert set(found) == set(PARTS)
        assert found["backward_comm_time"] > 0
        for name in computing:
            assert found[name] >= SLOW * 1_000_000  # the host only queues the work
        assert {name: logger.data()[name] for name in PARTS} == found


def compute(stream: cuda.Stream) -> Any:
    """Return a function that queues work on a stream and keeps its device busy, not the host."""
    import ctypes
    import time

    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: time.sleep(SLOW / 1000))
    address = ctypes.cast(function, ctypes.c_void_p).value

    def queue() -> None:
        with cuda.on_device(stream.device):
            call("cuLaunchHostFunc", stream.handle, address, 0)

    queue.keep = function  # type: ignore[attr-defined]
    return queue


def a_pass_without_a_forward_pass_has_no_time_for_it(group: ProcessGroup) -> None:
    reducer = Reducer(group=group, **new(group.rank))
    assert set(reducer.durations().values()) == {0}
    for prepare in (True, False):
        if prepare:
            reducer.prepare_for_forward()
        reducer.begin()
        for param in range(len(SHAPES)):
            reducer.grad_ready(param)
        reducer.finish()
        found = reducer.durations()
        assert bool(found["forward_compute_time"]) == prepare
        assert found["backward_compute_time"] > 0


def an_array_keeps_its_elements_in_another_shape(_group: ProcessGroup) -> None:
    x = cuda.to_device(np.arange(6, dtype=np.float32))
    assert (x.reshape((2, 3)).to_host() == np.arange(6).reshape(2, 3)).all()
    with pytest.raises(ValueError, match=r"6 elements can't have the shape \(4,\)"):
        x.reshape((4,))


LAWS = [
    each_device_of_a_process_has_buckets_of_its_own,
    parts_of_a_pass_last_as_long_as_the_device_takes,
    a_pass_without_a_forward_pass_has_no_time_for_it,
    an_array_keeps_its_elements_in_another_shape,
]


@pytest.fixture(scope="module")
def one() -> Iterator[Ranks]:
    with emulated_ranks(1) as ranks:
        yield ranks


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_a_reducer_of_device_arrays(one: Ranks, law: Callable[..., None]) -> None:
    one.run(law)
