"""Long arrays and byte strings in objects travel by themselves, and arrive as if in one piece."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nc10d as dist
from nc10d.codec.decoder import aligned
from nc10d.codec.encoder import encode
from nc10d.codec.messages import LONG, OPENING, WORDS, Envelope, MessageKind
from nc10d.errors import CodecError
from nc10d.testing import Ranks

SIZE = 3


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with Ranks(SIZE, timeout=20) as ranks:
        yield ranks


def long_array(seed: int, how: str = "") -> Any:
    x = np.random.default_rng(seed).integers(0, 255, (LONG // 1024, 1024 + seed), np.uint8)
    x = x[:, ::2].repeat(2, 1) if how == "strided" else np.asfortranarray(x) if how == "F" else x
    x.flags.writeable = how != "read-only"
    return x


def object_of(rank: int) -> Any:
    """Return an object with as many long chunks as the rank's number, and small chunks between."""
    chunks = [[long_array(i, how), np.arange(i)] for i, how in enumerate(("strided", "F"))]
    return {"before": np.zeros(0), "chunks": chunks[:rank], "after": np.full(3, rank)}


def same(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b) and b.flags.writeable
    return bool(a == b)


def through_each_call(group: Any) -> bool:
    rank, own = group.rank, object_of(group.rank)
    everyone = [object_of(peer) for peer in range(SIZE)]
    gathered: list[Any] = [None] * SIZE
    dist.all_gather_object(gathered, own, group=group)
    found = [same(everyone, gathered)]
    for root in range(SIZE):
        places = [None] * SIZE if rank == root else None
        dist.gather_object(own, places, root, group=group)
        found.append(places is None or same(everyone, places))
        single = [own if rank == root else None]
        dist.broadcast_object_list(single, root, group=group)
        found.append(same([everyone[root]], single))
        out = [None]
        given = [object_of((peer + root) % SIZE) for peer in range(SIZE)] if rank == root else None
        dist.scatter_object_list(out, given, root, group=group)
        found.append(same([everyone[(rank + root) % SIZE]], out))
    return all(found)


def test_ranks_with_different_numbers_of_long_arrays_exchange_them_by_each_call(
    three: Ranks,
) -> None:
    assert three.run(through_each_call) == [True] * SIZE


class Holder:
    """An object that only a pickle carries."""

    def __init__(self, x: Any) -> None:
        self.x = x


def sent_to_a_neighbour(group: Any) -> list[bool]:
    values = [long_array(0, "read-only"), bytes(long_array(1)), Holder(long_array(2))]
    if group.rank == 0:
        dist.send_object_list(values, 1, group=group, allow_pickle=True)
    if group.rank != 1:
        return []
    got: list[Any] = [None] * 3
    dist.recv_object_list(got, 0, group=group, allow_pickle=True)
    return [
        np.array_equal(values[0], got[0]),
        values[1] == got[1],
        np.array_equal(values[2].x, got[2].x),
    ]


def test_read_only_arrays_bytes_and_pickles_arrive_whole(three: Ranks) -> None:
    assert three.run(sent_to_a_neighbour)[1] == [True] * 3


def test_a_long_array_is_not_copied_by_its_sender_and_keeps_no_other_alive() -> None:
    x, y = long_array(0), np.zeros(4)
    message = encode([x, y])
    message.divide()
    assert np.shares_memory(message.long[0], x)
    envelope = Envelope.read(message.opening())
    long = [chunk.copy() for chunk in message.long]
    back = envelope.open(message.flat(), long=long)
    assert same([x, y], back)
    assert np.shares_memory(back[0], long[0])
    assert not np.shares_memory(back[1], long[0])


def test_chunks_beyond_the_room_of_an_opening_travel_in_the_flat_array() -> None:
    x = np.zeros(LONG, np.uint8)
    message = encode([x[:] for _ in range(300)])
    message.divide()
    envelope = Envelope.read(message.opening())
    assert envelope == message.envelope()
    assert len(envelope.long) + envelope.payload // LONG == 300
    assert envelope.payload > 0
    assert len(envelope.open(message.flat(), long=message.long)) == 300


@settings(deadline=None)
@given(
    st.sampled_from([*map(int, MessageKind), 9]),
    st.lists(st.tuples(st.integers(-64, 1 << 12), st.integers(-1, 1 << 41)), max_size=3),
    st.integers(-1, 300),
    st.integers(0, 1 << 12),
)
def test_an_opening_with_long_chunks_is_read_or_refused(
    kind: int, places: list[tuple[int, int]], count: int, payload: int
) -> None:
    opening = np.zeros(OPENING, np.uint8)
    WORDS.pack_into(opening.data, 0, kind + 256 * count, 8, payload, 0)
    words = np.array(places, np.int64).reshape(-1)
    opening[WORDS.size : WORDS.size + words.nbytes] = words.view(np.uint8)
    try:
        envelope = Envelope.read(opening)
    except CodecError:
        return
    assert 0 <= envelope.total <= 1 << 40
    assert envelope.parts == (1 + len(envelope.long) if envelope.long else not envelope.inline)
    assert all(0 <= at <= payload and nbytes > 0 for at, nbytes in envelope.long)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 3), st.integers(-1, 1))
def test_a_header_that_asks_for_other_chunks_than_have_come_is_refused(
    place: int, more: int
) -> None:
    message = encode([np.zeros(8), np.zeros(LONG, np.uint8), np.zeros(8)])
    message.divide()
    envelope, long = message.envelope(), [np.zeros(LONG + more, np.uint8)]
    wrong = envelope._replace(long=((64 * place, LONG + more),))
    if wrong == envelope:
        return
    assert envelope.long == ((aligned(64), LONG),)
    with pytest.raises(CodecError):
        wrong.open(message.flat(), long=long)
