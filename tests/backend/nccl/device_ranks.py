"""Laws of collectives on devices, used by the tests beside this file and by tools/gpu_check.py.

Rank r uses device r; ranks share devices where there are fewer. Every rank runs each function with
its group; a broken law raises AssertionError. The group's store, never time, orders the ranks.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import nc10d as dist
from nc10d import cuda
from nc10d.arrays.dtypes import DType
from nc10d.backend.nccl.bindings import native
from nc10d.backend.nccl.bindings.library import library
from nc10d.backend.nccl.comm.comm_meeting import wait_for_ranks
from nc10d.backend.nccl.comm.communicator import Communicator
from nc10d.base.deadline import Deadline
from nc10d.cuda.driver import address, call, driver
from nc10d.errors import (
    Aborted,
    CollectiveTimeout,
    DistError,
    GroupClosed,
    NCCLError,
    PeerLost,
    RendezvousError,
)
from nc10d.group.process_group import ProcessGroup
from nc10d.ops import AVG, MAX, SUM, premul_sum
from nc10d.store import PrefixStore

LONG = 30.0


def afresh(group: ProcessGroup, law: Callable[[ProcessGroup], None]) -> None:
    """Run a law in a new group, which the law may fail."""
    mine = dist.new_group(range(group.size))
    assert isinstance(mine, ProcessGroup)
    law(mine)
    dist.destroy_process_group(mine)


def device(group: ProcessGroup) -> int:
    return group.rank % cuda.device_count()


def ones(group: ProcessGroup, count: int = 100) -> cuda.DeviceArray:
    return cuda.to_device(np.ones(count, np.float32), device(group))


def full(group: ProcessGroup, value: float, count: int = 100) -> cuda.DeviceArray:
    return cuda.to_device(np.full(count, value, np.float32), device(group))


def value(x: cuda.DeviceArray) -> float:
    """Synchronize the device, and return the value that all elements share."""
    cuda.synchronize(x.device)
    found = set(cuda.to_host(x).tolist())
    assert len(found) == 1, found
    return float(found.pop())


def used(group: ProcessGroup) -> ProcessGroup:
    """Return a new group that a law may end: formed on all ranks, with nothing in flight."""
    made = dist.new_group(range(group.size))
    assert isinstance(made, ProcessGroup)
    x = ones(group)
    made.all_reduce(x)
    assert value(x) == group.size
    group.barrier()
    return made


def once(group: ProcessGroup, name: str) -> None:
    """Notify the other ranks that this rank has reached the point `name`."""
    group.store.set(f"test/{name}", "")


def after(group: ProcessGroup, name: str) -> None:
    """Wait until a rank has reached the point `name`."""
    group.store.wait([f"test/{name}"], LONG)


def be_a_host_of_ones_own(group: ProcessGroup) -> None:
    """Present ranks to NCCL as ranks of different hosts, so that they may share a device."""
    os.environ.setdefault("NCCL_HOSTID", f"rank-{group.rank}")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def waiting_does_not_block_the_host(group: ProcessGroup) -> None:
    """Rank 1 enters the call only after rank 0 has returned from wait()."""
    x = ones(group)
    group.all_reduce(x)
    if group.rank == 1:
        after(group, "waited")
    work = group.all_reduce(x, async_op=True)
    if group.rank == 0:
        assert not work.is_completed()
        assert work.wait() is True
        assert not work.is_completed()
        once(group, "waited")
    work.wait_blocking()
    assert work.is_success()
    assert value(x) == 4.0


def waiting_with_a_timeout_blocks_and_fails_in_the_caller_alone(group: ProcessGroup) -> None:
    x = ones(group)
    group.all_reduce(x)
    if group.rank == 1:
        after(group, "gave up")
    work = group.all_reduce(x, async_op=True)
    if group.rank == 0:
        with pytest.raises(CollectiveTimeout, match=r"all_reduce: .* goes on"):
            work.wait(0.05)
        once(group, "gave up")
    assert work.wait(LONG) is True
    assert work.is_completed()
    assert value(x) == 4.0


def the_current_stream_comes_first(group: ProcessGroup) -> None:
    """Work queued earlier on the current stream is done when the collective reads the array."""
    gate, new, x = ones(group), full(group, 7.0), full(group, 1.0)
    group.all_reduce(gate)
    if group.rank == 1:
        after(group, "queued")
    mine = cuda.Stream(device(group))
    with cuda.on_device(device(group)):
        opens = group.all_reduce(gate, async_op=True)
        opens.join(mine)
        call("cuMemcpyDtoDAsync", x.address, new.address, x.nbytes, mine.handle)
        with cuda.stream(mine):
            work = group.all_reduce(x, async_op=True)
        once(group, "queued")
    work.wait_blocking()
    assert value(x) == 14.0


def the_current_stream_goes_on_behind(group: ProcessGroup) -> None:
    """A copy queued after a call, or after block_current_stream(), copies the result."""
    x, copies = ones(group), [full(group, 0.0) for _ in range(2)]
    group.all_reduce(x)
    if group.rank == 1:
        after(group, "copied")
    mine = cuda.Stream(device(group))
    with cuda.stream(mine), cuda.on_device(device(group)):
        group.all_reduce(x)
        call("cuMemcpyDtoDAsync", copies[0].address, x.address, x.nbytes, mine.handle)
        group.all_reduce(x, async_op=True).block_current_stream()
        call("cuMemcpyDtoDAsync", copies[1].address, x.address, x.nbytes, mine.handle)
    if group.rank == 0:
        once(group, "copied")
    mine.synchronize()
    assert [value(copy) for copy in copies] == [4.0, 8.0]


def a_block_means_its_calls_in_order(group: ProcessGroup) -> None:
    x, y = full(group, 1.0), full(group, float(group.rank))
    for _ in range(3):
        x.fill_from(np.ones(100, np.float32))
        y.fill_from(np.full(100, float(group.rank), np.float32))
        with group.coalescing_manager():
            group.all_reduce(x)
            group.all_reduce(x)
            group.broadcast(y, 1)
            group.all_reduce(y)
        assert (value(x), value(y)) == (group.size**2, group.size)


def messages_and_collectives_of_a_block_keep_their_order(group: ProcessGroup) -> None:
    """Each rank sends the result of a collective of the same block."""
    x, got = full(group, 1.0), full(group, 0.0)
    following, previous = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    for turn in range(1, 4):
        with group.coalescing_manager():
            group.all_reduce(x)
            group.isend(x, following)
            group.irecv(got, previous)
            group.all_reduce(got)
        assert value(x) == group.size**turn
        assert value(got) == group.size ** (turn + 1)


def the_same_arrays_again_are_the_same_call(group: ProcessGroup) -> None:
    a, b = ones(group), ones(group)
    for turn in range(1, 5):
        with group.coalescing_manager():
            group.all_reduce(a)
            group.all_reduce(b)
        assert (value(a), value(b)) == (group.size**turn, group.size**turn)


def a_block_with_another_array_in_its_middle_is_another(group: ProcessGroup) -> None:
    ends, middles = (ones(group), ones(group)), (ones(group), ones(group))
    group.all_reduce(ends[0])
    for turn in range(6):
        with group.coalescing_manager():
            for x in (ends[0], middles[turn % 2], ends[1]):
                group.all_reduce(x)
    assert [value(x) for x in middles] == [group.size**3] * 2


def gathers_and_scatters_may_be_ragged(group: ProcessGroup) -> None:
    """In a block, rank 1 first gathers parts and then scatters them."""
    root, mine = group.rank == 1, full(group, float(group.rank + 1), 10 * group.rank + 3)
    parts = [full(group, -1.0, 10 * rank + 3) for rank in range(group.size)] if root else None
    for _ in range(2):
        with group.coalescing_manager():
            group.gather(mine, parts, dst=1)
            group.all_reduce(mine[:3])
            group.scatter(mine, parts, src=1)
        assert value(mine) == group.rank + 1
        assert not root or [value(x) for x in parts or ()] == [1.0, 2.0]


def equal_parts_come_and_go_in_one_array(group: ProcessGroup) -> None:
    """NCCL's own gather and scatter give the same results as messages."""
    root, mine = group.rank == 1, full(group, float(group.rank + 1), 10)
    whole = cuda.zeros((5, 2 * group.size), device=device(group)) if root else None
    for _ in range(2):
        with group.coalescing_manager():
            group.gather_single(mine, whole, dst=1)
            group.all_reduce(mine)
            group.scatter_single(mine, whole, src=1)
        assert value(mine) == group.rank + 1
        assert not root or cuda.to_host(whole).ravel().tolist() == [1.0] * 10 + [2.0] * 10


