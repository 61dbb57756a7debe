"""Object messages of several threads: each arrives whole, once, and a thread's come in order."""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from at_once import at_once

import nc10d as dist
from nc10d.codec.messages import LONG
from nc10d.testing import Ranks

SIZE, RECEIVER = 3, 2
THREADS, COUNT = 2, 24
SENT = {(rank, thread): list(range(COUNT)) for rank in range(RECEIVER) for thread in range(THREADS)}
"""The numbers of the messages that each thread of each sender sends, in order."""


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with Ranks(SIZE, timeout=20) as ranks:
        yield ranks


def filler(rank: int, thread: int, number: int) -> Any:
    """Return a part of a message: inline in a piece or in several, in a flat array, or long."""
    value = 1 + rank + 2 * thread
    nbytes = (10, 1500, 3500, 6000, 100_000, LONG + 1)[number % 6]
    return bytes([value]) * nbytes if nbytes < LONG else np.full(nbytes, value, np.uint8)


def send_all(group: Any, thread: int) -> None:
    """Send the messages of one thread of this rank."""
    for number in range(COUNT):
        rank = int(group.rank)  # `group.rank` is no plain object: hooks would not send it
        objects = [rank, thread, number, filler(rank, thread, number)]
        dist.send_object_list(objects, RECEIVER, group)


def receive(group: Any, source: int | None, count: int, got: list[tuple[int, int, int]]) -> None:
    """Receive messages and check that each is whole; append (rank, thread, number) of each."""
    for _ in range(count):
        places: list[Any] = [None] * 4
        sender = dist.recv_object_list(places, source, group)
        rank, thread, number, part = places
        assert sender == rank
        assert source in (None, rank)
        assert bytes(part) == bytes(filler(rank, thread, number))
        got.append((rank, thread, number))


def exchange(group: Any, sources: list[int | None]) -> list[list[tuple[int, int, int]]]:
    """Send from all threads of all senders to receiving threads, one for each of `sources`."""
    got: list[list[tuple[int, int, int]]] = [[] for _ in sources]
    each = RECEIVER * THREADS * COUNT // len(sources)
    if group.rank == RECEIVER:
        pairs = zip(sources, got, strict=True)
        at_once(*[lambda s=s, g=g: receive(group, s, each, g) for s, g in pairs])  # type: ignore[misc]
    else:
        at_once(*[lambda t=t: send_all(group, t) for t in range(THREADS)])  # type: ignore[misc]
    return got


@pytest.mark.parametrize(
    "sources", [[None], [None, None, None], [0, 1], [0, 1, 1, 0]], ids=["one", "any", "two", "four"]
)
def test_each_message_arrives_whole_and_once(three: Ranks, sources: list[int | None]) -> None:
    received = three.run(exchange, [sources] * SIZE)[RECEIVER]
    sent = [(*sender, number) for sender, numbers in SENT.items() for number in numbers]
    assert sorted(itertools.chain.from_iterable(received)) == sorted(sent)
    for got in received:
        for rank, thread in SENT:
            numbers = [number for *sender, number in got if sender == [rank, thread]]
            assert numbers == sorted(numbers), "the messages of a thread stay in order"
