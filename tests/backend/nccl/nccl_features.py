"""Laws of NCCL beyond collectives, for tests and tools/gpu_check.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from device_ranks import after, device, full, once, ones, value

import nc10d as dist
from nc10d import cuda, nccl
from nc10d.cuda.driver import call
from nc10d.errors import RendezvousError, UnsupportedPlatform
from nc10d.group.process_group import ProcessGroup

COUNT = 64


def bound(group: ProcessGroup) -> ProcessGroup:
    """Return the group after its first call, which has chosen each rank's device."""
    group.all_reduce(ones(group))
    return group


def a_suspended_group_refuses_calls_until_it_is_resumed(group: ProcessGroup) -> None:
    """Messages' communicators are suspended with it; arrays and streams stay."""
    x, got = ones(group), full(group, 0.0)
    group.all_reduce(x)
    if group.size > 1:
        group.isend(x, (group.rank + 1) % group.size)
        group.recv(got, (group.rank - 1) % group.size)
    before = nccl.memory_stats(group)
    assert before.suspendable > 0
    assert before.total == before.suspendable + before.persistent
    assert not before.suspended
    for _ in range(2):
        nccl.suspend(group)
        assert nccl.memory_stats(group).suspended
        for refused in (lambda: group.all_reduce(x), lambda: nccl.suspend(group)):
            with pytest.raises(ValueError, match="is suspended: resume it first"):
                refused()
        nccl.resume(group)
        assert not nccl.memory_stats(group).suspended
        group.all_reduce(x)
    with pytest.raises(ValueError, match="is not suspended"):
        nccl.resume(group)
    assert value(x) == group.size**3
    if group.size > 1:
        group.isend(x, (group.rank + 1) % group.size)
        group.recv(got, (group.rank - 1) % group.size)
        assert value(got) == group.size**3


def suspending_waits_for_work_in_flight(group: ProcessGroup) -> None:
    x, mine = ones(group), cuda.Stream(device(group))
    group.all_reduce(x)
    with cuda.on_device(device(group)), cuda.stream(mine):
        for _ in range(3):
            group.all_reduce(x, async_op=True)
        nccl.suspend(group)
        nccl.resume(group)
    assert value(x) == group.size**4


def a_rank_that_does_not_suspend_is_named(group: ProcessGroup) -> None:
    x = ones(group)
    group.all_reduce(x)
    limit = group.timeout
    if group.rank == 0:
        dist.set_timeout(0.5, group)
        with pytest.raises(RendezvousError, match=r"rank 1 did not come to .*suspending"):
            nccl.suspend(group)
        dist.set_timeout(limit, group)
        once(group, "gave up")
    else:
        after(group, "gave up")
    group.all_reduce(x)  # rank 0 goes on
    assert value(x) == group.size**2


def a_put_is_there_after_its_signal(group: ProcessGroup) -> None:
    """Every rank writes its part into every rank's window; two rounds use the same signals."""
    window = nccl.window(COUNT * (group.size + 1), np.float32, bound(group))
    mine = window.array[COUNT * group.size :]
    with cuda.on_device(device(group)):
        for turn in range(1, 3):
            mine.fill_from(np.full(COUNT, 10.0 * turn + group.rank, np.float32))
            for peer in range(group.size):
                window.put(mine, peer, COUNT * group.rank)
            window.wait_signal(*range(group.size))
            for peer in range(group.size):
                assert value(window.array[COUNT * peer : COUNT * (peer + 1)]) == 10.0 * turn + peer
            group.barrier()
    window.close()
    window.close()
    with pytest.raises(ValueError, match="has been closed"):
        window.put(mine, 0)


