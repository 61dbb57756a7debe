"""Work queued around a copy between device arrays runs in order, on emulated GPUs."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from emulated import emulated_ranks, needs_emulators

from build import WANTED
from nc10d import cuda
from nc10d.cuda.driver import call, driver, event_done, event_pool
from nc10d.cuda.streams import LEGACY
from nc10d.group.process_group import ProcessGroup
from nc10d.testing import Ranks

HERE = importlib.util.find_spec("cuda") and importlib.util.find_spec("cuda.bindings")
needs_bindings = pytest.mark.skipif(not (HERE or WANTED), reason="no cuda.bindings: see .ci/run")
pytestmark = [needs_emulators, needs_bindings]
COUNT = 1000


class On:
    """An array of another library that has a current stream of its own."""

    def __init__(self, memory: cuda.DeviceArray, stream: int) -> None:
        self.__cuda_array_interface__ = {**memory.__cuda_array_interface__, "stream": stream}


def array(value: float, device: int = 0) -> cuda.DeviceArray:
    return cuda.to_device(np.full(COUNT, value, np.float32), device)


@contextmanager
def held(stream: int, device: int = 0) -> Iterator[None]:
    """Block a stream until the end of the `with` block."""
    with cuda.on_device(device):
        address = int(call("cuMemHostAlloc", 4, 0))
        word = ctypes.c_uint32.from_address(address)
        word.value = 0
        call("cuStreamWaitValue32", stream, address, 1, 0)
    try:
        yield
    finally:
        word.value = 1


def has_come(stream: int, device: int) -> bool:
    """Return whether a stream has completed its work, after a time in which others could."""
    other = cuda.Stream(device)
    pool = event_pool(device)
    event = pool.take()
    with cuda.on_device(device):
        call("cuEventRecord", event, stream)
        other.synchronize()
    return event_done(event)


def value(x: cuda.DeviceArray) -> float:
    for device in range(2):
        cuda.synchronize(device)
    (found,) = set(x.to_host().tolist())
    return float(found)


def the_sources_stream_goes_on_behind(_group: ProcessGroup) -> None:
    """The source is overwritten on its own stream before the target's stream runs the copy."""
    for to, of in ((0, 0), (0, 1)):
        target, memory, side = array(0.0, to), array(3.0, of), cuda.Stream(of)
        with held(LEGACY, to):
            cuda.copy_to(target, On(memory, side.handle))
            with cuda.on_device(of):
                call("cuMemsetD8Async", memory.address, 0, memory.nbytes, side.handle)
            assert not has_come(side.handle, of)
        assert (value(target), value(memory)) == (3.0, 0.0)


def a_source_may_be_dropped_behind(_group: ProcessGroup) -> None:
    """Its memory is freed in the order of its device's default stream."""
    for to, of, chosen in ((0, 0, 0), (0, 1, 0), (0, 1, 1)):
        target, memory, side = array(0.0, to), array(3.0, of), cuda.Stream(chosen)
        with held(side.handle, chosen):
            with cuda.stream(side):
                cuda.copy_to(target, memory)
            del memory
            gc.collect()
            assert not has_come(LEGACY, of)
        assert value(target) == 3.0


def a_target_may_be_dropped_behind(_group: ProcessGroup) -> None:
    target, memory, side = array(0.0), array(3.0), cuda.Stream(0)
    with held(side.handle):
        with cuda.stream(side):
            cuda.copy_to(target, memory)
        del target
        gc.collect()
        assert not has_come(LEGACY, 0)
    assert value(memory) == 3.0


def a_copy_can_be_captured(_group: ProcessGroup) -> None:
    target, memory, side = array(0.0), array(3.0), cuda.Stream(0)
    relaxed = driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    with cuda.on_device(0), cuda.stream(side):
        call("cuStreamBeginCapture", side.handle, relaxed)
        cuda.copy_to(target, memory)
        runs = call("cuGraphInstantiate", call("cuStreamEndCapture", side.handle), 0)
        assert value(target) == 0.0
        call("cuGraphLaunch", runs, side.handle)
    assert value(target) == 3.0


LAWS = [
    the_sources_stream_goes_on_behind,
    a_source_may_be_dropped_behind,
    a_target_may_be_dropped_behind,
    a_copy_can_be_captured,
]


@pytest.fixture(scope="module")
def alone() -> Iterator[Ranks]:
    with emulated_ranks(1, "fake", NC10D_EMULATED_GPUS="2") as ranks:
        yield ranks


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_work_around_a_copy_runs_in_order(alone: Ranks, law: Callable[[Any], None]) -> None:
    alone.run(law)
