"""The staged backend over the emulated driver: the contract of every backend, and stream order.

Ranks are threads of a child process, which loads the emulator; the CPU can't access device memory
there. A stream is blocked by a wait for a word in pinned memory.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from emulated import emulated_ranks

import nc10d as dist
from nc10d import cuda
from nc10d.arrays.dtypes import DType
from nc10d.backend.staged.backend import StagedOptions
from nc10d.backend.staged.pinned import pinned_pool
from nc10d.cuda.driver import call
from nc10d.errors import Aborted, CollectiveTimeout, DistError, GroupClosed, UnsupportedPlatform
from nc10d.group.process_group import ProcessGroup
from nc10d.testing import Ranks, check_backend

SIZE = 3
FEW = (DType.FLOAT32, DType.INT8, DType.BFLOAT16, DType.COMPLEX128, DType.BOOL)
Check = Callable[[ProcessGroup], None]


@pytest.fixture(scope="module")
def process() -> Iterator[Ranks]:
    """Start a process with the emulated driver and a single GPU; ranks are threads in it."""
    variables = {"NC10D_EMULATED_GUARD": "1", "NC10D_EMULATED_GPUS": "1"}
    with emulated_ranks(1, "fake", 300.0, **variables) as found:
        yield found


# The contract of every backend


def conformance(group: ProcessGroup, sizes: tuple[int, ...], labels: tuple[str, ...]) -> int:
    from mirrored import make

    return check_backend(make, sizes, "threads", dtypes=[DType[label] for label in labels])


def test_the_staged_backend_conforms(process: Ranks) -> None:
    labels = tuple(dtype.name for dtype in FEW)
    assert process.run(conformance, [(2, 3, 4)], [labels])[0] > 150


def test_the_staged_backend_conforms_with_ranks_as_processes(process: Ranks) -> None:
    from mirrored import make

    assert check_backend(make, (2,), "processes", dtypes=[DType.FLOAT32], timeout=60.0) > 30


@pytest.mark.long
def test_the_staged_backend_conforms_for_every_type_and_more_ranks(process: Ranks) -> None:
    labels = tuple(dtype.name for dtype in DType)
    assert process.run(conformance, [(1, 2, 3, 4)], [labels])[0] > 350


# Order on streams


class Hold:
    """Blocks a stream until `release`."""

    def __init__(self, stream: int) -> None:
        address = int(call("cuMemHostAlloc", 4, 0))
        self.word = ctypes.c_uint32.from_address(address)
        self.word.value = 0
        call("cuStreamWaitValue32", stream, address, 1, 0)

    def release(self) -> None:
        self.word.value = 1


_kept: list[cuda.DeviceArray] = []


def filled(value: float, count: int = 5) -> cuda.DeviceArray:
    """Return an array that is never freed: freeing it would wait for blocked streams."""
    _kept.append(cuda.to_device(np.full(count, value), 0))
    return _kept[-1]


def set_later(x: cuda.DeviceArray, value: float, stream: int) -> None:
    """Queue an assignment to all elements."""
    address = int(call("cuMemHostAlloc", x.nbytes, 0))
    (ctypes.c_double * len(x)).from_address(address)[:] = [value] * len(x)
    call("cuMemcpyHtoDAsync", x.address, address, x.nbytes, stream)


def read_on(x: cuda.DeviceArray, stream: int) -> Any:
    """Queue a copy to the host, wait for that stream, and return the copy."""
    address = int(call("cuMemHostAlloc", x.nbytes, 0))
    call("cuMemcpyDtoHAsync", address, x.address, x.nbytes, stream)
    call("cuStreamSynchronize", stream)
    return (ctypes.c_double * len(x)).from_address(address)[:]


def operations_begin_behind_the_current_stream(group: ProcessGroup) -> None:
    x, mine = filled(0.0), cuda.Stream(0)
    hold = Hold(mine.handle) if group.rank == 0 else None
    set_later(x, group.rank + 1.0, mine.handle)
    with cuda.stream(mine):
        work = group.all_reduce(x, async_op=True)
    assert work is not None
    if hold is not None:
        assert not work.is_completed(), "the array is not there yet, and the call has returned"
        hold.release()
    work.wait(20)
    assert (x.to_host() == 6.0).all()


def wait_orders_the_current_stream_and_no_other(group: ProcessGroup) -> None:
    x, mine = filled(group.rank + 1.0), cuda.Stream(0)
    with cuda.stream(mine):
        group.all_reduce(x)
        assert read_on(x, mine.handle) == [6.0] * 5
        work = group.broadcast(x, 1, async_op=True)
        assert work is not None
        hold = Hold(mine.handle)
        work.wait()
        assert call("cuStreamQuery", cuda.Stream(0).handle) is None
        hold.release()
        assert read_on(x, mine.handle) == [6.0] * 5


def launches_that_share_memory_keep_their_order(group: ProcessGroup) -> None:
    """No rank waits between the launches, and the first array is computed late."""
    x, y, mine = filled(0.0), filled(0.0), cuda.Stream(0)
    hold = Hold(mine.handle)
    set_later(x, 1.0, mine.handle)
    with cuda.stream(mine):
        works = [group.all_reduce(x, async_op=True) for _ in range(3)]
        works.append(group.all_gather_into_tensor(filled(0.0, 15), x, async_op=True))
        works.append(group.reduce(y, 0, async_op=True))
    hold.release()
    for work in works:
        assert work is not None
        work.wait(20)
    assert (x.to_host() == 27.0).all()


def a_blocking_call_goes_behind_what_is_on_its_way(group: ProcessGroup) -> None:
    """Only on rank 0, the first call is blocked until the second call has been launched."""
    x, y, mine = filled(1.0), filled(float(group.rank)), cuda.Stream(0)
    hold, launching = Hold(mine.handle), threading.Event()

    def release() -> None:
        launching.wait(20)
        hold.release()

    helper = threading.Thread(target=release)
    helper.start()
    if group.rank:
        launching.set()
    with cuda.stream(mine):
        first = group.all_reduce(x, async_op=True)
    unobserve = group.observe(lambda *_: launching.set())
    group.broadcast(y, 2)
    unobserve()
    helper.join()
    assert first is not None
    first.wait(20)
    assert ((x.to_host() == 3.0) & (y.to_host() == 2.0)).all()


def messages_overtake(group: ProcessGroup) -> None:
    """A receive without a matching send blocks neither later messages nor collectives."""
    x, y = filled(0.0), filled(float(group.rank))
    coming = group.irecv(x, (group.rank - 1) % SIZE, tag=7)
    group.all_reduce(y)
    group.send(y, (group.rank + 1) % SIZE, tag=7)
    assert coming is not None
    coming.wait(20)
    assert coming.result() == (group.rank - 1) % SIZE
    assert (x.to_host() == 3.0).all()


def host_memory_is_used_again(group: ProcessGroup) -> None:
    x, pool = filled(0.0), pinned_pool(0)
    group.all_reduce(x)
    group.barrier()
    made = pool.made
    group.barrier()
    for _ in range(50):
        group.all_reduce(x)
    assert pool.made - made <= 2 * SIZE, "a launch or two may be on their way up"


# Failures


def raised(kind: type[Exception], action: Callable[[], object]) -> str:
    with pytest.raises(kind) as caught:
        action()
    return str(caught.value)


def another(group: ProcessGroup, timeout: float = 20.0) -> ProcessGroup:
    """Make a new group, which the check may break."""
    made = dist.new_group(range(group.size), timeout)
    assert isinstance(made, ProcessGroup)
    made.barrier()
    return made


def a_failed_operation_writes_nothing(group: ProcessGroup) -> None:
    sub, x = another(group), filled(7.0)
    count = 4 if group.rank == 2 else 5
    text = raised(DistError, lambda: sub.all_reduce(x[:count]))
    assert "all_reduce" in text
    assert (x.to_host() == 7.0).all()
    assert raised(DistError, lambda: sub.all_reduce(x)), "the group has failed"


def an_array_that_is_never_computed_is_a_timeout_on_every_rank(group: ProcessGroup) -> None:
    sub, x, mine = another(group, 0.3), filled(1.0), cuda.Stream(0)
    hold = Hold(mine.handle)
    with cuda.stream(mine if group.rank == 1 else cuda.Stream(0)):
        raised(CollectiveTimeout, lambda: sub.all_reduce(x))
    hold.release()
    cuda.synchronize(0)


def an_abort_ends_what_waits_for_the_device(group: ProcessGroup) -> None:
    sub, x, mine = another(group), filled(1.0), cuda.Stream(0)
    hold = Hold(mine.handle)
    with cuda.stream(mine):
        work = sub.all_reduce(x, async_op=True)
    assert work is not None
    if group.rank == 0:
        sub.abort("enough")
    hold.release()
    assert "enough" in raised(Aborted, lambda: work.wait(20))


def closing_does_not_wait_for_a_stream(group: ProcessGroup) -> None:
    sub, x, mine = another(group), filled(1.0), cuda.Stream(0)
    hold = Hold(mine.handle)
    with cuda.stream(mine):
        work = sub.all_reduce(x, async_op=True)
    assert work is not None
    before = time.monotonic()
    sub.close()
    assert time.monotonic() - before < 15, "it waited for the stream"
    raised(DistError, work.wait)
    hold.release()
    raised(GroupClosed, lambda: sub.all_reduce(x))


def a_capture_is_refused(group: ProcessGroup) -> None:
    from nc10d.cuda.driver import driver

    x, mine = filled(1.0), cuda.Stream(0)
    mode = driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    call("cuStreamBeginCapture", mine.handle, mode)
    with cuda.stream(mine):
        assert "graph" in raised(UnsupportedPlatform, lambda: group.all_reduce(x))
    call("cuStreamEndCapture", mine.handle)
    group.all_reduce(x)


def a_launch_beside_a_blocking_streams_capture_is_refused(group: ProcessGroup) -> None:
    """The default stream takes no work meanwhile; the refusal leaves the capture valid."""
    from nc10d.cuda.driver import driver

    x, first = filled(1.0), group.rank == 0
    group.barrier()
    with cuda.on_device(0):
        blocking = call("cuStreamCreate", 0) if first else None
    if first:
        mode = driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        call("cuStreamBeginCapture", blocking, mode)
    group.barrier()
    assert "graph" in raised(UnsupportedPlatform, lambda: group.all_reduce(x))
    group.barrier()
    if first:
        call("cuStreamEndCapture", blocking)
    group.barrier()
    group.all_reduce(x)


def mistakes_are_found_at_the_call(group: ProcessGroup) -> None:
    x = filled(1.0)
    raised(
        TypeError, lambda: group.all_reduce(cuda.to_device(np.ones(2, bool), 0), dist.ReduceOp.AVG)
    )
    raised(ValueError, lambda: group.broadcast(x, SIZE))
    raised(ValueError, lambda: group.all_gather_into_tensor(x, x))
    group.all_reduce(x)
    assert (x.to_host() == SIZE).all()


# Names, options, sub-groups


def gloo_takes_arrays_of_both_kinds(group: ProcessGroup) -> None:
    assert group.backend_name == "gloo"
    x, host = filled(1.0), np.ones(4)
    works = [group.all_reduce(host, async_op=True), group.all_reduce(x, async_op=True)]
    works.append(group.all_reduce(host, async_op=True))
    for work in works:
        assert work is not None
        work.wait(20)
    assert (host == 9.0).all()
    assert (x.to_host() == 3.0).all()


def a_sub_group_is_staged_too(group: ProcessGroup) -> None:
    pair = dist.new_group([0, 2])
    x = filled(group.rank + 1.0)
    if isinstance(pair, ProcessGroup) and group.rank != 1:
        pair.all_reduce(x)
    assert (x.to_host() == (2.0 if group.rank == 1 else 4.0)).all()


def the_inner_backend_is_an_option(group: ProcessGroup) -> None:
    fake = dist.new_group(range(SIZE), backend="cuda:staged", pg_options=StagedOptions("fake"))
    assert isinstance(fake, ProcessGroup)
    x = filled(2.0)
    fake.all_reduce(x)
    assert (x.to_host() == 2.0).all(), "the fake moves nothing"
    refused = StagedOptions("nccl")
    bad = dist.new_group(range(SIZE), backend="cuda:staged", pg_options=refused)
    assert isinstance(bad, ProcessGroup)
    raised(ValueError, lambda: bad.all_reduce(x))


CHECKS: list[Check] = [
    operations_begin_behind_the_current_stream,
    wait_orders_the_current_stream_and_no_other,
    launches_that_share_memory_keep_their_order,
    a_blocking_call_goes_behind_what_is_on_its_way,
    messages_overtake,
    host_memory_is_used_again,
    a_failed_operation_writes_nothing,
    an_array_that_is_never_computed_is_a_timeout_on_every_rank,
    an_abort_ends_what_waits_for_the_device,
    closing_does_not_wait_for_a_stream,
    a_capture_is_refused,
    a_launch_beside_a_blocking_streams_capture_is_refused,
    mistakes_are_found_at_the_call,
    gloo_takes_arrays_of_both_kinds,
    a_sub_group_is_staged_too,
    the_inner_backend_is_an_option,
]


def on_ranks(group: ProcessGroup, check: Check) -> None:
    """Run a check on ranks that are threads and share the single GPU.

    Arrays of earlier checks are freed first: freeing them later would wait for blocked streams.
    """
    gc.collect()
    with Ranks(SIZE, "threads", "gloo", timeout=20.0) as ranks:
        ranks.run(with_device, [check] * SIZE)


def with_device(group: ProcessGroup, check: Check) -> None:
    with cuda.on_device(0):
        check(group)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_on_one_gpu(process: Ranks, check: Check) -> None:
    process.run(on_ranks, [check])
