"""Captures on every kind of stream and in both modes of threads' calls, over the emulators.

CuPy's and Numba's streams are blocking by default, torch's are not; torch captures in mode GLOBAL.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from device_ranks import Strided, afresh, device, ones, value
from emulated import emulated_ranks, needs_emulators
from folding_ranks import check, numbers, prepare, put

from nc10d import cuda, nccl
from nc10d.base.signal_errors import Event
from nc10d.cuda.driver import call, driver
from nc10d.cuda.streams import PER_THREAD
from nc10d.group.process_group import ProcessGroup
from nc10d.ops import AVG, SUM
from nc10d.testing import Ranks, reference

pytestmark = needs_emulators
BLOCKING, NON_BLOCKING = 0, 1  # CUstream_flags (cuda.h)
GLOBAL, THREAD_LOCAL = 0, 1  # CUstreamCaptureMode
STREAMS = (BLOCKING, NON_BLOCKING, PER_THREAD)


@contextmanager
def capture(group: ProcessGroup, kind: int, mode: int) -> Iterator[Callable[[], None]]:
    """Capture a block on a stream of this kind; yield a function that then runs the graph."""
    runs: list[Any] = []

    def run() -> None:
        with cuda.on_device(device(group)):
            call("cuGraphLaunch", runs[0], handle)
        cuda.synchronize(device(group))

    with cuda.on_device(device(group)):
        handle = kind if kind == PER_THREAD else int(call("cuStreamCreate", kind))
        with cuda.stream(handle):
            call("cuStreamBeginCapture", handle, driver().CUstreamCaptureMode(mode))
            yield run
            graph = call("cuStreamEndCapture", handle)
        runs.append(call("cuGraphInstantiate", graph, 0))


def a_collective_is_captured(group: ProcessGroup, kind: int, mode: int) -> None:
    """The group lives on: its watchdog asks no captured event."""
    x = ones(group)
    group.all_reduce(x)
    cuda.synchronize(device(group))
    with capture(group, kind, mode) as run:
        work = group.all_reduce(x, async_op=True)
        assert work is not None
        work.wait()
    for turn in (2, 3):
        run()
        assert value(x) == float(group.size**turn)
    ended = Event()
    later: Any = group.all_reduce(x, async_op=True)
    later.add_done_callback(lambda _: ended.set())
    assert ended.wait(20)
    assert value(x) == float(group.size**4)


def arrays_may_be_dropped_meanwhile(group: ProcessGroup, kind: int, mode: int) -> None:
    """Their memory is freed once the capture is over; new memory is to be had."""
    x = ones(group)
    group.all_reduce(x)
    dropped = [ones(group), ones(group, 1000)]
    cuda.synchronize(device(group))
    before = free_bytes(group)
    with capture(group, kind, mode) as run:
        group.all_reduce(x)
        dropped.clear()
        gc.collect()
        made = cuda.empty(100, np.float32, device(group))
    del made
    gc.collect()
    cuda.synchronize(device(group))
    assert free_bytes(group) > before
    run()
    assert value(x) == float(group.size**2)


def registered_memory_may_be_dropped_meanwhile(group: ProcessGroup, kind: int, mode: int) -> None:
    """A thread frees it, which waits for the default stream."""
    x = ones(group)
    group.all_reduce(x)
    dropped = [nccl.registered_zeros(group)(100, np.float32)]
    cuda.synchronize(device(group))
    with capture(group, kind, mode) as run:
        dropped.clear()
        for _ in range(10):
            group.all_reduce(x)
    run()
    assert value(x) == float(group.size**11)


def free_bytes(group: ProcessGroup) -> int:
    with cuda.on_device(device(group)):
        return int(call("cuMemGetInfo")[0])


def strided_arrays_may_be_new(group: ProcessGroup, kind: int, mode: int) -> None:
    group.all_reduce(ones(group))
    whole = cuda.to_device(np.arange(100, dtype=np.float32), device(group))
    cuda.synchronize(device(group))
    with capture(group, kind, mode) as run:
        group.all_reduce(Strided(whole, (50,), (8,)), SUM)
    run()
    expected = np.arange(100, dtype=np.float32)
    expected[::2] *= group.size
    assert np.array_equal(cuda.to_host(whole), expected)


def folds_may_be_new(group: ProcessGroup, kind: int, mode: int) -> None:
    op, count = AVG.ordered, 700 + 2 * kind + mode
    prepare(op, np.dtype("f4"))
    given = [numbers(np.dtype("f4"), rank, count) for rank in range(group.size)]
    group.all_reduce(ones(group))
    x = put(group, given[group.rank])
    cuda.synchronize(device(group))
    with capture(group, kind, mode) as run:
        group.all_reduce(x, op)
    run()
    check(x, reference.fold(given, op))


LAWS = [
    a_collective_is_captured,
    arrays_may_be_dropped_meanwhile,
    registered_memory_may_be_dropped_meanwhile,
    strided_arrays_may_be_new,
    folds_may_be_new,
]


def on_every_stream(group: ProcessGroup, law: Callable[[ProcessGroup, int, int], None]) -> None:
    for kind in STREAMS:
        for mode in (GLOBAL, THREAD_LOCAL):
            afresh(group, lambda mine, kind=kind, mode=mode: law(mine, kind, mode))  # type: ignore[misc]


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with emulated_ranks(2, NC10D_EMULATED_GPUS="2") as ranks:
        yield ranks


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_laws_of_captures_hold_on_every_stream(two: Ranks, law: Callable[..., None]) -> None:
    two.run(on_every_stream, [law] * 2)
