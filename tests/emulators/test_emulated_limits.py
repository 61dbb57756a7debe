"""Modes of the emulators that no program may count on: little room, waits, delays, mixed calls."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
from aside import Aside
from driving import TYPES, Gpu, Nccl
from emulated import needs_emulators
from nccl_world import World

from nc10d.group.process_group import ProcessGroup
from nc10d.testing import Ranks

GEQ, REMOTE_ERROR = 0, 6

pytestmark = needs_emulators


# Hardware queues


def passed(gpu: Gpu, between: int, records: bool) -> bool:
    """Say whether a stream passes a held one, with so many streams made between them."""
    held = gpu.stream()
    for _ in range(between):
        gpu.stream()
    beside, done = gpu.stream(), gpu.event()
    address, word = gpu.pinned(np.zeros(1, np.uint32))
    gpu("cuStreamWaitValue32", held, address, 1, GEQ)
    if records:
        gpu("cuEventRecord", gpu.event(), held)
    gpu("cuMemsetD8Async", gpu.out("cuMemAlloc", 4), 1, 4, beside)
    gpu("cuEventRecord", done, beside)
    over = not Aside(lambda: gpu.enter()("cuEventSynchronize", done)).is_stuck()
    word[0] = 1
    gpu("cuCtxSynchronize")
    return over


def passes(group: ProcessGroup) -> list[bool]:
    gpu = Gpu()
    return [passed(gpu, between, records) for between in (0, 1, 2) for records in (False, True)]


@pytest.mark.parametrize(
    ("queues", "wanted"),
    [
        ("32", [True, True, True, True, True, True]),
        ("1", [True, False, True, False, True, False]),
        ("2", [True, True, True, False, True, True]),
    ],
)
def test_a_record_holds_its_queue_until_its_stream_comes_there(
    monkeypatch: pytest.MonkeyPatch, queues: str, wanted: list[bool]
) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    with Ranks(1, "processes", "fake") as one:
        assert one.run(passes) == [wanted]


# Kernels


def hung(gpu: Gpu, nccl: Nccl, at: int) -> int:
    """Return a communicator whose kernel never ends."""
    comm = nccl.init_rank(1, nccl.unique_id(), 0, blocking=True)[0]
    os.environ["NC10D_EMULATED_FAULTS"] = f"ncclAllReduce@1=error:{REMOTE_ERROR}"
    nccl("ncclAllReduce", at, at, 4, TYPES["float64"], 0, comm, gpu.stream())
    del os.environ["NC10D_EMULATED_FAULTS"]
    while not nccl.state(comm):  # then the kernel has begun
        os.sched_yield()
    return comm


def another_kernel(group: ProcessGroup) -> bool:
    """Say whether a kernel gets onto the device beside one that is there."""
    gpu, nccl = Gpu(), Nccl()
    at, stream = gpu.put(np.ones(4)), gpu.stream()
    first, second = hung(gpu, nccl, at), nccl.init_rank(1, nccl.unique_id(), 0, blocking=True)[0]
    nccl("ncclAllReduce", at, at, 4, TYPES["float64"], 0, second, stream)
    over = not Aside(lambda: gpu.enter()("cuStreamSynchronize", stream)).is_stuck()
    nccl("ncclCommAbort", first)
    gpu("cuStreamSynchronize", stream)
    return over


@pytest.mark.parametrize(("kernels", "wanted"), [("0", True), ("1", False), ("2", True)])
def test_a_kernel_waits_for_its_place_on_the_device(
    monkeypatch: pytest.MonkeyPatch, kernels: str, wanted: bool
) -> None:
    monkeypatch.setenv("NC10D_EMULATED_KERNELS", kernels)
    with Ranks(1, "processes", "fake") as one:
        assert one.run(another_kernel) == [wanted]


def another_init(group: ProcessGroup) -> bool:
    """Say whether a communicator is made beside a kernel that does not end."""
    gpu, nccl = Gpu(), Nccl()
    first = hung(gpu, nccl, gpu.put(np.ones(4)))
    unique = nccl.unique_id()

    def init() -> None:
        gpu.enter()
        assert nccl.init_rank(1, unique, 0, blocking=True)[1] == 0

    made = Aside(init)
    over = not made.is_stuck()
    nccl("ncclCommAbort", first)
    made.join()
    return over


@pytest.mark.parametrize("sync", [False, True])
def test_an_init_waits_for_the_device_if_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, sync: bool
) -> None:
    monkeypatch.setenv("NC10D_EMULATED_INIT_SYNC", str(int(sync)))
    with Ranks(1, "processes", "fake") as one:
        assert one.run(another_init) == [not sync]


# Calls that differ


def calls_that_differ(group: ProcessGroup, message: bool) -> tuple[bool, int]:
    """Return whether the calls hang, and the communicator's state."""
    here = World(group)
    at, kind = here.gpu.put(np.ones(5)), TYPES["float64"]
    if message:
        call = "ncclRecv" if group.rank else "ncclSend"
        here.call(call, at, 5 - group.rank, kind, 1 - group.rank)
    else:
        here.call("ncclAllReduce", at, at, 5 - group.rank, kind, 0)
    stuck = Aside(lambda: here.gpu.enter()("cuStreamSynchronize", here.stream)).is_stuck()
    state = here.nccl.state(here.comm)
    here.nccl("ncclCommAbort", here.comm)
    return stuck, state


@pytest.mark.parametrize("message", [False, True])
def test_calls_that_differ_may_hang(monkeypatch: pytest.MonkeyPatch, message: bool) -> None:
    monkeypatch.setenv("NC10D_EMULATED_MISMATCH", "hang")
    with Ranks(2, "processes", "fake") as two:
        assert two.run(calls_that_differ, [message] * 2)[1] == (True, 0)


# Delays


def seconds_of_tasks(group: ProcessGroup) -> float:
    gpu = Gpu()
    at, stream, begun = gpu.out("cuMemAlloc", 4), gpu.stream(), time.monotonic()
    for _ in range(100):
        gpu("cuMemsetD8Async", at, 1, 4, stream)
    gpu("cuStreamSynchronize", stream)
    return time.monotonic() - begun


def test_tasks_are_late_by_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NC10D_EMULATED_DELAYS", "7")
    with Ranks(1, "processes", "fake") as one:
        assert one.run(seconds_of_tasks)[0] > 0.1