class Moving:
    """A user's array object whose memory changes."""

    def __init__(self, memory: cuda.DeviceArray) -> None:
        self.memory = memory

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.memory.__cuda_array_interface__


def an_array_that_has_moved_is_looked_up_again(group: ProcessGroup) -> None:
    first, second = ones(group), ones(group, 7)
    x = Moving(first)
    group.all_reduce(x)
    group.all_reduce(x)
    x.memory = second
    group.all_reduce(x)
    assert (value(first), value(second)) == (group.size**2, group.size)


def an_array_of_another_type_is_looked_up_again(group: ProcessGroup) -> None:
    """The object, address and size stay the same; the element type changes."""
    floats = ones(group, 8)
    ints = cuda.DeviceArray(floats.address, (8,), DType.INT32, floats.device, floats)
    x = Moving(floats)
    for turn in (1, 2):  # the first call forms the group and is not cached
        group.all_reduce(x)
        assert value(floats) == group.size**turn
    ints.fill_from(np.full(8, 2**24 + 1, np.int32))
    x.memory = ints
    group.all_reduce(x)
    assert value(ints) == group.size * (2**24 + 1)


def an_array_in_the_place_of_a_freed_one_is_another(group: ProcessGroup) -> None:
    """The id, the key of a cached block, is the same; the memory is not."""
    first, second, other = full(group, 1.0), full(group, 1.0), ones(group)
    group.all_reduce(other)
    seen = set()
    for choice in np.random.default_rng(0).integers(2, size=60):
        memory = (first, second)[choice]
        memory.fill_from(np.ones(100, np.float32))
        x = cuda.DeviceArray(memory.address, (100,), memory.dtype, memory.device, memory)
        with group.coalescing_manager(async_ops=True) as block:
            group.all_reduce(x)
            group.all_reduce(other)
        block.works[0].wait_blocking()
        assert value(memory) == group.size
        seen.add((id(x), memory.address))
        del x, block
    assert len({place for place, _ in seen}) < len(seen), "no id has come again"


