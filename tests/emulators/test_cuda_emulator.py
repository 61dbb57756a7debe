"""The libcuda emulator runs streams in order and beside their caller, and fails as a driver does.

A stream is blocked by a wait for a word in pinned memory, so no test depends on time. The tests run
in a child process, because a process that has loaded the emulator can't load the real libcuda.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from driving import NON_BLOCKING, Gpu
from emulated import needs_emulators

from build import build
from nc10d.group.process_group import ProcessGroup
from nc10d.testing import Ranks

NOT_READY, INVALID_VALUE, NOT_SUPPORTED, OUT_OF_MEMORY = 600, 1, 801, 2
UNSUPPORTED, INVALIDATED, UNJOINED, CAPTURED = 900, 901, 904, 907
GLOBAL, RELAXED, GEQ = 0, 2, 0
Array = np.ndarray[Any, np.dtype[Any]]

pytestmark = needs_emulators


@pytest.fixture(scope="module")
def process() -> Iterator[Ranks]:
    with Ranks(1, "processes", "fake") as found:
        yield found


Check = Callable[[Gpu], None]
_gpu: list[Gpu] = []


def run(group: ProcessGroup, check: Check) -> None:
    if not _gpu:
        _gpu.append(Gpu())
    check(_gpu[0])


class Hold:
    """Blocks a stream until `release`."""

    def __init__(self, gpu: Gpu, stream: int) -> None:
        address, self.word = gpu.pinned(np.zeros(1, np.uint32))
        gpu("cuStreamWaitValue32", stream, address, 1, GEQ)

    def release(self) -> None:
        self.word[0] = 1


def is_over(gpu: Gpu, stream: int) -> bool:
    return gpu.code("cuStreamQuery", stream) != NOT_READY


# Streams


def streams_run_beside_each_other_and_beside_the_caller(gpu: Gpu) -> None:
    one, other, x = gpu.stream(), gpu.stream(), np.zeros(4, np.uint8)
    at, beside = gpu.put(x), gpu.put(x)
    hold = Hold(gpu, one)
    gpu("cuMemsetD8Async", at, 7, 4, one)
    gpu("cuMemsetD8Async", beside, 8, 4, other)
    gpu("cuStreamSynchronize", other)
    assert (gpu.get(beside, x) == 8).all()
    assert not is_over(gpu, one)
    assert (gpu.get(at, x) == 0).all(), "the held stream has not come there yet"
    hold.release()
    gpu("cuStreamSynchronize", one)
    assert is_over(gpu, one)
    assert (gpu.get(at, x) == 7).all()


def an_event_orders_streams(gpu: Gpu) -> None:
    first, second, event, x = gpu.stream(), gpu.stream(), gpu.event(), np.zeros(4, np.uint8)
    at = gpu.put(x)
    assert gpu.code("cuEventQuery", event) == 0, "never recorded: nothing to wait for"
    hold = Hold(gpu, first)
    gpu("cuMemsetD8Async", at, 1, 4, first)
    gpu("cuEventRecord", event, first)
    gpu("cuStreamWaitEvent", second, event, 0)
    gpu("cuMemsetD8Async", at, 2, 2, second)
    assert gpu.code("cuEventQuery", event) == NOT_READY
    assert not is_over(gpu, second)
    hold.release()
    gpu("cuStreamSynchronize", second)
    assert gpu.get(at, x).tolist() == [2, 2, 1, 1]
    assert gpu.code("cuEventQuery", event) == 0


def a_wait_is_for_the_record_before_it(gpu: Gpu) -> None:
    """An event recorded again does not affect streams that wait already."""
    first, second, event = gpu.stream(), gpu.stream(), gpu.event()
    gpu("cuEventRecord", event, first)
    gpu("cuStreamWaitEvent", second, event, 0)
    hold = Hold(gpu, first)
    gpu("cuEventRecord", event, first)
    gpu("cuStreamSynchronize", second)
    hold.release()
    gpu("cuEventSynchronize", event)


def the_default_stream_waits_for_blocking_streams(gpu: Gpu) -> None:
    blocking, x = gpu.stream(0), np.zeros(4, np.uint8)
    at, hold = gpu.put(x), Hold(gpu, blocking)
    gpu("cuMemsetD8Async", at, 1, 4, blocking)
    gpu("cuMemsetD8Async", at, 2, 4, 0)
    gpu("cuMemsetD8Async", at, 3, 1, blocking)
    hold.release()
    gpu("cuCtxSynchronize")
    assert gpu.get(at, x).tolist() == [3, 2, 2, 2]


def the_default_stream_passes_other_streams(gpu: Gpu) -> None:
    beside, x = gpu.stream(NON_BLOCKING), np.zeros(4, np.uint8)
    at, hold = gpu.put(x), Hold(gpu, beside)
    gpu("cuMemsetD8Async", at, 2, 4, 0)
    gpu("cuStreamSynchronize", 0)
    assert (gpu.get(at, x) == 2).all()
    hold.release()
    gpu("cuStreamSynchronize", beside)


def a_destroyed_stream_runs_to_its_end(gpu: Gpu) -> None:
    stream, event, x = gpu.stream(), gpu.event(), np.zeros(4, np.uint8)
    at, hold = gpu.put(x), Hold(gpu, stream)
    gpu("cuMemsetD8Async", at, 5, 4, stream)
    gpu("cuEventRecord", event, stream)
    gpu("cuStreamDestroy", stream)
    hold.release()
    gpu("cuEventSynchronize", event)
    assert (gpu.get(at, x) == 5).all()


def the_time_between_events_is_that_of_the_stream(gpu: Gpu) -> None:
    stream, start, end = gpu.stream(), gpu.event(0), gpu.event(0)
    between = ctypes.c_float(-1)
    gpu("cuEventRecord", start, stream)
    hold = Hold(gpu, stream)
    gpu("cuEventRecord", end, stream)
    assert gpu.code("cuEventElapsedTime", ctypes.byref(between), start, end) == NOT_READY
    hold.release()
    gpu("cuEventSynchronize", end)
    gpu("cuEventElapsedTime", ctypes.byref(between), start, end)
    assert between.value > 0


# Memory


def pinned_memory_is_read_when_the_stream_comes_there(gpu: Gpu) -> None:
    """A copy reads plain memory at the call, but pinned memory when the stream reaches the copy."""
    stream, plain = gpu.stream(), np.full(4, 1, np.uint8)
    at, other = gpu.put(plain), gpu.put(plain)
    address, pinned = gpu.pinned(plain)
    hold = Hold(gpu, stream)
    gpu("cuMemcpyHtoDAsync", at, address, 4, stream)
    gpu("cuMemcpyHtoDAsync", other, plain.ctypes.data, 4, stream)
    pinned[:] = plain[:] = 9
    hold.release()
    gpu("cuStreamSynchronize", stream)
    assert (gpu.get(at, plain) == 9).all()
    assert (gpu.get(other, plain) == 1).all()


def memory_outside_an_allocation_is_refused(gpu: Gpu) -> None:
    x = np.zeros(100, np.uint8)
    at = gpu.put(x)
    assert gpu.code("cuMemcpyHtoD", at + 50, x.ctypes.data, 51) == INVALID_VALUE
    assert gpu.code("cuMemcpyDtoD", at, at - 10, 20) == INVALID_VALUE
    assert gpu.code("cuMemsetD8Async", at, 0, 101, 0) == INVALID_VALUE
    gpu("cuMemFree", at)
    assert gpu.code("cuMemFree", at) == INVALID_VALUE
    assert gpu.code("cuMemAlloc", ctypes.byref(ctypes.c_uint64()), 2**40) == OUT_OF_MEMORY


def a_pointer_knows_where_it_is(gpu: Gpu) -> None:
    at, (host, _) = gpu.put(np.zeros(8)), gpu.pinned(np.zeros(8))
    kind, memory_type, ordinal = ctypes.c_uint(), 2, 9
    for address, wanted in ((at + 8, 2), (host, 1)):
        gpu("cuPointerGetAttribute", ctypes.byref(kind), memory_type, address)
        assert kind.value == wanted
    gpu("cuPointerGetAttribute", ctypes.byref(kind), ordinal, at)
    assert kind.value == 0
    plain = np.zeros(8)
    call = "cuPointerGetAttribute", ctypes.byref(kind), memory_type, plain.ctypes.data
    assert gpu.code(*call) == INVALID_VALUE


# Capture


def count_up(data: int) -> None:
    ctypes.c_int.from_address(data).value += 1


counter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(count_up)
nothing = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)


def capture(gpu: Gpu, stream: int) -> int:
    return gpu.out("cuGraphInstantiate", gpu.end_capture(stream), 0)


def a_capture_runs_nothing_and_its_graph_runs_it_again_and_again(gpu: Gpu) -> None:
    stream, beside, fork, joined = gpu.stream(), gpu.stream(), gpu.event(), gpu.event()
    calls = ctypes.c_int(0)
    where = ctypes.byref(calls)
    gpu("cuStreamBeginCapture", stream, GLOBAL)
    gpu("cuLaunchHostFunc", stream, counter, where)
    gpu("cuEventRecord", fork, stream)
    gpu("cuStreamWaitEvent", beside, fork, 0)
    gpu("cuLaunchHostFunc", beside, counter, where)
    gpu("cuEventRecord", joined, beside)
    gpu("cuStreamWaitEvent", stream, joined, 0)
    graph = capture(gpu, stream)
    gpu("cuCtxSynchronize")
    assert calls.value == 0
    for turn in (1, 2):
        gpu("cuGraphLaunch", graph, stream)
        gpu("cuStreamSynchronize", stream)
        assert calls.value == 2 * turn
    assert gpu.code("cuEventQuery", joined) == CAPTURED


def work_that_nobody_has_joined_spoils_a_capture(gpu: Gpu) -> None:
    stream, beside, fork, graph = gpu.stream(), gpu.stream(), gpu.event(), ctypes.c_uint64()
    gpu("cuStreamBeginCapture", stream, GLOBAL)
    gpu("cuEventRecord", fork, stream)
    gpu("cuStreamWaitEvent", beside, fork, 0)
    gpu("cuLaunchHostFunc", beside, nothing, None)
    assert gpu.code("cuStreamEndCapture", stream, ctypes.byref(graph)) == UNJOINED


def a_question_spoils_a_capture_unless_its_thread_is_relaxed(gpu: Gpu) -> None:
    stream, event, graph = gpu.stream(), gpu.event(), ctypes.c_uint64()
    mode = ctypes.c_int(RELAXED)
    gpu("cuStreamBeginCapture", stream, GLOBAL)
    gpu("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    assert gpu.code("cuEventQuery", event) == 0
    gpu("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    assert gpu.code("cuEventQuery", event) == UNSUPPORTED
    assert gpu.code("cuStreamEndCapture", stream, ctypes.byref(graph)) == INVALIDATED
    assert gpu.code("cuEventQuery", event) == 0, "it is over"


# Kernels


TWIN = ctypes.CFUNCTYPE(None, *[ctypes.POINTER(ctypes.c_uint)] * 2, ctypes.POINTER(ctypes.c_void_p))


@TWIN
def add(grid: Any, block: Any, args: Any) -> None:
    """Add the amount to x[i], for each thread of the launch."""
    address = ctypes.c_uint64.from_address(args[0]).value
    amount = ctypes.c_int.from_address(args[1]).value
    for i in range(grid[0] * block[0]):
        ctypes.c_int.from_address(address + 4 * i).value += amount


def a_kernel_is_its_twin_on_the_stream(gpu: Gpu) -> None:
    sizes = (ctypes.c_uint * 2)(8, 4)
    found = build()
    assert found is not None
    register = ctypes.CDLL(str(found.cuda)).cuemuRegisterKernel
    assert register(b"add", add, 2, sizes) == 0
    module = gpu.out("cuModuleLoadData", b"ptx")
    kernel = gpu.out("cuModuleGetFunction", module, b"_Z3addPii")
    unknown = gpu.out("cuModuleGetFunction", module, b"_Z3subPii")
    stream, x = gpu.stream(), np.arange(6, dtype=np.int32)
    at, amount = ctypes.c_uint64(gpu.put(x)), ctypes.c_int(10)
    where = ctypes.addressof(at), ctypes.addressof(amount)
    shape = 2, 1, 1, 3, 1, 1, 0
    hold = Hold(gpu, stream)
    gpu("cuLaunchKernel", kernel, *shape, stream, (ctypes.c_void_p * 2)(*where), None)
    amount.value = 99  # the launch has copied its arguments
    hold.release()
    gpu("cuStreamSynchronize", stream)
    assert (gpu.get(at.value, x) == x + 10).all()
    launch = "cuLaunchKernel", unknown, *shape, stream, (ctypes.c_void_p * 2)(*where), None
    assert gpu.code(*launch) == NOT_SUPPORTED


CHECKS: list[Check] = [
    streams_run_beside_each_other_and_beside_the_caller,
    an_event_orders_streams,
    a_wait_is_for_the_record_before_it,
    the_default_stream_waits_for_blocking_streams,
    the_default_stream_passes_other_streams,
    a_destroyed_stream_runs_to_its_end,
    the_time_between_events_is_that_of_the_stream,
    pinned_memory_is_read_when_the_stream_comes_there,
    memory_outside_an_allocation_is_refused,
    a_pointer_knows_where_it_is,
    a_capture_runs_nothing_and_its_graph_runs_it_again_and_again,
    work_that_nobody_has_joined_spoils_a_capture,
    a_question_spoils_a_capture_unless_its_thread_is_relaxed,
    a_kernel_is_its_twin_on_the_stream,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_emulator_behaves_like_a_driver(process: Ranks, check: Check) -> None:
    process.run(run, [check])


# Tests that need separate processes


def read_device_memory(group: ProcessGroup) -> int:
    gpu = Gpu()
    x = np.arange(4)
    at = gpu.put(x)
    assert (gpu.get(at, x) == x).all()
    return ctypes.c_int.from_address(at).value


def test_guarded_device_memory_is_out_of_the_cpus_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NC10D_EMULATED_GUARD", "1")
    with (
        Ranks(1, "processes", "fake") as one,
        pytest.raises(RuntimeError, match="the process ended with code -11"),
    ):
        one.run(read_device_memory)
