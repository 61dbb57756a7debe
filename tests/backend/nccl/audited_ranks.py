"""Laws of hang, leak and order that a GPU shows first, for tests and tools/gpu_check.py.

NCCL's kernels wait on the device for their peers; streams share hardware queues; an end of a
communicator waits for the device, for graphs and for the node. Each law bounds the host's wait, so
that a fault is a failure and not a hang. The group's store, never time, orders the ranks.
"""

from __future__ import annotations

import functools
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import pytest
from device_ranks import LONG, after, device, full, once, ones, used, value

import nc10d as dist
from nc10d import cuda
from nc10d.backend.nccl.comm.options import NcclOptions
from nc10d.cuda.driver import call, driver
from nc10d.errors import Aborted
from nc10d.group.process_group import ProcessGroup

SOON = 15.0
"""Seconds after which a host thread must be free again: an abort and an end are bounded."""
COUNTS = 2, 8, 16, 40
"""How many messages each of two ranks receives before the other sends."""
CONNECTIONS = 8, 32
"""Hardware queues (CUDA_DEVICE_MAX_CONNECTIONS); the driver's default is 8."""
ROUNDS, MOST_ALIVE = 100, 16


class Waits(Protocol):
    """A Work."""

    def wait_blocking(self, timeout: float | None = None) -> bool: ...


@contextmanager
def soon(what: str) -> Iterator[None]:
    """Fail if the block takes long."""
    begin = time.monotonic()
    yield
    spent = time.monotonic() - begin
    assert spent < SOON, f"{what} took {spent:.1f} s"


# Messages


def both_receive_first(group: ProcessGroup, count: int, tags: int = 1) -> None:
    """Each rank posts its receives and then its sends; `tags`: how many tags the messages have."""
    peer = 1 - group.rank
    got = [full(group, -1.0) for _ in range(count)]
    works = [group.irecv(x, peer, tag=index % tags) for index, x in enumerate(got)]
    works += [
        group.isend(full(group, float(index)), peer, tag=index % tags) for index in range(count)
    ]
    for work in works:
        assert work.wait_blocking(LONG)
    assert [value(x) for x in got] == list(range(count))


def messages() -> dict[str, Callable[[ProcessGroup], None]]:
    """Return a law for each number of messages, with one tag and with a tag for each."""
    laws = {
        f"{count} messages, received first": functools.partial(both_receive_first, count=count)
        for count in COUNTS
    }
    return laws | {
        f"{count} tags, received first": functools.partial(
            both_receive_first, count=count, tags=count
        )
        for count in COUNTS
    }


# Aborts


def rank_0_aborts(
    group: ProcessGroup, mine: Sequence[ProcessGroup], launch: Callable[[], list[Waits]]
) -> None:
    """Rank 0 launches what waits for rank 1 in vain, and aborts groups; all ranks destroy them."""
    if group.rank == 0:
        works = launch()
        with soon("an abort"):
            for each in mine:
                each.abort("enough")
        for work in works:
            with soon("an operation's end"), pytest.raises(Aborted, match="enough"):
                work.wait_blocking(LONG)
        once(group, "ended")
    after(group, "ended")
    for each in mine:
        close_soon(each)


def an_abort_ends_a_stuck_communicator(group: ProcessGroup) -> None:
    mine = used(group)
    rank_0_aborts(group, [mine], lambda: [mine.all_reduce(ones(mine), async_op=True)])


def an_abort_ends_two_stuck_communicators(group: ProcessGroup) -> None:
    """A message has its own communicator."""
    mine = used(group)
    pair(mine)
    rank_0_aborts(
        group,
        [mine],
        lambda: [mine.all_reduce(ones(mine), async_op=True), mine.irecv(ones(mine), 1)],
    )


def an_abort_ends_two_stuck_groups(group: ProcessGroup) -> None:
    """Aborted one after the other: freeing the first waits for kernels of the second."""
    both = [used(group), used(group)]
    rank_0_aborts(
        group, both, lambda: [mine.all_reduce(ones(mine), async_op=True) for mine in both]
    )