def a_block_is_its_calls(group: ProcessGroup) -> None:
    """A block equals its single calls, also if only its first calls are uniform."""
    ops = [(SUM, SUM, SUM), (MAX, MAX, MAX), (SUM, MAX, SUM), (AVG, AVG, premul_sum(0.5))]
    for how in ops:
        for counts in ((8, 8, 8), (8, 0, 3), (1, 2, 4000)):
            alone, together = _pairs(group, counts)
            for x, op in zip(alone, how, strict=True):
                group.all_reduce(x, op)
            with group.coalescing_manager():
                for x, op in zip(together, how, strict=True):
                    group.all_reduce(x, op)
                if counts[0] > 1:
                    group.broadcast(together[0], 0)
            cuda.synchronize(device(group))
            for x, y in zip(alone, together, strict=True):
                assert x.to_host().tobytes() == y.to_host().tobytes()


def _pairs(group: ProcessGroup, counts: tuple[int, ...]) -> tuple[list[Any], list[Any]]:
    """Return two sets of arrays with the same values."""
    values = [np.arange(n, dtype=np.float32) + group.rank for n in counts]
    alone, together = ([cuda.to_device(x, device(group)) for x in values] for _ in range(2))
    return alone, together


def a_plan_is_launched_again_and_again(group: ProcessGroup) -> None:
    a, b = ones(group), ones(group)
    with group.coalescing_manager() as block:
        group.all_reduce(a)
        group.all_reduce(b)
    plan = block.plan()
    for _ in range(3):
        plan.launch()
    assert value(a) == value(b) == group.size**4


