"""The engine's trace: two programs advance side by side, and a batch is a single submission."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

import nc10d as dist
from nc10d.backend.cpu.native.offsets import TRACE_DONE, TRACE_START
from nc10d.testing import run_ranks


def two_at_once(group: Any, both_begun: threading.Event) -> list[tuple[int, int]]:
    other = dist.new_group([0, 1])
    host = group.backend("cpu").group.context
    x, y = np.ones(500_000), np.ones(500_000)
    group.barrier()
    if group.rank == 1:
        both_begun.wait()
    buffer = host.channels.start_trace()
    works = [group.all_reduce(x, async_op=True), other.all_reduce(y, async_op=True)]
    # Only the worker advances them: a thread that waits for a Work would advance only its program.
    while not all(work.is_completed() for work in works):
        if np.count_nonzero(buffer[:, 2] == TRACE_START) == 2:
            both_begun.set()
    rows = buffer[: host.channels.stop_trace()]
    assert (x == 2).all()
    assert (y == 2).all()
    return [(int(row[1]), int(row[2])) for row in rows]


def test_two_asynchronous_programs_advance_side_by_side() -> None:
    # Rank 1 joins only when rank 0 has begun both: the second did not wait for the first's end.
    both_begun = threading.Event()
    events = run_ranks(two_at_once, 2, "threads", [both_begun, both_begun])[0]
    channels = {channel for channel, _ in events}
    assert len(channels) == 2
    starts = [events.index((c, TRACE_START)) for c in channels]
    ends = [events.index((c, TRACE_DONE)) for c in channels]
    assert max(starts) < min(ends)


def coalesced(group: Any) -> list[tuple[int, int]]:
    arrays = [np.full(256, i, np.float32) for i in range(64)]
    host = group.backend("cpu").group.context
    group.barrier()
    buffer = host.channels.start_trace()
    with dist.coalescing_manager(group, async_ops=True) as batch:
        for x in arrays:
            group.all_reduce(x)
    batch.wait()
    rows = buffer[: host.channels.stop_trace()]
    assert all((x == 2 * i).all() for i, x in enumerate(arrays))
    return [(int(row[2]), int(row[3])) for row in rows]


def test_sixty_four_coalesced_operations_are_one_descriptor() -> None:
    for events in run_ranks(coalesced, 2):
        assert [event for event, _ in events if event != 2] == [TRACE_START, TRACE_DONE]
        assert len({descriptor for _, descriptor in events}) == 1