def an_abort_with_a_live_graph_ends(group: ProcessGroup) -> None:
    """NCCL keeps a communicator while a graph has its launches; the group ends all the same."""
    mine = used(group)
    x, stream = ones(mine), cuda.Stream(device(mine))
    relaxed = driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    with cuda.on_device(device(mine)), cuda.stream(stream):
        call("cuStreamBeginCapture", stream.handle, relaxed)
        mine.all_reduce(x)
        graph = call("cuStreamEndCapture", stream.handle)
        runs = call("cuGraphInstantiate", graph, 0)
        call("cuGraphLaunch", runs, stream.handle)
        stream.synchronize()
    assert value(x) == group.size
    rank_0_aborts(group, [mine], lambda: [mine.all_reduce(x, async_op=True)])
    with cuda.on_device(device(mine)):
        call("cuGraphExecDestroy", runs)
        call("cuGraphDestroy", graph)


def pair(group: ProcessGroup) -> None:
    """Form the communicator of messages from rank 1 to rank 0."""
    x = full(group, 5.0)
    group.recv(x, 1) if group.rank == 0 else group.send(x, 0)
    assert value(x) == 5.0


def close_soon(group: ProcessGroup) -> None:
    with soon("destroying a group"):
        dist.destroy_process_group(group)


# Memory


def memory_of_temporaries_is_bounded(group: ProcessGroup) -> None:
    """Arrays that a caller drops after each reduction are not kept."""
    alive: weakref.WeakSet[cuda.DeviceArray] = weakref.WeakSet()
    most = 0
    for _ in range(ROUNDS):
        x = cuda.to_device(np.ones(1 << 10, np.float32), device(group))
        alive.add(x)
        group.all_reduce(x)
        cuda.synchronize(device(group))
        del x
        most = max(most, len(alive))
    assert most <= MOST_ALIVE, f"{most} arrays were alive at once"


def memory_of_torchs_temporaries_is_bounded(group: ProcessGroup) -> None:
    """The same by torch's own count of its memory."""
    import torch

    nbytes, where = 4 << 20, f"cuda:{device(group)}"
    before = torch.cuda.memory_allocated(where)
    torch.cuda.reset_peak_memory_stats(where)
    for _ in range(ROUNDS):
        x = torch.ones(nbytes // 4, device=where)
        group.all_reduce(x)
        torch.cuda.synchronize(where)
        del x
    most = (torch.cuda.max_memory_allocated(where) - before) / nbytes
    assert most <= MOST_ALIVE, f"{most:.0f} tensors were alive at once"


# Ends


def a_late_peer_does_not_hold_an_end(group: ProcessGroup) -> None:
    """Rank 1 destroys its group after rank 0 has returned; then NCCL lets go on both."""
    mine = used(group)
    backend: Any = mine.backend("cuda")
    comm = backend.device_group.comm_streams.find("all").comm
    if group.rank == 1:
        after(group, "returned")
    close_soon(mine)
    if group.rank == 0:
        once(group, "returned")
    waits = time.monotonic() + SOON
    while comm.alive and time.monotonic() < waits:
        threading.Event().wait(0.01)
    assert not comm.alive, "NCCL has not let go"
    once(group, f"let-go-{group.rank}")
    for rank in range(group.size):
        after(group, f"let-go-{rank}")


# Times


def durations_need_no_torch(group: ProcessGroup) -> None:
    """torch makes a context current in each thread that uses it; here nobody does."""
    assert "torch" not in sys.modules, "torch has been imported"
    options = NcclOptions(timing=True)
    mine = dist.new_group(range(group.size), backend="nccl", pg_options=options)
    assert isinstance(mine, ProcessGroup)
    found = list[float | None]()

    def measure() -> None:
        work = mine.all_reduce(ones(mine), async_op=True)
        work.wait_blocking(LONG)
        found.append(work.duration)

    other = threading.Thread(target=measure)
    for run in (measure, other.start, other.join, measure):
        run()
    assert len(found) == 3
    assert all(each is not None and 0 < each < LONG for each in found), found
    assert mine.all_reduce(ones(mine), async_op=True).wait(LONG)
    dist.destroy_process_group(mine)


ABORTS = [
    an_abort_ends_a_stuck_communicator,
    an_abort_ends_two_stuck_communicators,
    an_abort_ends_two_stuck_groups,
    an_abort_with_a_live_graph_ends,
]
ENDS = [a_late_peer_does_not_hold_an_end]
MEMORY = [memory_of_temporaries_is_bounded]
TIMES = [durations_need_no_torch]