def operations_in_flight_keep_their_arrays(group: ProcessGroup) -> None:
    """The operation alone keeps its arrays alive until it is over."""
    keep = ones(group)
    group.all_reduce(keep)
    if group.rank == 1:
        after(group, "dropped")
    for _ in range(5):
        group.all_reduce(ones(group, 5000), async_op=True)
    work = group.all_reduce(keep, async_op=True)
    gc.collect()
    once(group, "dropped")
    work.wait_blocking()
    assert value(keep) == group.size**2


def callbacks_and_await_come_when_it_is_over(group: ProcessGroup) -> None:
    x = ones(group)
    work = group.all_reduce(x, async_op=True)
    then = work.get_future().then(lambda done: cuda.to_host(done.value()[0])[0])
    assert then.wait(LONG) == group.size

    async def waits() -> bool:
        return await group.all_reduce(x, async_op=True)

    assert asyncio.run(waits()) is True
    assert value(x) == group.size**2


def both_kinds_of_arrays_in_one_group(group: ProcessGroup) -> None:
    x, y = ones(group), np.ones(10)
    group.all_reduce(x)
    group.all_reduce(y)
    group.barrier()
    assert (value(x), y[0]) == (group.size, group.size)
    assert dist.get_backend_config(group) == "cpu:cpu,cuda:nccl"
    with pytest.raises(ValueError, match="one kind of device"):
        _all_of(group, x, y)


def _all_of(group: ProcessGroup, *arrays: Any) -> None:
    with group.coalescing_manager():
        for x in arrays:
            group.all_reduce(x)


def mistakes_raise_before_anything_is_sent(group: ProcessGroup) -> None:
    x = ones(group, 8)
    group.all_reduce(x)
    if cuda.device_count() > 1:
        elsewhere = cuda.to_device(np.ones(3), (device(group) + 1) % cuda.device_count())
        with pytest.raises(ValueError, match=r"is on cuda:\d, got an array on cuda"):
            group.all_reduce(elsewhere)
        with pytest.raises(ValueError, match=r"is on cuda:\d, got an array on cuda"):
            _all_of(group, x, elsewhere, x)
    shorts = cuda.to_device(np.ones(3, np.int16), device(group))
    with pytest.raises(TypeError, match="NCCL has no SUM of int16"):
        _all_of(group, x, shorts, x)
    with pytest.raises(ValueError, match="must have 16 elements"):
        group.all_gather_into_tensor(x, ones(group, 8))
    group.all_reduce(x)
    assert value(x) == group.size**2


class Strided:
    """A strided part of an array."""

    def __init__(
        self, whole: cuda.DeviceArray, shape: tuple[int, ...], strides: tuple[int, ...], at: int = 0
    ) -> None:
        interface = whole.__cuda_array_interface__
        given = {"shape": shape, "strides": strides, "data": (whole.address + at, False)}
        self.__cuda_array_interface__ = {**interface, **given}


