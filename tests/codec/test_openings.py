"""Openings are kept between calls: they take plain objects, refuse all else, and leak nothing."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nc10d.codec.messages import OPENING, PIECE, WORDS, Envelope, MessageKind, pieces_used
from nc10d.codec.openings import NO_ROWS, Openings, give_back, take
from nc10d.codec.plain import LARGEST_STREAM, is_plain
from nc10d.errors import CodecError

PLAIN = st.recursive(
    st.none() | st.integers() | st.text(max_size=20) | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=8,
)


def is_plain_opening(opening: Any) -> bool:
    """Return what `Openings.objects` finds by one call, the long way."""
    try:
        envelope = Envelope.read(opening)
    except CodecError:
        return False
    plain = envelope.kind is MessageKind.PLAIN and not envelope.payload and envelope.inline
    return plain and is_plain(envelope.inner(opening)[: envelope.header])


@settings(deadline=None)
@given(st.lists(PLAIN, min_size=1, max_size=4))
def test_objects_come_back_in_their_order_whatever_the_memory_has_had(values: list[Any]) -> None:
    openings = take(len(values))
    for row, value in zip(openings.table, values, strict=True):
        fits, stream = openings.put(value), openings.stream()
        assert stream is not None
        row[:] = openings.own if fits else 0
        if fits:
            assert not openings.own[WORDS.size + len(stream) :].any()
            assert Envelope.read(openings.own)[:3] == (MessageKind.PLAIN, len(stream), 0)
        else:
            assert len(stream) > OPENING - WORDS.size
            assert openings.objects() is None
            break
    else:
        assert openings.objects() == values
    give_back(openings)


@settings(deadline=None)
@given(PLAIN, st.lists(st.tuples(st.integers(0, 120), st.integers(0, 255)), max_size=4))
def test_an_opening_is_plain_only_if_its_message_is(
    value: Any, changes: list[tuple[int, int]]
) -> None:
    openings = Openings(2)
    openings.put([value])
    openings.table[:] = openings.own
    for place, byte in changes:
        openings.table[1, place] = byte
    plain = all(map(is_plain_opening, openings.table))
    assert (openings.objects(NO_ROWS) is not None) == plain
    openings.objects()  # None, or objects, but no error


WORD = st.integers(-5, 5000) | st.integers(-(2**63), 2**63 - 1)


@settings(deadline=None)
@given(WORD, WORD, WORD)
def test_no_message_asks_for_more_pieces_than_an_opening_has(a: int, b: int, c: int) -> None:
    first = np.zeros(PIECE, np.uint8)
    WORDS.pack_into(first.data, 0, a, b, c, c)
    assert 1 <= pieces_used(first) <= OPENING // PIECE


@pytest.mark.parametrize("size", [0, PIECE - WORDS.size, PIECE - WORDS.size + 1, 3000])
def test_the_pieces_sent_are_those_that_the_receiver_expects(size: int) -> None:
    openings = Openings(1)
    assert openings.put(bytes(size))
    openings.table[:] = openings.own
    assert len(openings.pieces()) == 1 + len(openings.later_pieces())


@pytest.mark.parametrize(
    "value",
    [1j, np.zeros(1000), [b"x" * 200, 1j], bytes(2 * LARGEST_STREAM), [b"x" * 70_000, 1j]],
    ids=["complex", "large array", "long then complex", "too long", "written then complex"],
)
def test_an_object_that_is_not_plain_leaves_no_byte_for_the_next_call(value: Any) -> None:
    openings = Openings(1)
    assert not openings.put(value)
    assert openings.stream() is None
    assert openings.put([1])
    stream = openings.stream()
    assert stream is not None
    assert not openings.own[WORDS.size + len(stream) :].any()


def test_openings_in_use_are_not_given_to_another_call() -> None:
    first, second = take(3), take(3)
    assert first is not second
    give_back(first)
    assert take(3) is first
