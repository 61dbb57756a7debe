"""Laws of groups on NCCL that end: stuck communicators, live graphs, ranks that come late."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import threading
import time
from collections.abc import Iterator

import pytest
from device_ranks import LONG, after, device, full, once, ones, used, value

import nc10d as dist
from nc10d import cuda
from nc10d.backend.nccl import backend as nccl_backend
from nc10d.base import wait_report
from nc10d.base.deadline import Deadline
from nc10d.cuda import captured_graphs
from nc10d.cuda.driver import call, driver
from nc10d.errors import Aborted, DistError, GroupClosed, PeerLost, UnsupportedPlatform
from nc10d.group import ending
from nc10d.group.process_group import ProcessGroup
from nc10d.ops import Barrier

SOON = 4.0
"""Seconds: less than the patience after which waiters raise whatever NCCL does."""


def threads_end(*names: str) -> None:
    """Wait until NCCL has let go: its calls run on threads that end then."""
    for thread in threading.enumerate():
        if thread.name.startswith(names):
            while thread.ident is None:  # it is about to start
                pass
            thread.join(LONG)
            assert not thread.is_alive(), thread.name


class _Lines(logging.Handler):
    """Collects warnings as texts."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextlib.contextmanager
def told() -> Iterator[list[str]]:
    """Yield what nc10d warns of meanwhile."""
    handler, logger = _Lines(), logging.getLogger("nc10d")
    logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)


def captured(group: ProcessGroup, x: cuda.DeviceArray, launches: int = 1) -> list[object]:
    """Return a CUDA graph with all_reduces, and its instance."""
    mine = cuda.Stream(device(group))
    mode = driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    with cuda.on_device(device(group)), cuda.stream(mine):
        call("cuStreamBeginCapture", mine.handle, mode)
        for _ in range(launches):
            group.all_reduce(x)
        graph = call("cuStreamEndCapture", mine.handle)
        return [graph, call("cuGraphInstantiate", graph, 0)]


def forget(graphs: list[object]) -> None:
    call("cuGraphDestroy", graphs[0])
    call("cuGraphExecDestroy", graphs[1])


def live_graphs_are_named_and_hold_no_waiter(group: ProcessGroup) -> None:
    """NCCL keeps an aborted communicator until its last graph is gone."""
    mine, x = used(group), ones(group)
    backend = mine.backend("cuda")
    assert isinstance(backend, nccl_backend.NcclBackend)
    graphs = captured(mine, x)
    if group.rank:
        after(group, "aborted")
    else:
        work = mine.all_reduce(x, async_op=True)
        begin = time.monotonic()
        mine.abort("enough")
        with pytest.raises(Aborted, match="enough") as caught:
            work.wait_blocking(LONG)
        assert time.monotonic() - begin < SOON
        (note,) = caught.value.__notes__
        assert "until 1 captured CUDA graph is destroyed" in note
        once(group, "aborted")
    until = Deadline.after(LONG)
    while backend._failure.error is None and not until.expired():
        backend._failure.poll()  # an idle rank does not
    with pytest.raises(DistError, match="enough"):
        mine.all_reduce(x)
    assert backend._failure.over.wait(LONG)
    held = [thread for thread in threading.enumerate() if thread.name == "nc10d-nccl-abort"]
    assert held
    forget(graphs)
    threads_end("nc10d-nccl-abort")
    dist.destroy_process_group(mine)


def destroying_with_live_graphs_does_not_wait(group: ProcessGroup) -> None:
    mine, x = used(group), ones(group)
    graphs = captured(mine, x)
    with told() as lines:
        begin = time.monotonic()
        mine.close()
        assert time.monotonic() - begin < SOON
    assert "until 1 captured CUDA graph is destroyed" in lines[0]
    forget(graphs)
    threads_end("nc10d-nccl-end")