def strided_arrays_are_what_they_are_elsewhere(group: ProcessGroup) -> None:
    """Rank 1 reduces a transpose of rank 0's array; only rank 0's columns share an array.

    A block mixes the arrays; it runs three times.
    """
    mine = np.arange(12, dtype=np.float32).reshape(3, 4) * (group.rank + 1)
    x = cuda.to_device(np.ascontiguousarray(mine.T if group.rank else mine), device(group))
    seen = Strided(x, (3, 4), (4, 12)) if group.rank else x
    pair = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
    apart = [cuda.to_device(np.ascontiguousarray(pair[:, k]), device(group)) for k in (0, 1)]
    both = cuda.to_device(pair, device(group))
    columns = apart if group.rank else [Strided(both, (3,), (8,), 4 * k) for k in (0, 1)]
    expected = np.arange(12, dtype=np.float32).reshape(3, 4)
    for turn in range(1, 4):
        with group.coalescing_manager():
            group.all_reduce(seen)
            for column in columns:
                group.all_reduce(column)
            group.all_reduce(seen)
        cuda.synchronize(device(group))
        found = cuda.to_host(x)
        right = expected * 3 * 2 ** (2 * turn - 1)
        assert np.array_equal(found.T if group.rank else found, right)
        if not group.rank:
            assert np.array_equal(cuda.to_host(both), pair * 2**turn)


def a_transposed_matrix_is_copied_by_a_kernel_each_way(group: ProcessGroup) -> None:
    side = 4096
    mine = np.arange(side * side, dtype=np.float32).reshape(side, side) % 97
    x = cuda.to_device(np.ascontiguousarray(mine.T) if group.rank else mine, device(group))
    seen = Strided(x, (side, side), (4, 4 * side)) if group.rank else x
    work: Any = group.all_reduce(seen, async_op=True)
    work.wait_blocking()
    assert kernels_in(work.cached.table) == 2 * bool(group.rank)
    found = cuda.to_host(x)
    assert np.array_equal(found.T if group.rank else found, mine * group.size)


def kernels_in(table: Any) -> int:
    """Return how many kernels of nc10d a launch has."""
    return list(table._rows[:: native.WORDS]).count(address("cuLaunchKernelEx"))


def a_graph_repeats_its_collectives(group: ProcessGroup) -> None:
    x, y = ones(group), ones(group)
    group.all_reduce(x)
    mine = cuda.Stream(device(group))
    relaxed = driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    with cuda.on_device(device(group)), cuda.stream(mine):
        call("cuStreamBeginCapture", mine.handle, relaxed)
        group.all_reduce(x)
        with group.coalescing_manager(async_ops=True) as block:
            group.all_reduce(y)
            group.all_reduce(x)
        for work in block.works:
            work.wait()
        graph = call("cuStreamEndCapture", mine.handle)
        assert (value(x), value(y)) == (2.0, 1.0), "capturing runs nothing"
        runs = call("cuGraphInstantiate", graph, 0)
        for _ in range(3):
            call("cuGraphLaunch", runs, mine.handle)
    mine.synchronize()
    assert (value(x), value(y)) == (2.0**7, 2.0**3)
    group.all_reduce(y)  # outside of the graph, a call works as before
    assert value(y) == 2.0**4


def durations_are_measured_by_the_device(group: ProcessGroup) -> None:
    """The emulator delays each all_reduce by 50 ms; its stream has the highest priority."""
    work = group.all_reduce(ones(group), async_op=True)
    work.wait_blocking()
    assert work.duration is not None
    assert 0.05 <= work.duration < LONG
    with cuda.on_device(device(group)):
        _, highest = call("cuCtxGetStreamPriorityRange")
        backend: Any = group.backend("cuda")
        stream = backend.device_group.comm_streams.find("all").stream
        assert call("cuStreamGetPriority", stream) == highest


