"""Of two receives that a message fits, from any source or a rank, the first posted takes it."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from at_once import at_once
from hypothesis import given, settings
from hypothesis import strategies as st
from on_ranks import on_ranks

import nc10d as dist
from nc10d.backend.cpu.native.offsets import C_GUARD
from nc10d.base.deadline import Deadline
from nc10d.errors import CollectiveMismatch, CollectiveTimeout, PeerLost
from nc10d.testing import Ranks, run_ranks

Receive = tuple[int, int, bool]
"""Tag, count of elements, and whether any source will do."""


@pytest.fixture(scope="module")
def three() -> Any:
    with Ranks(3) as ranks:
        yield ranks


def numbers(group: Any, first: int, last: int, tag: int = 0) -> None:
    """Send these numbers to rank 0, a message each."""
    for number in range(first, last + 1):
        group.send(np.array([number]), 0, tag=tag)


def empty(count: int = 1) -> Any:
    return np.full(count, -1)


# -- the law -----------------------------------------------------------------------------------


def posted_and_sent(
    group: Any, receives: list[Receive], senders: list[int], order: list[int], when: str
) -> None:
    """Rank 0 posts `receives`, and waits in `order`. A tag's messages come from its sender."""
    if when == "sent first" and group.rank == 0:
        group.barrier()
    works, arrays, sent = [], [], []
    for tag, count, any_source in receives:
        if group.rank == 0:
            arrays.append(empty(count))
            src = None if any_source else senders[tag]
            works.append(group.irecv(arrays[-1], src, tag=tag))
    if when == "posted first":
        group.barrier()
    for number, (tag, count, _) in enumerate(receives):
        if group.rank == senders[tag]:
            sent.append(group.isend(np.full(count, number), 0, tag=tag))
    if when == "sent first" and group.rank:
        group.barrier()
    for number in order if group.rank == 0 else ():
        works[number].wait()
        assert works[number].result() == senders[receives[number][0]]
    for work in sent:
        work.wait()
    assert [set(x) for x in arrays] == [{number} for number in range(len(arrays))]


COUNTS = st.sampled_from([1, 1, 1, 200, 40_000])


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_the_receive_posted_first_takes_the_first_message(three: Any, data: Any) -> None:
    receive = st.tuples(st.sampled_from([0, 1]), COUNTS, st.booleans())
    receives = data.draw(st.lists(receive, min_size=1, max_size=10))
    senders = data.draw(st.lists(st.sampled_from([1, 2]), min_size=2, max_size=2))
    order = data.draw(st.permutations(range(len(receives))))
    when = data.draw(st.sampled_from(["posted first", "sent first", "at once"]))
    three.run(posted_and_sent, *([each] * 3 for each in (receives, senders, order, when)))


# -- behind a receive from any source ----------------------------------------------------------


def by_prepared_recv(group: Any, x: Any) -> None:
    group.recv(x, 1)


def by_prepared_irecv(group: Any, x: Any) -> None:
    group.irecv(x, 1).wait()


def by_prepared_sendrecv(group: Any, x: Any) -> None:
    group.sendrecv(np.zeros(1), 1, x, 1)


