"""Small messages lie in their link's cells: many at a time, received in any order of tags."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from entered_functions import python_frames
from on_ranks import on_ranks

from nc10d.backend.cpu.native.offsets import CELL_DATA_BYTES, CELLS
from nc10d.testing.ranks import Ranks

SIZES = (0, 1, 8, CELL_DATA_BYTES, CELL_DATA_BYTES + 1, 5000)


@pytest.fixture(scope="module")
def two() -> Any:
    with Ranks(2) as ranks:
        yield ranks


def content(number: int, nbytes: int) -> Any:
    return (np.arange(nbytes) + 31 * number).astype(np.uint8)


def prepare(group: Any) -> None:
    for nbytes in SIZES:
        x = np.zeros(nbytes, np.uint8)
        group.send(x, 1) if group.rank == 0 else group.recv(x, 0)


def sent_first(group: Any, tags: list[int], sizes: list[int], taken: list[int]) -> None:
    """Send all messages before any is received; then receive them in the order `taken`."""
    if group.rank == 0:
        for number, (tag, nbytes) in enumerate(zip(tags, sizes, strict=True)):
            group.isend(content(number, nbytes), 1, tag)
    group.barrier()
    if group.rank == 1:
        works = []
        for turn, number in enumerate(taken):
            x = np.full(sizes[number], 77, np.uint8)
            if turn % 3:
                group.recv(x, 0, tags[number])
            else:
                works.append((group.irecv(x, 0, tags[number]), x, number))
                continue
            assert np.array_equal(x, content(number, sizes[number])), (tags, sizes, taken, turn)
        for work, x, number in works:
            work.wait()
            assert np.array_equal(x, content(number, sizes[number])), (tags, sizes, taken)
    group.barrier()


def ordered(chance: random.Random, tags: list[int]) -> list[int]:
    """Return the messages in a random order that keeps that of messages with equal tags."""
    order = [*range(len(tags))]
    chance.shuffle(order)
    places = {tag: iter([n for n, each in enumerate(tags) if each == tag]) for tag in tags}
    return [next(places[tags[n]]) for n in order]


def test_messages_are_received_in_any_order_of_their_tags(two: Any) -> None:
    two.run(prepare)
    chance = random.Random(3)
    for count in (2, 5, 30, CELLS, 20, CELLS):
        tags = [chance.randrange(8) for _ in range(count)]
        small = chance.random() < 0.7
        sizes = [chance.choice(SIZES[:4] if small else SIZES) for _ in range(count)]
        # Messages of a tag may differ in size, since their order is kept.
        two.run(sent_first, [tags] * 2, [sizes] * 2, [ordered(chance, tags)] * 2)


@on_ranks(2)
def test_a_sender_is_as_many_messages_ahead_as_a_link_has_cells(world: Any) -> None:
    """Rank 0 sends before rank 1 receives anything, and the barrier proves it."""
    x = np.zeros(CELL_DATA_BYTES, np.uint8)
    for _ in range(3):
        if world.rank == 0:
            for number in range(CELLS):
                x[:] = number
                world.send(x, 1)
        world.barrier()
        if world.rank == 1:
            for number in range(CELLS):
                world.recv(x, 0)
                assert set(x.tolist()) == {number}


def backwards(group: Any) -> list[int]:
    """Count the Python functions of receives in the reverse order of the sends."""
    x = np.zeros(8, np.uint8)
    found = []
    for _ in range(2):
        for tag in range(CELLS):
            if group.rank == 0:
                x[:] = tag
                group.send(x, 1, tag)
        group.barrier()
        if group.rank == 1:
            for tag in reversed(range(CELLS)):
                found.append(python_frames(lambda tag=tag: group.recv(x, 0, tag)))
                assert set(x.tolist()) == {tag}
    return found


def test_a_message_behind_others_is_received_as_directly_as_the_first(two: Any) -> None:
    _, found = two.run(backwards)
    assert len(set(found[CELLS:])) == 1, found
