"""A driver refuses calls that would work with host memory and threads: see cuda.h."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from aside import Aside
from driving import Gpu
from emulated import needs_emulators

from build import find_headers
from nc10d.group.process_group import ProcessGroup
from nc10d.testing import Ranks

INVALID_CONTEXT, INVALID_HANDLE, NOT_FOUND, INVALID_VALUE = 201, 400, 500, 1
INVALIDATED, IMPLICIT, RELAXED, GEQ = 901, 906, 2, 0
BLOCKING, NON_BLOCKING = 0, 1

pytestmark = needs_emulators


@pytest.fixture(scope="module")
def process() -> Iterator[Ranks]:
    with Ranks(1, "processes", "fake") as found:
        yield found


# No context is current

# Devices are looked for, and contexts made current, without one.
FREE = re.compile(r"cuDevice\w+|cuCtx(Set|Push|Pop)Current|cuCtxGetApiVersion")


def listed() -> list[str]:
    """Return the functions for which cuda.h lists CUDA_ERROR_INVALID_CONTEXT."""
    headers = find_headers()
    assert headers is not None
    comment = r"/\*\*((?:(?!\*/).)*)\*/\s*CUresult CUDAAPI (\w+)\("
    found = re.findall(comment, headers[0].read_text(), re.DOTALL)
    return [
        name
        for text, name in found
        if "CUDA_ERROR_INVALID_CONTEXT" in text.partition(r"\return")[2]
        and not FREE.fullmatch(name)
    ]


def without_context(group: ProcessGroup, names: list[str]) -> dict[str, int]:
    gpu = Gpu()
    codes: dict[str, int] = {}
    Aside(lambda: codes.update({name: gpu.code(name, *[0] * 11) for name in names})).join()
    return {name: code for name, code in codes.items() if code != NOT_FOUND}


def test_calls_without_a_context_are_refused_wherever_the_header_says_so(process: Ranks) -> None:
    codes = process.run(without_context, [listed()])[0]
    assert len(codes) > 55
    assert {name: code for name, code in codes.items() if code != INVALID_CONTEXT} == {}


def handles_alone(gpu: Gpu) -> None:
    """An event or a capture is asked by its handle."""
    stream, event, status = gpu.stream(), gpu.event(), ctypes.c_int()
    gpu("cuEventRecord", event, stream)
    gpu("cuEventSynchronize", event)
    Aside(lambda: gpu("cuEventQuery", event)).join()
    Aside(lambda: gpu("cuStreamIsCapturing", stream, ctypes.byref(status))).join()


# The legacy stream, while a blocking stream is captured


def captured(gpu: Gpu, flags: int, use: Callable[[], int]) -> tuple[int, int]:
    """Return the code of a call during a capture, and that of the capture's end."""
    stream, graph = gpu.stream(flags), ctypes.c_uint64()
    gpu("cuStreamBeginCapture", stream, RELAXED)
    code = use()
    return code, gpu.code("cuStreamEndCapture", stream, ctypes.byref(graph))


def the_legacy_stream_is_unusable_during_a_blocking_capture(gpu: Gpu) -> None:
    event, status = gpu.event(), ctypes.c_int()
    mode = ctypes.c_int(RELAXED)
    gpu("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    at, pooled = gpu.out("cuMemAlloc", 4), gpu.out("cuMemAllocAsync", 4, 0)
    uses = [
        ("cuMemsetD8Async", at, 1, 4, 0),
        ("cuEventRecord", event, 0),
        ("cuStreamWaitEvent", 0, event, 0),
        ("cuStreamSynchronize", 0),
        ("cuStreamQuery", 0),
        ("cuMemcpyDtoH", np.zeros(4, np.uint8).ctypes.data, at, 4),
        ("cuMemAllocAsync", ctypes.byref(ctypes.c_uint64()), 4, 0),
        ("cuMemFreeAsync", pooled, 0),
    ]
    for use in uses:
        code = captured(gpu, BLOCKING, lambda use=use: gpu.code(*use))  # type: ignore[misc]
        assert code == (IMPLICIT, INVALIDATED), use
    ask = "cuStreamIsCapturing", 0, ctypes.byref(status)
    assert captured(gpu, BLOCKING, lambda: gpu.code(*ask)) == (IMPLICIT, 0)
    for use in [*uses, ask]:
        code = captured(gpu, NON_BLOCKING, lambda use=use: gpu.code(*use))  # type: ignore[misc]
        assert code == (0, 0), use
    gpu("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


def an_event_of_the_legacy_stream_comes_after_blocking_streams(gpu: Gpu) -> None:
    blocking, event = gpu.stream(BLOCKING), gpu.event()
    address, word = gpu.pinned(np.zeros(1, np.uint32))
    gpu("cuStreamWaitValue32", blocking, address, 1, GEQ)
    gpu("cuEventRecord", event, 0)
    stuck = Aside(lambda: gpu.enter()("cuEventSynchronize", event)).is_stuck()
    word[0] = 1
    gpu("cuEventSynchronize", event)
    assert stuck


# Another context


def handles_of_another_context_are_refused(gpu: Gpu) -> None:
    event, mine = gpu.event(), gpu.stream()
    there = Gpu(1)
    stream = there.stream()
    gpu.enter()
    assert gpu.code("cuEventRecord", event, stream) == INVALID_HANDLE
    gpu("cuEventRecord", event, mine)
    gpu("cuStreamWaitEvent", stream, event, 0)
    module = gpu.out("cuModuleLoadData", b"ptx")
    kernel = gpu.out("cuModuleGetFunction", module, b"nc10d_none")
    gpu("cuStreamSynchronize", stream)
    launch = "cuLaunchKernel", kernel, 1, 1, 1, 1, 1, 1, 0
    assert gpu.code(*launch, stream, None, None) == INVALID_HANDLE
    assert gpu.code(*launch, mine, None, None) not in (0, INVALID_HANDLE), "nobody knows it"


# Memory of the pool


def freed_memory_is_spoiled_and_the_first_to_be_used_again(gpu: Gpu) -> None:
    one, other, x = gpu.stream(), gpu.stream(), np.zeros(64, np.uint8)
    first, second = (gpu.out("cuMemAllocAsync", size, one) for size in (64, 4096))
    address, word = gpu.pinned(np.zeros(1, np.uint32))
    gpu("cuMemsetD8Async", second, 7, 64, one)
    gpu("cuStreamWaitValue32", one, address, 1, GEQ)
    gpu("cuMemFreeAsync", first, one)
    gpu("cuMemFreeAsync", second, one)
    assert gpu.code("cuMemFreeAsync", second, one) == INVALID_VALUE
    assert gpu.out("cuMemAllocAsync", 64, other) not in (first, second), "not yet free for others"
    assert gpu.out("cuMemAllocAsync", 64, one) == second, "the block that was freed last"
    word[0] = 1
    gpu("cuStreamSynchronize", one)
    assert (gpu.get(second, x) == 0xCD).all()
    assert gpu.out("cuMemAllocAsync", 64, other) == first


CHECKS: list[Callable[[Gpu], None]] = [
    handles_alone,
    the_legacy_stream_is_unusable_during_a_blocking_capture,
    an_event_of_the_legacy_stream_comes_after_blocking_streams,
    handles_of_another_context_are_refused,
    freed_memory_is_spoiled_and_the_first_to_be_used_again,
]


def run(group: ProcessGroup, check: Callable[[Gpu], None]) -> None:
    check(Gpu())


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_emulator_refuses_as_a_driver_does(
    process: Ranks, check: Callable[[Gpu], None]
) -> None:
    process.run(run, [check])