def what_a_graph_uses_goes_with_it(group: ProcessGroup) -> None:
    mine, x = used(group), ones(group)
    backend = mine.backend("cuda")
    assert isinstance(backend, nccl_backend.NcclBackend)
    captured_graphs.sweep()
    started, here = backend.started, len(captured_graphs._graphs)
    for launches in range(1, 3):
        first, second = captured(mine, x, launches), captured(mine, x, launches)
        assert started.graphs_alive == 2
        assert len(captured_graphs._graphs) == here + 2
        forget(first)
        assert started.graphs_alive == 1
        forget(second)
        assert started.graphs_alive == 0
        captured_graphs.sweep()
        assert len(captured_graphs._graphs) == here
    last = captured(mine, x)
    dist.destroy_process_group(mine)
    forget(last)
    deadline = Deadline.after(LONG)
    while len(captured_graphs._graphs) > here:  # the watchdog looks
        assert not deadline.expired()


def ranks_meet_before_a_group_is_destroyed(group: ProcessGroup) -> None:
    """NCCL's destroy waits for the other ranks of a node."""
    mine = used(group)
    if group.rank:
        after(group, "waits")
        mine.close()
    else:
        ends = threading.Thread(target=mine.close)
        with told() as lines:
            ends.start()
            once(group, "waits")
            ends.join(LONG)
        assert not lines
    threads_end("nc10d-nccl-end")


def a_late_rank_is_named_and_waited_for_in_the_background(group: ProcessGroup) -> None:
    mine = used(group)
    if group.rank:
        after(group, "left")
    else:
        with pytest.MonkeyPatch.context() as patch, told() as lines:
            patch.setattr(ending, "CLOSE_PATIENCE", 0.5)
            patch.setattr(wait_report, "FIRST_SECONDS", 0.1)
            mine.close()
        assert f"rank 1 did not destroy group {mine.name!r}" in lines[0]
        assert f"group {mine.name!r} keeps its communicators" in lines[-1]
        once(group, "left")
    mine.close()
    threads_end("nc10d-nccl-end")


def a_rank_with_work_in_flight_holds_no_other_up(group: ProcessGroup) -> None:
    """It aborts, and says so to ranks whose work has ended."""
    mine = used(group)
    if group.rank:
        work = mine.irecv(full(group, 0.0), 0)
        mine.close()
        with pytest.raises(GroupClosed):
            work.wait_blocking()
    else:
        with told() as lines:
            mine.close()
        assert not lines
    threads_end("nc10d-nccl-end")


def groups_end_in_any_order(group: ProcessGroup) -> None:
    """A dropped group ends with the default group: on some ranks after groups that were kept."""
    first, second = used(group), used(group)
    made = [used(group) for _ in range(3)]
    if group.rank:
        del first
        made.reverse()
    else:
        del second
    begin = time.monotonic()
    with told() as lines:
        for mine in made:
            dist.destroy_process_group(mine)
        dist.destroy_process_group()
    assert not lines
    assert time.monotonic() - begin < SOON


def a_graph_that_runs_ends_with_its_group(group: ProcessGroup) -> None:
    """A rank that only replays learns that a peer has aborted."""
    mine, x = used(group), ones(group)
    graphs, stream = captured(mine, x), cuda.Stream(device(group))
    with told() as lines:
        if group.rank:
            after(group, "replays")
            mine.abort("enough")
        else:
            with cuda.on_device(device(group)):
                call("cuGraphLaunch", graphs[1], stream.handle)
            once(group, "replays")
            stream.synchronize()
        forget(graphs)
        dist.destroy_process_group(mine)
    assert len(lines) == (not group.rank), lines
    assert all("no call has raised this error" in line for line in lines)


def an_error_that_no_call_has_raised_is_logged(group: ProcessGroup) -> None:
    """A program that only synchronizes the device would go on with old data unknowingly."""
    mine, x = used(group), ones(group)
    with told() as lines:
        if not group.rank:
            mine.all_reduce(x, timeout=0.3)
            cuda.synchronize(device(group))
            once(group, "timed out")
        else:
            after(group, "timed out")
        dist.destroy_process_group(mine)
    assert any("no call has raised this error" in line for line in lines) == (not group.rank), lines