def a_late_rank_is_a_timeout_for_all(group: ProcessGroup) -> None:
    x = ones(group)
    group.all_reduce(x)
    if group.rank == 0:
        work = group.all_reduce(x, async_op=True, timeout=0.3)
        expected = (
            r"all_reduce #2 .* at .*device_ranks.py:.* on rank 0 after .*, waiting for rank 1"
        )
        with pytest.raises(CollectiveTimeout, match=expected) as caught:
            work.wait_blocking()
        assert (caught.value.rank, caught.value.op) == (1, "all_reduce")
        assert "rank 0 #2 all_reduce(dtype=float32, count=100, op=SUM)" in str(caught.value)
        assert caught.value.last == {0: 2, 1: 1}
        once(group, "failed")
    else:
        after(group, "failed")
        with pytest.raises(CollectiveTimeout, match=r"all_reduce #2 .* on rank 0"):
            _reduce_and_wait(group, x)  # enters after the other rank has left


def a_stuck_collective_is_ended_by_an_abort(group: ProcessGroup) -> None:
    """The emulator's third all_reduce never completes."""
    x = ones(group)
    group.all_reduce(x)
    group.all_reduce(x)
    work = group.all_reduce(x, async_op=True)
    if group.rank == group.size - 1:
        group.abort("enough")
    with pytest.raises(Aborted, match="enough"):
        work.wait_blocking()
    with pytest.raises(Aborted, match="enough"):
        group.all_reduce(x)
    group.close()
    group.close()


def an_asynchronous_error_reaches_everybody(group: ProcessGroup) -> None:
    """The emulator reports an error on rank 0 after its second all_reduce."""
    x = ones(group)
    group.all_reduce(x)
    with pytest.raises(NCCLError, match="remote"):
        _reduce_and_wait(group, x)


def _reduce_and_wait(group: ProcessGroup, x: cuda.DeviceArray, note: str = "") -> None:
    work = group.all_reduce(x, async_op=True)
    if note:
        once(group, note)
    work.wait_blocking()


def _reduce_twice(group: ProcessGroup, x: cuda.DeviceArray) -> None:
    # The first may still meet a peer's call that was launched before the peer aborted.
    for _ in range(2):
        _reduce_and_wait(group, x)


def a_refused_call_names_its_operation_and_ends_its_group(group: ProcessGroup) -> None:
    """The emulator refuses each rank's second broadcast, inside a block."""
    x, y = ones(group), ones(group)
    whole = dist.new_group(range(group.size))
    whole.all_reduce(x)
    group.all_reduce(x)
    with pytest.raises(NCCLError, match=r"a batch of 3, operation 2: broadcast: .*") as caught:
        _batch(group, x, y)
    assert caught.value.code == 3
    with pytest.raises(DistError):
        group.all_reduce(x)
    whole.all_reduce(y)  # begins only if NCCL's group is closed
    assert value(y) == group.size


def _batch(group: ProcessGroup, x: cuda.DeviceArray, y: cuda.DeviceArray) -> None:
    with group.coalescing_manager():
        group.all_reduce(x)
        group.broadcast(y, 0)
        group.broadcast(cuda.to_device(np.ones(3), device(group)), 0)


def a_missing_rank_is_named(group: ProcessGroup) -> None:
    if group.rank == 0:
        # The wait for the communicator's ranks and the watchdog have one deadline. Whichever sees
        # the deadline first, the error names the late rank.
        texts = {
            RendezvousError: ": rank 1 did not come",
            CollectiveTimeout: ", waiting for rank 1",
        }
        with pytest.raises((*texts,), match="timed out") as raised:
            group.all_reduce(ones(group), timeout=0.3)
        assert texts[type(raised.value)] in str(raised.value)


def a_group_with_a_device_is_bound_to_it_at_once(group: ProcessGroup) -> None:
    """Ranks form the group in new_group; no call has launched anything before."""
    mine = dist.new_group(range(group.size), device_id=f"cuda:{device(group)}")
    assert isinstance(mine, ProcessGroup)
    if cuda.device_count() > 1:
        elsewhere = cuda.to_device(np.ones(3), (device(group) + 1) % cuda.device_count())
        with pytest.raises(ValueError, match="got an array on cuda"):
            mine.all_reduce(elsewhere)
    x = ones(group)
    mine.all_reduce(x)
    assert value(x) == group.size
    dist.destroy_process_group(mine)