def a_stream_waits_for_a_signal_and_the_host_does_not(group: ProcessGroup) -> None:
    """The stream that waits for a signal holds up no collective."""
    if group.size == 1:  # its put would come behind its own wait
        return
    window, mine = nccl.window(COUNT, np.float32, bound(group)), cuda.Stream(device(group))
    last, copied, x = group.size - 1, full(group, 0.0, COUNT), ones(group)
    with cuda.on_device(device(group)):
        if group.rank == last:
            with cuda.stream(mine):
                window.wait_signal(0, count=2)
                queued = copied.address, window.array.address, copied.nbytes, mine.handle
                call("cuMemcpyDtoDAsync", *queued)
        group.all_reduce(x)
        assert value(x) == group.size
        if group.rank == 0:
            window.array.fill_from(np.full(COUNT, 7.0, np.float32))
            window.put(window.array, last)
            window.signal(last)
        if group.rank == last:
            mine.synchronize()
            assert value(copied) == 7.0
    cuda.synchronize(device(group))
    window.close()


def a_wrong_put_is_refused_before_anything_is_queued(group: ProcessGroup) -> None:
    window = nccl.window(8, np.float32, bound(group))
    wrong: list[tuple[tuple[Any, ...], str]] = [
        ((ones(group, 4), 0), "must be a contiguous part of the window's own array"),
        ((window.array, 0, 1), "8 elements of float32 from 1 on are not in 8 of float32"),
        ((window.array, 0, -1), "are not in"),
        ((window.array, group.size), "expected a rank of"),
    ]
    for arguments, text in wrong:
        with pytest.raises(ValueError, match=text):
            window.put(*arguments)
    with pytest.raises(ValueError, match="expected peers and a positive count"):
        window.wait_signal()
    with pytest.raises(ValueError, match="expected peers and a positive count"):
        window.wait_signal(0, count=0)
    window.put(window.array[:0], 0)  # nothing to put: no signal
    window.close()


def symmetric_memory_is_reduced_like_other(group: ProcessGroup) -> None:
    make = nccl.symmetric_zeros(bound(group))
    x, y = make(COUNT, np.float32), make(3, np.int32)
    x.fill_from(np.full(COUNT, 1.0, np.float32))
    group.all_reduce(x)
    group.all_reduce(y)
    assert (value(x), value(y)) == (group.size, 0)


def an_estimate_launches_nothing(group: ProcessGroup) -> None:
    x, y = ones(group), ones(group, 5000)
    with nccl.time_estimate(bound(group)) as estimate:
        work = group.all_reduce(x, async_op=True)
        group.all_reduce(y)
        group.broadcast(y, 0)
    assert estimate.seconds > 0
    assert work is not None
    with pytest.raises(RuntimeError, match="was estimated, not launched"):
        work.wait()
    with nccl.time_estimate(group) as nothing:
        pass
    assert nothing.seconds == 0
    assert (value(x), value(y)) == (1.0, 1.0)
    if group.size > 1:
        with (
            pytest.raises(ValueError, match="send: NCCL estimates collectives, not messages"),
            nccl.time_estimate(group),
        ):
            group.isend(x, (group.rank + 1) % group.size)
    group.all_reduce(x)
    assert value(x) == group.size


def groups_have_options_of_their_own(group: ProcessGroup) -> None:
    """`pg_options` of a group: its NCCL options, and times of the device."""
    config = nccl.NCCLConfig(max_ctas=4, comm_name="timed")
    timed = _grouped(group, nccl.NcclOptions(config, timing=True))
    work = timed.all_reduce(x := ones(group), async_op=True)
    assert work is not None
    work.wait_blocking()  # type: ignore[attr-defined]
    assert work.duration is not None
    assert 0 <= work.duration < 10
    group.all_reduce(x)
    assert value(x) == group.size**2
    timed.close()


def _grouped(group: ProcessGroup, options: nccl.NcclOptions) -> ProcessGroup:
    device_id = f"cuda:{device(group)}" if options.timing else None
    ranks = range(group.size)
    made = dist.new_group(ranks, backend="nccl", pg_options=options, device_id=device_id)
    assert isinstance(made, ProcessGroup)
    return made