def a_rank_that_leaves_ends_what_waits_for_it(group: ProcessGroup) -> None:
    mine, begin = used(group), time.monotonic()
    if not group.rank:
        expected = r"rank 1 has left group .*, but rank 0 still waits for it in all_reduce #2"
        with pytest.raises(PeerLost, match=expected) as caught:
            mine.all_reduce(ones(group), async_op=True).wait_blocking(LONG)
        assert caught.value.rank == 1
    mine.close()
    assert time.monotonic() - begin < SOON, "the rank that leaves waits for one that has failed"


def what_leaving_cuts_off_counts_for_nothing(group: ProcessGroup) -> None:
    mine, x = used(group), ones(group)
    if not group.rank:
        mine.all_reduce(x, async_op=True)
        mine.close()
        once(group, "cut off")
    else:
        after(group, "cut off")
        with pytest.raises(PeerLost, match=r"rank 0 has left .* waits for it in all_reduce"):
            mine.all_reduce(x, async_op=True).wait_blocking(LONG)
        mine.close()


def a_first_call_is_not_captured(group: ProcessGroup) -> None:
    mine, x, stream = dist.new_group(), ones(group), cuda.Stream(device(group))
    assert isinstance(mine, ProcessGroup)
    mode = driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    with cuda.on_device(device(group)), cuda.stream(stream):
        call("cuStreamBeginCapture", stream.handle, mode)
        with pytest.raises(ValueError, match="communicate once before capturing a graph"):
            mine.all_reduce(x)
        call("cuGraphDestroy", call("cuStreamEndCapture", stream.handle))
        mine.all_reduce(x)
    assert value(x) == group.size
    dist.destroy_process_group(mine)


def who_aborts_knows_why(group: ProcessGroup) -> None:
    mine = used(group)
    work = mine.irecv(full(group, 0.0), 0) if group.rank else None
    with told() as lines:
        if work is not None:
            mine.abort("enough")
        dist.destroy_process_group(mine)
    assert not lines


def a_forked_child_leaves_its_parents_groups_and_devices_alone(group: ProcessGroup) -> None:
    mine = used(group)
    if group.rank:
        after(group, "forked")
        dist.destroy_process_group(mine)
        return
    dist.destroy_process_group(mine)
    kept = [cuda.Stream(device(group)), ones(group)]
    kept.append(kept)  # a cycle: a collection in the child frees both
    del kept
    child = os.fork()
    if not child:
        status = 1
        try:
            gc.collect()
            with pytest.raises(
                UnsupportedPlatform, match="which was forked from one that had used"
            ):
                ones(group)
            begin = time.monotonic()
            dist.init_process_group("fake", rank=0, world_size=1)
            dist.destroy_process_group()
            status = 0 if time.monotonic() - begin < SOON else 2
        finally:
            os._exit(status)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    once(group, "forked")
    assert code == 0, code


def a_barrier_is_not_captured(group: ProcessGroup) -> None:
    mine, stream = used(group), cuda.Stream(device(group))
    mode = driver().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    with cuda.on_device(device(group)), cuda.stream(stream):
        call("cuStreamBeginCapture", stream.handle, mode)
        with pytest.raises(ValueError, match="a captured call can't make the host wait"):
            mine.backend("cuda").launch((Barrier(),), LONG, async_op=False)
        call("cuGraphDestroy", call("cuStreamEndCapture", stream.handle))
    dist.destroy_process_group(mine)


ENDINGS = [
    a_rank_that_leaves_ends_what_waits_for_it,
    what_leaving_cuts_off_counts_for_nothing,
    a_first_call_is_not_captured,
    an_error_that_no_call_has_raised_is_logged,
    who_aborts_knows_why,
    a_forked_child_leaves_its_parents_groups_and_devices_alone,
    a_barrier_is_not_captured,
    a_graph_that_runs_ends_with_its_group,
    live_graphs_are_named_and_hold_no_waiter,
    destroying_with_live_graphs_does_not_wait,
    what_a_graph_uses_goes_with_it,
    ranks_meet_before_a_group_is_destroyed,
    a_late_rank_is_named_and_waited_for_in_the_background,
    a_rank_with_work_in_flight_holds_no_other_up,
]
