"""The MPI backend orders blocks, and handles mismatches, deadlines, departures and callbacks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mpi_launchers import LIBRARIES
from overlapping_blocks import CALLS, Call, early, every_way, shares_alone
from polled_laws import (
    SIZE,
    calls_differ,
    every_fact_is_compared,
    raised,
    sizes_differ,
    whole_group,
)

import nc10d as dist
from nc10d.errors import (
    CollectiveMismatch,
    CollectiveTimeout,
    PeerLost,
    RendezvousError,
    UnsupportedPlatform,
)
from nc10d.group.process_group import ProcessGroup
from nc10d.ops import AllReduce
from nc10d.testing import Ranks


@pytest.fixture(scope="module", params=LIBRARIES)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with request.param.ranks(SIZE, "mpi", 20.0) as found:
        yield found


# Blocks


@settings(max_examples=12, deadline=None)
@example([("message", 0, 0), ("sum", 0, 0)], "i4", "C")
@given(CALLS, st.sampled_from(["i4", "f8", "u1"]), st.sampled_from("CF"))
def test_a_block_is_its_calls_in_order(
    ranks: Ranks, calls: list[Call], dtype: str, order: str
) -> None:
    ranks.run(every_way, [calls] * SIZE, [dtype] * SIZE, [order] * SIZE)


def test_a_rank_with_overlapping_arrays_orders_the_block_for_all_ranks(ranks: Ranks) -> None:
    ranks.run(shares_alone)


@pytest.mark.parametrize("src", [1, None])
def test_an_early_message_waits_for_its_turn(ranks: Ranks, src: int | None) -> None:
    ranks.run(early, [src] * SIZE)


# Mismatching calls


def test_different_calls_are_an_error_everywhere_and_touch_nothing(ranks: Ranks) -> None:
    one, *others = ranks.run(calls_differ)
    assert others == [one] * 2
    assert "broadcast(dtype=float64, count=5, root=1) on rank 0" in one
    assert "all_reduce(dtype=float64, count=5, op=SUM) on ranks 1, 2" in one


def test_each_fact_of_a_call_is_compared(ranks: Ranks) -> None:
    ranks.run(every_fact_is_compared)


def test_sizes_that_only_two_ranks_know_are_compared_too(ranks: Ranks) -> None:
    texts = ranks.run(sizes_differ)
    assert all("all_to_all: rank 2 expects other sizes" in text for text in texts)


def wrong_length(group: ProcessGroup, sent: int, taken: int) -> None:
    sub = whole_group(group)
    if group.rank == 0:
        sub.isend(np.ones(sent), 1)
    if group.rank == 1:
        raised(CollectiveMismatch, lambda: sub.recv(np.ones(taken), 0))
    if group.rank == 2:
        raised(CollectiveMismatch, lambda: sub.recv(np.ones(1), 0))
    group.barrier()


@pytest.mark.parametrize(("sent", "taken"), [(5, 3), (3, 5)])
def test_a_message_of_another_length_is_an_error(ranks: Ranks, sent: int, taken: int) -> None:
    ranks.run(wrong_length, [sent] * SIZE, [taken] * SIZE)


# Deadlines and departures


def a_rank_is_late(group: ProcessGroup) -> str:
    sub = whole_group(group)
    sub.set_timeout(0.2)
    call = lambda: sub.all_reduce(np.ones(3))  # noqa: E731
    if group.rank < 2:
        text = raised(CollectiveTimeout, call)
        group.barrier()
        return text
    group.barrier()
    return raised(CollectiveTimeout, call)


def test_a_timeout_fails_the_group_on_all_ranks(ranks: Ranks) -> None:
    for text in ranks.run(a_rank_is_late):
        assert "all_reduce timed out on rank" in text


def waits_briefly(group: ProcessGroup) -> None:
    x = np.ones(3)
    if group.rank == 0:
        work = group.all_reduce(x, async_op=True)
        assert work is not None
        raised(CollectiveTimeout, lambda: work.wait(0.05))
        assert not work.is_completed()
        group.send(np.ones(1), 1)
        work.wait()
    else:
        if group.rank == 1:
            group.recv(np.ones(1), 0)
        group.all_reduce(x)
    assert (x == SIZE).all()


def test_a_wait_that_is_too_short_leaves_the_call_alone(ranks: Ranks) -> None:
    ranks.run(waits_briefly)


def a_rank_stays_away(group: ProcessGroup) -> str:
    text = ""
    if group.rank != 1:
        members = [2, 1, 0]
        made = lambda: group.child("not-all", members, 0.3, group.config).make_backends()  # noqa: E731
        text = raised(RendezvousError, made)
    group.barrier()
    return text


def test_a_group_is_not_made_unless_all_members_arrive(ranks: Ranks) -> None:
    zero, _, two = ranks.run(a_rank_stays_away)
    assert "rank 1 did not come" in two
    assert "timed out after" in two
    assert "timed out after" in zero


def another_split(group: ProcessGroup) -> float:
    sub = whole_group(group)
    lists = [[0], [1, 2]] if group.rank == 2 else [[0, 1, 2]]
    before = time.monotonic()
    raised(CollectiveMismatch, lambda: sub.split_group(lists))
    group.barrier()
    return time.monotonic() - before


def test_ranks_that_wait_for_members_learn_at_once_that_others_make_another_group(
    ranks: Ranks,
) -> None:
    assert max(ranks.run(another_split)) < 10.0, "not the group's timeout"


def a_rank_leaves(group: ProcessGroup) -> None:
    sub = whole_group(group)
    before = time.monotonic()
    if group.rank == 2:
        work = sub.isend(np.arange(4.0), 0, tag=2**31 - 1)
        assert work is not None
        work.wait()
        dist.destroy_process_group(sub)
    else:
        if group.rank == 0:
            got = np.zeros(4)
            sub.recv(got, 2, tag=2**31 - 1)
            assert (got == np.arange(4.0)).all(), "what it sent before must arrive"
            group.send(np.zeros(1), 1)
        else:
            group.recv(np.zeros(1), 0)  # rank 1's failure is rank 0's, too
        text = raised(PeerLost, lambda: sub.recv(np.ones(1), 2))
        assert "rank 2" in text
        assert time.monotonic() - before < 10, "nobody waits for the group's timeout"
    group.barrier()


def test_a_rank_that_waits_for_a_departed_rank_raises_peer_lost(ranks: Ranks) -> None:
    ranks.run(a_rank_leaves)


def a_rank_leaves_before_a_call(group: ProcessGroup) -> None:
    sub = whole_group(group)
    if group.rank == 0:
        dist.destroy_process_group(sub)
    else:
        assert "rank 0" in raised(PeerLost, lambda: sub.all_reduce(np.ones(3)))
    group.barrier()


def test_a_call_that_a_departed_rank_missed_raises_peer_lost(ranks: Ranks) -> None:
    ranks.run(a_rank_leaves_before_a_call)


# Works


def no_thread_waits(group: ProcessGroup, count: int) -> str:
    x, over, names = np.full(count, group.rank + 0.5), threading.Event(), []
    work = group.all_reduce(x, async_op=True)
    assert work is not None

    def note(future: Any) -> None:
        names.append(threading.current_thread().name)
        over.set()

    work.get_future().then(note)
    assert over.wait(10), "the thread must move the call along"
    assert (x == 4.5).all()
    return names[0]


@pytest.mark.parametrize("count", [3, 50_000])
def test_a_call_ends_although_no_thread_waits_for_it(ranks: Ranks, count: int) -> None:
    assert set(ranks.run(no_thread_waits, [count] * SIZE)) == {"nc10d-mpi"}


def in_any_order(group: ProcessGroup) -> bytes:
    sub = whole_group(group, options=dist_options())
    x = np.random.default_rng(group.rank).random(1000, np.float32)
    want = sum(np.random.default_rng(r).random(1000, np.float32) for r in range(SIZE))
    narrow = x.astype(np.float16)
    for y in (x, narrow):
        sub.all_reduce(y)
        assert np.allclose(y, want, rtol=1e-2 if y is narrow else 1e-6)
    sub.close()
    return x.tobytes() + narrow.tobytes()


def dist_options() -> Any:
    from nc10d.backend.mpi.backend import MpiOptions

    return MpiOptions(any_order=True)


def test_mpi_may_choose_the_order_of_sums(ranks: Ranks) -> None:
    assert len(set(ranks.run(in_any_order))) == 1


def refuses_options(group: ProcessGroup) -> None:
    assert "MpiOptions" in raised(TypeError, lambda: whole_group(group, options="fast"))
    group.barrier()


def test_options_of_another_type_are_refused(ranks: Ranks) -> None:
    ranks.run(refuses_options)


class OnDevice:
    """An array that claims to be in CUDA memory."""

    def __init__(self) -> None:
        self.__cuda_array_interface__ = {
            "shape": (4,),
            "typestr": "<f4",
            "data": (1 << 32, False),
            "version": 3,
        }


def sends_from_a_device(group: ProcessGroup) -> None:
    backend = group.backend("cpu")
    op = AllReduce(OnDevice())
    text = raised(UnsupportedPlatform, lambda: backend.launch([op], 5.0, False))
    assert "not CUDA-aware" in text
    group.barrier()


def test_device_arrays_need_a_cuda_aware_mpi(ranks: Ranks) -> None:
    ranks.run(sends_from_a_device)


def many_threads(group: ProcessGroup) -> None:
    groups = [whole_group(group) for _ in range(4)]
    sums = np.zeros((4, 30))
    found: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(30):
                x = np.full(200, float(turn + number))
                groups[number].all_reduce(x)
                sums[number, turn] = x[-1]
        except BaseException as error:  # noqa: BLE001  (raised below)
            found.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not found, found
    assert (sums == SIZE * (np.arange(4)[:, None] + np.arange(30))).all()


def test_threads_may_use_groups_of_their_own_at_once(ranks: Ranks) -> None:
    ranks.run(many_threads)


def makes_and_drops(group: ProcessGroup, count: int) -> None:
    for number in range(count):
        sub = dist.new_group([2, 0])
        if isinstance(sub, ProcessGroup):
            x = np.array([float(number + sub.rank)])
            sub.broadcast(x, 1)
            assert x[0] == number + 1
            dist.destroy_process_group(sub)
        if number % 50 == 0:
            group.barrier()


@pytest.mark.long
def test_destroyed_groups_cost_nothing(ranks: Ranks) -> None:
    # MPICH has 2048 communicators, and a group uses two.
    ranks.run(makes_and_drops, [2100] * SIZE)