def a_group_that_not_all_ranks_grow_is_refused_on_all(group: ProcessGroup) -> None:
    """Rank 0 alone names the group of both ranks, which has no new rank either."""
    x = ones(group)
    group.all_reduce(x)
    cuda.synchronize(device(group))
    for options in (nccl.NcclOptions(grow_from=group), None):
        given = options if group.rank == 0 or options is None else None
        made = dist.new_group(range(group.size), backend="nccl", pg_options=given)
        if options is not None:
            with pytest.raises(RendezvousError, match=r"can't grow \(rank 0 was 0 of 2\)"):
                made.all_reduce(x)
        else:
            made.all_reduce(x)
    assert value(x) == group.size**2


def nonblocking_groups_have_no_estimate(group: ProcessGroup) -> None:
    with pytest.raises(ValueError, match="needs blocking communicators"):
        nccl.time_estimate(group)


def a_machine_has_no_windows(group: ProcessGroup) -> None:
    """All ranks raise, and the group goes on."""
    x = ones(group)
    makes = [
        lambda: nccl.window(COUNT, np.float32, bound(group)),
        lambda: nccl.symmetric_zeros(group)(COUNT, np.float32),
    ]
    for make in makes:
        with pytest.raises(UnsupportedPlatform, match="no symmetric memory between these ranks"):
            make()
    group.all_reduce(x)
    assert value(x) == group.size


def _symmetric(group: ProcessGroup) -> cuda.DeviceArray:
    return nccl.symmetric_zeros(group)(COUNT, np.float32)


def _window(group: ProcessGroup) -> None:
    nccl.window(COUNT, np.float32, group).close()


CALLS: dict[tuple[int, int, int], tuple[str, Callable[[ProcessGroup], Any]]] = {
    (2, 22, 0): ("an estimate of times needs NCCL >= 2.22", nccl.time_estimate),
    (2, 27, 0): ("ncclCommWindowRegister needs NCCL >= 2.27", _symmetric),
    (2, 29, 2): ("one-sided communication needs NCCL >= 2.29.2", _window),
    (2, 29, 7): ("ncclCommSuspend needs NCCL >= 2.29.7", nccl.suspend),
}
RELEASES = ["21903", "22809", "22902"]


def functions_of_later_releases_are_refused(group: ProcessGroup) -> None:
    """Each call works from its release on, and is refused before it without an effect."""
    x, (name, version) = ones(bound(group)), nccl.version()
    assert name == "NCCL"
    for since, (text, call_it) in CALLS.items():
        if version < since:
            with pytest.raises(UnsupportedPlatform, match=text):
                call_it(group)
        elif call_it is nccl.suspend:
            nccl.suspend(group)
            nccl.resume(group)
        else:
            call_it(group)
    group.all_reduce(x)
    assert value(x) == 1.0


def a_group_grows(group: ProcessGroup) -> None:
    """All ranks but the last are a group, out of which the whole group's communicator grows."""
    old = dist.new_group(range(group.size - 1), backend="nccl")
    member = isinstance(old, ProcessGroup)
    options = nccl.NcclOptions(grow_from=old) if member else None
    if member:
        x = ones(group)
        old.all_reduce(x)
        assert value(x) == old.size
    whole = dist.new_group(range(group.size), backend="nccl", pg_options=options)
    y = ones(group)
    whole.all_reduce(y)
    assert value(y) == group.size
    if member:
        dist.destroy_process_group(old)
    whole.all_reduce(y)
    assert value(y) == group.size**2


FEATURES = [
    a_suspended_group_refuses_calls_until_it_is_resumed,
    suspending_waits_for_work_in_flight,
    a_put_is_there_after_its_signal,
    a_stream_waits_for_a_signal_and_the_host_does_not,
    a_wrong_put_is_refused_before_anything_is_queued,
    symmetric_memory_is_reduced_like_other,
    an_estimate_launches_nothing,
    groups_have_options_of_their_own,
]