def groups_of_groups_end_alone(group: ProcessGroup) -> None:
    """An aborted child fails on all its ranks; its parent and its own child go on."""
    child = group.split_group([[0, 1]])
    assert child is not None
    grandchild = child.split_group([[0, 1]])
    assert grandchild is not None
    arrays = [ones(group) for _ in range(3)]
    for one, x in zip((group, child, grandchild), arrays, strict=True):
        one.all_reduce(x)
    if child.rank == 0:
        work = child.all_reduce(arrays[1], async_op=True)
        child.abort("enough")
        with pytest.raises(Aborted, match="enough"):
            work.wait_blocking()
        once(group, "aborted")
    else:
        after(group, "aborted")
        with pytest.raises(Aborted, match="enough"):
            _reduce_twice(child, arrays[1])
    grandchild.all_reduce(arrays[2])
    group.all_reduce(arrays[0])
    assert (value(arrays[0]), value(arrays[2])) == (4.0, 4.0)
    for one in (grandchild, child):
        one.close()


def communicator(group: ProcessGroup, name: str) -> Communicator:
    """Create a communicator of all ranks, without a backend."""
    deadline, keys = Deadline.after(LONG), PrefixStore(name, group.store)
    nccl, mine = library(), device(group)
    unique = wait_for_ranks(keys, nccl, name, group.rank, group.size, deadline, lambda: None)
    return Communicator.create(
        nccl, unique, group.rank, group.size, deadline, lambda: cuda.on_device(mine)
    )


def communicators_end_once(group: ProcessGroup) -> None:
    whole = communicator(group, "whole")
    whole.close()
    whole.close()
    with pytest.raises(GroupClosed):
        whole.async_error()
    whole.abort()


def memory_is_registered_until_it_is_closed(group: ProcessGroup) -> None:
    whole, x = communicator(group, "registers"), ones(group, 4096)
    first = whole.register(x.address, x.nbytes)
    assert first.handle
    for _ in range(2):
        first.close()
        assert first.handle is None
    late = whole.register(x.address, x.nbytes)
    whole.abort()
    late.close()  # already closed by the abort of its communicator


def a_death_ends_work_on_devices(group: ProcessGroup, folder: str) -> None:
    """Each survivor learns which rank died, and goes on; files record each error and its time.

    Rank 0 waits. With three ranks, rank 2 calls after another rank has received its error.
    """
    x = ones(group)
    group.all_reduce(x)
    group.barrier()
    if group.rank == 1:
        if group.size > 2:
            after(group, "launched")
        Path(folder, "killed").write_text(str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    if group.rank == 2:
        after(group, "told")
    with pytest.raises(PeerLost) as caught:
        _reduce_and_wait(group, x, "launched")
    Path(folder, f"told-{group.rank}").write_text(str(time.monotonic()))
    once(group, "told")
    assert caught.value.rank == 1
    assert caught.value.cause == "killed by signal 9"
    Path(folder, f"words-{group.rank}").write_text(str(caught.value))
    left = dist.shrink_group()
    y = ones(left)
    left.all_reduce(y)
    assert value(y) == group.size - 1


def an_abort_reaches_work_on_devices_that_it_has_not_used(group: ProcessGroup) -> None:
    """Rank 1 aborts without having used a device."""
    if group.rank == 1:
        after(group, "launched")
        group.abort("enough")
        return
    work = group.all_reduce(ones(group), async_op=True)
    once(group, "launched")
    with pytest.raises(Aborted, match="enough"):
        work.wait()


def a_collective_that_one_rank_never_enters_is_ended_by_an_abort(group: ProcessGroup) -> None:
    x = ones(group)
    group.all_reduce(x)
    if group.rank == 1:
        after(group, "launched")
        group.abort("enough")
        return
    work = group.all_reduce(x, async_op=True)
    once(group, "launched")
    with pytest.raises(Aborted, match="enough"):
        work.wait_blocking()
