"""Groups used from several threads: launches, messages, waits, and closing amid a call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from at_once import at_once

import nc10d as dist
from nc10d.errors import GroupClosed, PeerLost
from nc10d.testing.ranks import Ranks

THREADS, ROUNDS = 4, 100


@pytest.fixture(scope="module", params=["threads", "processes"])
def pair(request: Any) -> Iterator[Ranks]:
    with Ranks(2, request.param) as ranks:
        yield ranks


class Turnstile:
    """Lets a rank's threads launch in an order that all ranks agree on: round after round."""

    def __init__(self) -> None:
        self._moved = threading.Condition()
        self._next = 0

    def launch(self, ticket: int, call: Callable[[], Any]) -> Any:
        with self._moved:
            self._moved.wait_for(lambda: self._next == ticket)
            try:
                return call()
            finally:
                self._next += 1
                self._moved.notify_all()


def in_turn(group: Any, later: bool) -> None:
    """Launch from threads in an agreed order; check that each thread gets its own results."""
    turnstile = Turnstile()

    def body(number: int) -> None:
        works = []
        for turn in range(ROUNDS):
            count = (1, 500, 20_000)[turn % 3]
            x = np.full(count, (group.rank + 1) * (1000 * number + turn))

            def call(x: Any = x) -> Any:
                return group.all_reduce(x, async_op=later)

            work = turnstile.launch(THREADS * turn + number, call)
            works.append((work, x, 3 * (1000 * number + turn)))
            if turn % 7 == 0 or turn == ROUNDS - 1:
                for done, result, want in works:
                    if done is not None:
                        done.wait()
                    assert (result == want).all(), (number, turn)
                works.clear()

    at_once(*(lambda n=n: body(n) for n in range(THREADS)))


@pytest.mark.parametrize("later", [False, True])
def test_threads_that_launch_in_an_agreed_order_get_their_own_results(
    pair: Ranks, later: bool
) -> None:
    pair.run(in_turn, [later] * 2)


def in_any_order(group: Any) -> None:
    """Launch from threads in no order: a sum of ones is the number of ranks in any case."""

    def body(number: int) -> None:
        for turn in range(ROUNDS):
            x = np.ones(300)
            if (turn + number) % 2:
                group.all_reduce(x)
            else:
                group.all_reduce(x, async_op=True).wait()
            assert (x == group.size).all(), (number, turn)

    at_once(*(lambda n=n: body(n) for n in range(THREADS)))


def test_threads_may_mix_sync_and_async_calls_on_one_group(pair: Ranks) -> None:
    pair.run(in_any_order)


def on_groups_of_their_own(group: Any) -> None:
    groups = [dist.new_group() for _ in range(THREADS)]

    def body(number: int) -> None:
        mine = groups[number]
        for turn in range(ROUNDS):
            x = np.full((1, 700, 30_000)[turn % 3], number * 100 + turn + group.rank)
            work = mine.all_reduce(x, async_op=turn % 2 == 1)
            if work is not None:
                work.wait()
            assert (x == 2 * (number * 100 + turn) + 1).all(), (number, turn)

    at_once(*(lambda n=n: body(n) for n in range(THREADS)))
    for made in groups:
        dist.destroy_process_group(made)


def test_threads_on_groups_of_their_own_need_no_order(pair: Ranks) -> None:
    pair.run(on_groups_of_their_own)


def messages_of_threads(group: Any) -> None:
    """Each thread has a tag of its own; sizes repeat, so that threads share prepared messages."""
    peer = 1 - group.rank

    def send(tag: int) -> None:
        for turn in range(ROUNDS):
            group.send(np.full((3, 4000)[turn % 2], 1000 * tag + turn), peer, tag=tag)

    def receive(tag: int) -> None:
        for turn in range(ROUNDS):
            x = np.zeros((3, 4000)[turn % 2], np.int64)
            group.recv(x, peer, tag=tag)
            assert (x == 1000 * tag + turn).all(), (tag, turn, x[:3])

    senders = [lambda t=t: send(t) for t in range(THREADS)]
    at_once(*senders, *(lambda t=t: receive(t) for t in range(THREADS)))


def test_threads_with_tags_of_their_own_get_their_messages_in_order(pair: Ranks) -> None:
    pair.run(messages_of_threads)


def from_anyone(group: Any) -> None:
    """Several threads receive from any source: each message goes to a single thread."""
    total = THREADS * ROUNDS
    if group.rank == 1:
        for number in range(total):
            group.send(np.array([number]), 0, tag=9)
        return
    seen: list[int] = []

    def body() -> None:
        for _ in range(ROUNDS):
            x = np.zeros(1, np.int64)
            assert group.recv(x, None, tag=9) == 1
            seen.append(int(x[0]))

    at_once(*[body] * THREADS)
    assert sorted(seen) == list(range(total))


def test_threads_that_receive_from_any_source_share_the_messages(pair: Ranks) -> None:
    pair.run(from_anyone)


def waiters(group: Any) -> None:
    """Several threads wait for the same Work, with and without timeouts."""

    def wait_together(x: Any, work: Any) -> None:
        at_once(*[lambda: work.wait(20.0)] * 3, work.result, work.wait)
        assert (x == group.size).all()

    for _ in range(30):
        x = np.ones(5000)
        wait_together(x, group.all_reduce(x, async_op=True))


def test_several_threads_may_wait_for_one_work(pair: Ranks) -> None:
    pair.run(waiters)


def closed_meanwhile(group: Any, begun: threading.Barrier) -> list[str]:
    """Destroy the group in one thread while another is in a collective that can't end."""
    mine = dist.new_group()
    if group.rank == 1:
        begun.wait()
        return []
    names: list[str] = []

    def inside(call: Callable[[], Any]) -> None:
        try:
            call()
        except (GroupClosed, PeerLost) as error:
            names.append(type(error).__name__)

    calls = [
        lambda: inside(lambda: mine.all_reduce(np.ones(4))),
        lambda: inside(lambda: mine.recv(np.ones(4), 1)),
        lambda: inside(lambda: mine.recv(np.ones(4), None)),
        lambda: inside(lambda: mine.all_reduce(np.ones(9), async_op=True).wait()),
    ]
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    backend = mine.backend("cpu")
    while backend.group.memory.last_record(0)[0] == 0 and len(names) < 1:
        pass
    dist.destroy_process_group(mine)
    for thread in threads:
        thread.join(10.0)
        assert not thread.is_alive()
    begun.wait()
    return names


def test_destroying_a_group_ends_other_threads_calls_on_it() -> None:
    for _ in range(5):
        with Ranks(2) as ranks:
            barrier = threading.Barrier(2)
            first, _ = ranks.run(closed_meanwhile, [barrier] * 2)
        assert first == ["GroupClosed"] * 4