def by_prepared_batch(group: Any, x: Any) -> None:
    ops = [dist.P2POp(dist.isend, np.zeros(1), 1), dist.P2POp(dist.irecv, x, 1)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def by_block(group: Any, x: Any) -> None:
    with dist.coalescing_manager(group):
        group.recv(x, 1)


def by_any_source(group: Any, x: Any) -> None:
    group.recv(x, None)


def prepared_behind_any(group: Any, receive: Callable[[Any, Any], None]) -> None:
    """The call is prepared at its first uses, and then made behind a receive from any source."""
    x, first = empty(), empty()
    if group.rank:
        numbers(group, 0, 2)
        group.barrier()
        numbers(group, 10, 12)
        return
    for number in range(3):
        receive(group, x)
        assert x[0] == number
    work = group.irecv(first, None)
    group.barrier()
    receive(group, x)
    assert (first[0], x[0]) == (10, 11)
    work.wait()
    receive(group, x)
    assert x[0] == 12
    assert group.backend("cpu").group.links.inbox(1).channel.get(C_GUARD) == 0


@pytest.mark.parametrize(
    "receive",
    [
        *(by_prepared_recv, by_prepared_irecv, by_prepared_sendrecv, by_prepared_batch),
        *(by_block, by_any_source),
    ],
)
def test_no_call_overtakes_a_receive_from_any_source(pair: Any, receive: Any) -> None:
    pair.run(prepared_behind_any, [receive] * 2)


def other_tags_pass(group: Any) -> None:
    if group.rank:
        for _ in range(2):
            numbers(group, 1, 5, tag=7)
            group.barrier()
        numbers(group, 9, 9)
        return
    x, first = empty(), empty()
    for turn in range(2):
        if turn:
            work = group.irecv(first, None)
        for number in range(1, 6):
            group.recv(x, 1, tag=7)
            assert x[0] == number
        assert first[0] == -1
        group.barrier()
    work.wait()
    assert first[0] == 9


def test_a_receive_of_another_tag_is_not_held_up(pair: Any) -> None:
    pair.run(other_tags_pass)


@on_ranks(2)
def test_a_receive_whose_work_is_dropped_takes_its_message(world: Any) -> None:
    if world.rank:
        numbers(world, 1, 3)
        return
    first, second, x = empty(), empty(), empty()
    world.irecv(first, None)
    world.irecv(second, 1)
    world.recv(x, 1)
    assert (first[0], second[0], x[0]) == (1, 2, 3)


def probes(group: Any) -> None:
    if group.rank:
        group.barrier()
        numbers(group, 1, 2)
        numbers(group, 3, 3, tag=1)
        group.barrier()
        numbers(group, 4, 4)
        return
    x, y, z = empty(), empty(), empty()
    works = [group.irecv(x, None), group.irecv(y, 1)]
    group.barrier()
    found = group.probe()  # not of tag 0: its messages are for the two receives
    assert found == (1, 1, 8)
    assert group.iprobe(1, 0) is None
    assert group.iprobe(tag=0) is None
    group.barrier()
    assert group.probe(tag=0) == (1, 0, 8)
    group.recv(z, 1)
    for work in works:
        work.wait()
    assert (x[0], y[0], z[0]) == (1, 2, 4)
    group.recv(z, None, tag=1)
    assert z[0] == 3


def test_a_probe_shows_no_message_that_a_pending_receive_takes(pair: Any) -> None:
    pair.run(probes)


def in_a_batch(group: Any) -> None:
    """A receive from any source that waits for a send of its array keeps its place."""
    if group.rank:
        numbers(group, 1, 2)
        x = empty()
        group.recv(x, 0)
        assert x[0] == 77
        return
    a, b = np.array([77]), empty()
    with dist.coalescing_manager(group):
        group.send(a, 1)
        group.recv(a, None)
        group.recv(b, 1)
    assert (a[0], b[0]) == (1, 2)


def test_the_receives_of_a_batch_keep_their_order(pair: Any) -> None:
    pair.run(in_a_batch)


def into_one_array(group: Any, any_source: bool) -> None:
    """Rank 0 receives twice into an array, in a block, behind a message that it does not want."""
    if group.rank:
        for tag in (7, 5, 9, 3):
            numbers(group, tag, tag, tag=tag)
        return
    x = empty()
    group.recv(x, 1, tag=5)  # the message of tag 7 is aside now, that of tag 9 at the link's head
    with group.coalescing_manager():
        group.recv(x, 1, tag=3)
        group.recv(x, None if any_source else 1, tag=7)
    assert x[0] == 7
    group.recv(x, None, tag=9)
    assert x[0] == 9


@pytest.mark.parametrize("any_source", [False, True])
def test_a_block_passes_messages_that_it_does_not_receive(pair: Any, any_source: bool) -> None:
    pair.run(into_one_array, [any_source] * 2)


def beside_a_block(group: Any) -> list[bool]:
    """Return whether rank 0's first waits ended early: it receives behind a block that waits."""
    if group.rank:
        numbers(group, 7, 8, tag=7)
        group.barrier()
        group.recv(empty(), 0)
        numbers(group, 3, 3, tag=3)
        return []
    group.barrier()
    mailbox = group.backend("cpu").launcher.mailbox
    gate, words = mailbox.await_gate, mailbox.await_words
    x, y, early = empty(), empty(), []
    in_block, waits = threading.Event(), threading.Event()

    def await_gate(*given: Any) -> Any:
        in_block.set()
        return gate(*given)

    def await_words(*given: Any) -> Any:
        found = words(*given)
        if threading.current_thread() is receiver:
            early.append(found)
            if len(early) == 3:
                waits.set()
        return found

    def block() -> None:
        with group.coalescing_manager():
            group.recv(x, 1, tag=3)
            group.recv(x, None, tag=7)

    mailbox.await_gate, mailbox.await_words = await_gate, await_words
    blocked = threading.Thread(target=block)
    receiver = threading.Thread(target=lambda: group.recv(y, None, tag=7))
    blocked.start()
    assert in_block.wait(20.0)
    receiver.start()
    assert waits.wait(20.0)
    found = early[:3]
    group.send(empty(), 1)
    blocked.join()
    receiver.join()
    del mailbox.await_gate, mailbox.await_words
    assert (x[0], y[0]) == (7, 8)
    return found


def test_a_thread_behind_a_block_that_waits_waits_for_its_gate() -> None:
    with Ranks(2, timeout=20.0) as ranks:
        assert ranks.run(beside_a_block)[0] == [False] * 3


# -- which thread advances a queue ------------------------------------------------------------


@on_ranks(2)
def test_a_callback_is_called_behind_a_receive_that_nobody_waits_for(world: Any) -> None:
    if world.rank:
        world.barrier()
        numbers(world, 1, 2)
        return
    x, y, ended = empty(), empty(), threading.Event()
    first, second = world.irecv(x, None), world.irecv(y, 1)
    second.add_done_callback(lambda _: ended.set())
    world.barrier()
    assert ended.wait(20.0)
    assert (x[0], y[0]) == (1, 2)
    assert first.is_completed()


THREADS, ROUNDS = 4, 50


def threads_in_reverse(group: Any) -> None:
    """Of the two receives of a thread, the second is waited for first."""
    if group.rank:
        numbers(group, 0, 2 * THREADS * ROUNDS - 1)
        return
    seen: list[int] = []

    def body(turn: int) -> None:
        for _ in range(ROUNDS):
            x, y = empty(), empty()
            works = [group.irecv(x, None), group.irecv(y, 1 if turn % 2 else None)]
            for work in works[::-1]:
                work.wait()
            seen.extend((int(x[0]), int(y[0])))
            in_order.append(x[0] < y[0])

    in_order: list[bool] = []
    at_once(*(partial(body, turn) for turn in range(THREADS)))
    assert sorted(seen) == list(range(2 * THREADS * ROUNDS))
    assert all(in_order)


def test_threads_keep_the_order_of_their_own_receives(pair: Any) -> None:
    pair.run(threads_in_reverse)


@on_ranks(2)
def test_a_wait_that_ends_early_leaves_its_receive_in_its_place(world: Any) -> None:
    if world.rank:
        world.barrier()
        numbers(world, 1, 2)
        return
    x, y = empty(), empty()
    first, second = world.irecv(x, None), world.irecv(y, 1)
    for work in (second, first):
        with pytest.raises(CollectiveTimeout, match="it goes on"):
            work.wait(0.01)
        assert not work.is_completed()
    world.barrier()
    second.wait()
    assert (x[0], y[0]) == (1, 2)
    assert [work.result() for work in (first, second)] == [1, 1]


# -- failures ----------------------------------------------------------------------------------


def wrong_size(group: Any) -> None:
    if group.rank:
        numbers(group, 1, 1)
        group.barrier()
    else:
        group.irecv(empty(3), None)
        group.recv(empty(), 1)


def test_a_message_that_does_not_fit_the_first_receive_is_an_error() -> None:
    with pytest.raises(CollectiveMismatch, match="8 bytes of int64"):
        run_ranks(wrong_size, 2)


def nobody_sends(group: Any) -> None:
    if group.rank == 0:
        group.irecv(empty(), None)
        group.recv(empty(), 1, timeout=0.2)
    group.barrier()


def test_a_receive_behind_another_keeps_its_timeout() -> None:
    with pytest.raises(CollectiveTimeout, match=r"recv\(src=1"):
        run_ranks(nobody_sends, 2)


def await_the_end_of(group: Any, rank: int) -> None:
    """Wait until a rank has left the group."""
    health, limit = group.backend("cpu").group.health, Deadline.after(20.0)
    while not health.peers.has_closed(rank):
        assert not limit.expired()
        os.sched_yield()


@on_ranks(3)
def test_a_receive_behind_another_fails_once_its_rank_has_left(world: Any) -> None:
    """Rank 1 leaves after a message for the first receive; the second can't end any more."""
    x = empty()
    if world.rank == 1:
        numbers(world, 1, 1, tag=5)
        numbers(world, 2, 2)
        dist.destroy_process_group()
    elif world.rank == 2:  # until the end, it may send to the first receive
        with pytest.raises(PeerLost, match="rank 1 has left"):
            world.recv(x, 0)
    else:
        work = world.irecv(x, None)
        await_the_end_of(world, 1)
        with pytest.raises(PeerLost, match="rank 1 has left"):
            world.irecv(empty(), 1).wait()
        assert work.is_completed()
        assert x[0] == 2


@on_ranks(2)
def test_a_message_behind_unexpected_ones_comes_though_its_sender_has_left(world: Any) -> None:
    if world.rank:
        numbers(world, 1, 2, tag=5)
        numbers(world, 3, 3)
        dist.destroy_process_group()
        return
    await_the_end_of(world, 1)
    x = empty()
    world.recv(x, None)
    assert x[0] == 3
    with pytest.raises(PeerLost, match="has left"):
        world.recv(x, None)


class Tracked(np.ndarray[Any, Any]):
    """An array that can be referred to weakly."""


def ended_by(group: Any, end: str) -> bool:
    x = np.zeros(3).view(Tracked)
    kept, work = weakref.ref(x), group.irecv(x, None)
    del x, work
    group.irecv(np.zeros(3), 1 - group.rank)
    group.barrier()
    dist.destroy_process_group() if end == "destroyed" else group.abort(RuntimeError("enough"))
    gc.collect()
    return kept() is None


@pytest.mark.parametrize("end", ["destroyed", "aborted"])
def test_a_group_that_has_ended_keeps_no_array(end: str) -> None:
    with Ranks(2) as ranks:
        assert all(ranks.run(ended_by, [end] * 2))
