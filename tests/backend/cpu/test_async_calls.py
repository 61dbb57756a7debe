"""Asynchronous prepared calls: those that end at once, those in flight, and posted receives."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from on_ranks import on_ranks

import nc10d as dist
from nc10d import ops
from nc10d.backend.cpu.native import entry_points
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.works import CompletedCall, PreparedWork
from nc10d.observe import FlightRecorder
from nc10d.ops import Recv
from nc10d.testing import run_ranks

Call = Callable[[Any], Any]
CALLS: dict[str, Call] = {
    "all_reduce": lambda group: group.all_reduce(np.ones(3), async_op=True),
    "broadcast": lambda group: group.broadcast(np.ones(3), 0, async_op=True),
    "all_gather": lambda group: group.all_gather([np.ones(3)], np.ones(3), async_op=True),
    "scatter": lambda group: group.scatter(np.ones(3), [np.ones(3)], 0, async_op=True),
}


def ended_at_once(group: Any, name: str) -> CompletedCall:
    """Return the Work of a prepared call that has ended as it was launched."""
    CALLS[name](group).wait()  # prepares the call
    for _ in range(100):  # the worker may hold the channel for a moment
        work = CALLS[name](group)
        assert work.wait()
        if type(work) is CompletedCall:
            return work
    raise AssertionError("no call has ended at once")


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_ends_at_once_has_a_work_like_any_other(name: str) -> None:
    def ended(group: Any) -> Any:
        work = ended_at_once(group, name)
        assert work.is_success()
        assert work.exception() is None
        assert work.duration is not None
        return work.result()

    (result,) = run_ranks(ended, 1)
    assert np.array_equal(np.asarray(result).reshape(-1, 3), np.ones((1, 3)))


def test_a_call_that_ends_at_once_leaves_nothing_in_flight() -> None:
    def left(group: Any) -> int:
        ended_at_once(group, "all_reduce")
        return len(group.backend("cpu").group.channel.in_flight)

    assert run_ranks(left, 1) == [0]


@on_ranks(1)
def test_an_array_that_does_not_fit_goes_the_long_way_and_is_checked(world: Any) -> None:
    x = np.ones(3)
    for _ in range(3):
        world.all_reduce(x, async_op=True).wait()
    x.flags.writeable = False
    with pytest.raises((TypeError, ValueError)):
        world.all_reduce(x, async_op=True)
    world.all_reduce(np.ones(3), async_op=True).wait()


def test_callbacks_of_calls_in_flight_run_once_and_not_in_the_thread_that_waits() -> None:
    def called(group: Any) -> list[bool]:
        x, threads = np.ones(1 << 17), []
        for _ in range(2):
            group.recv(x, 1, 7) if group.rank == 0 else group.send(x, 0, 7)
        for turn in range(20):
            if group.rank == 1:
                group.barrier()
                group.send(x, 0, 7)
                continue
            work, over = group.irecv(x, 1, 7), threading.Event()
            assert type(work) is PreparedWork

            def note(_: Any, over: threading.Event = over) -> None:
                threads.append(threading.get_ident())
                over.set()

            work.add_done_callback(note)
            group.barrier()
            work.wait()
            assert over.wait(10)
            assert len(threads) == turn + 1
        return [thread != threading.get_ident() for thread in threads]

    assert run_ranks(called, 2)[0] == [True] * 20


def prepared_receive(group: Any) -> tuple[Any, Any, Any]:
    """Return a prepared receive from rank 1, its inbox, and what its Works wait through."""
    x = np.ones(3)
    for _ in range(2):
        group.send(x, 0) if group.rank else group.recv(x, 1)
    launcher = group.backend("cpu").launcher
    return launcher.latest[Recv].get(1), group.backend("cpu").group.links, launcher.waiter


def test_after_a_wait_the_peer_that_blocks_the_rest_knows_whom_to_ring() -> None:
    # Otherwise the next operation would stand still until the worker looks by itself. The peer's
    # only change of a counter in such a call is the one for which this rank waits.
    count = 30
    checked = [threading.Event() for _ in range(count)]

    def left(group: Any) -> Counter[bool]:
        x = np.ones(3)
        if group.rank == 1:
            for event in checked:
                group.all_reduce(x)
                assert event.wait(20)
            return Counter()
        works = [group.all_reduce(np.ones(3), async_op=True) for _ in range(count)]
        rung: Counter[bool] = Counter()
        channel = group.backend("cpu").group.channel
        for work, event in zip(works, checked, strict=True):
            work.wait()
            free = channel.get(at.C_LOCK) == 0  # else the worker is about to set the bit
            sleepers = channel.get(at.C_BLOCKED_AT) + at.LINE_SLEEPERS
            bit = entry_points.load_word(sleepers) & channel.get(at.C_BELL_BIT)
            if free and work is not works[-1]:
                rung[bit != 0] += 1
            event.set()
        return rung

    assert set(run_ranks(left, 2)[0]) == {True}


def test_after_a_yield_in_vain_launches_do_not_yield_for_a_while() -> None:
    late = threading.Event()
    works: list[Any] = []

    def launched(group: Any) -> bool:
        for _ in range(2):
            group.all_reduce(np.ones(3), async_op=True).wait()
        channel = group.backend("cpu").group.channel
        channel.words[at.C_LAUNCH_YIELDS // 8] = 20  # as where ranks share cores
        if group.rank == 1:
            assert late.wait(20)
            for _ in works:
                group.all_reduce(np.ones(3))
            return True
        # On a busy machine few launches follow each other closely enough to yield.
        kept = False
        while not kept and len(works) < 3000:
            works.append(group.all_reduce(np.ones(3), async_op=True))
            until = channel.get(at.C_YIELD_FROM)
            works.append(group.all_reduce(np.ones(3), async_op=True))
            kept = channel.get(at.C_YIELD_FROM) == until > time.monotonic_ns()
        late.set()
        for work in works:
            work.wait()
        return kept

    assert run_ranks(launched, 2) == [True, True]


def test_no_receive_is_posted_past_the_thread_that_holds_the_unexpected_queue() -> None:
    def posted(group: Any) -> tuple[bool, bool] | None:
        receive, links, waiter = prepared_receive(group)
        if group.rank == 1:
            group.barrier()
            group.send(np.ones(3), 0)
            return None
        x, inbox = np.zeros(3), links.inbox(1)
        with inbox.lock, inbox:
            refused = receive.submit(waiter, x, 0, 10.0) is None
        work = receive.submit(waiter, x, 0, 10.0)
        group.barrier()
        assert work.wait()
        return refused, bool((x == 1).all())

    assert run_ranks(posted, 2)[0] == (True, True)


def test_the_unexpected_queue_is_held_only_after_the_receives_that_are_being_posted() -> None:
    def held(group: Any) -> list[str] | None:
        _, links, _ = prepared_receive(group)
        if group.rank == 1:
            return None
        inbox, log = links.inbox(1), []
        posting = at.C_POSTING // 8
        inbox.channel.words[posting] = 1

        def hold() -> None:
            with inbox.lock, inbox:
                log.append(f"posting {inbox.channel.words[posting]}")

        thread = threading.Thread(target=hold)
        thread.start()
        thread.join(0.2)  # long enough for a thread that does not wait
        log.append("posted")
        inbox.channel.words[posting] = 0
        thread.join()
        return log

    assert run_ranks(held, 2)[0] == ["posted", "posting 0"]


@on_ranks(1)
def test_works_name_the_operations_of_the_caller(world: Any) -> None:
    x = np.ones(3)
    for _ in range(2):
        work = world.all_reduce(x, ops.MAX, async_op=True)
        (op,) = work.ops
        assert (type(op), op.op) == (ops.AllReduce, ops.MAX)
        assert op.x is x
        assert "all_reduce" in repr(work)


def two_at_once(group: Any, both_begun: threading.Event) -> list[tuple[int, int]]:
    """Launch a call on each of two groups; return when each has begun and ended."""
    groups = group, dist.new_group([0, 1])
    calls = [FlightRecorder(each) for each in groups]
    x, y = np.ones(500_000), np.ones(500_000)
    before = [len(recorder.entries()) for recorder in calls]
    if group.rank == 1:
        both_begun.wait()
    works = [each.all_reduce(a, async_op=True) for each, a in zip(groups, (x, y), strict=True)]
    # Only the worker advances them: a thread that waits for a Work would advance only its program.
    while not all(work.is_completed() for work in works):
        if all(len(r.entries()) > n for r, n in zip(calls, before, strict=True)):
            both_begun.set()
    assert (x == 2).all()
    assert (y == 2).all()
    return [(entry.begun, entry.ended) for entry in (r.entries()[-1] for r in calls)]


def test_two_asynchronous_programs_advance_side_by_side() -> None:
    # Rank 1 joins only when rank 0 has begun both: the second did not wait for the first's end.
    both_begun = threading.Event()
    times = run_ranks(two_at_once, 2, "threads", [both_begun, both_begun])[0]
    assert max(begun for begun, _ in times) < min(ended for _, ended in times)


def coalesced(group: Any) -> int:
    """Return how many submissions a batch of 64 operations makes."""
    arrays = [np.full(256, i, np.float32) for i in range(64)]
    channel = group.backend("cpu").group.channel
    before = channel.get(at.C_TAIL)
    with dist.coalescing_manager(group, async_ops=True) as batch:
        for x in arrays:
            group.all_reduce(x)
    batch.wait()
    assert all((x == 2 * i).all() for i, x in enumerate(arrays))
    return int(channel.get(at.C_TAIL)) - before


def test_sixty_four_coalesced_operations_are_one_submission() -> None:
    assert run_ranks(coalesced, 2) == [1, 1]
