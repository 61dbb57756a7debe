"""The parser gives the same requests for any split; no bytes crash it or make it grow."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nc10d.store import wire as m

KEYS = st.binary(max_size=20)
VALUES = st.binary(max_size=200)
I64 = st.integers(-(1 << 63), (1 << 63) - 1)
KEY_LISTS = st.lists(KEYS, max_size=5)
PAIRS = st.lists(st.tuples(KEYS, VALUES), max_size=5)

REQUESTS = st.one_of(
    st.tuples(st.sampled_from([m.GET, m.DELETE_KEY, m.QUEUE_POP, m.QUEUE_LEN]), KEYS),
    st.tuples(st.sampled_from([m.SET, m.APPEND, m.QUEUE_PUSH]), KEYS, VALUES),
    st.tuples(st.just(m.COMPARE_SET), KEYS, VALUES, VALUES),
    st.tuples(st.sampled_from([m.ADD, m.BARRIER]), KEYS, I64),
    st.tuples(st.sampled_from([m.WAIT, m.CHECK, m.MULTI_GET]), KEY_LISTS),
    st.tuples(st.just(m.MULTI_SET), PAIRS),
    st.tuples(st.sampled_from([m.GETNUMKEYS, m.LIST_KEYS, m.CANCEL_WAIT])),
    st.tuples(st.just(m.PING), st.integers(0, (1 << 32) - 1)),
)
HELLO = m.with_u32(m.VALIDATE, m.MAGIC)


def encode(request: m.Request) -> bytes:
    kind, *fields = request
    match fields:
        case []:
            return m.simple(kind)
        case [list()] if kind == m.MULTI_SET:
            return m.with_pairs(fields[0])
        case [list()]:
            return m.with_keys(kind, fields[0])
        case [int()]:
            return m.with_u32(kind, fields[0])
        case [key, int() as number]:
            return m.with_number(kind, key, number)
        case [key, *values]:
            return m.with_values(kind, key, *values)
    raise AssertionError(request)


def take_all(feed: Iterator[m.Request], requests: list[m.Request]) -> bool:
    """Append all to `requests`; return whether the feed ends with a bad frame."""
    try:
        requests.extend(feed)  # keeps the requests before an error
    except m.BadFrame:
        return True
    return False


def feed_split(parser: m.Parser, data: bytes, cuts: list[int]) -> tuple[list[m.Request], bool]:
    """Feed `data` in pieces until a bad frame; return the requests, and whether it was bad."""
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    requests: list[m.Request] = []
    pieces = (data[begin:end] for begin, end in pairwise(edges) if begin < end)
    return requests, any(take_all(parser.feed(piece), requests) for piece in pieces)


def fed(data: bytes, limits: m.Limits | None = None) -> tuple[m.Parser, list[m.Request], bool]:
    """Feed `data` at once to a parser that is past its HELLO."""
    parser = m.Parser(limits or m.Limits())
    requests, bad = feed_split(parser, HELLO + data, [])
    return parser, requests[1:], bad


@given(st.lists(REQUESTS, max_size=8), st.lists(st.integers(0, 1 << 20), max_size=30))
def test_any_split_gives_the_requests_that_were_sent(requests, cuts):
    data = HELLO + b"".join(map(encode, requests))
    parser = m.Parser()
    assert feed_split(parser, data, cuts) == ([(m.VALIDATE,), *requests], False)
    assert len(parser.held) == 0


@given(
    st.lists(REQUESTS, max_size=4),
    st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), max_size=4),
    st.binary(max_size=60),
    st.lists(st.integers(0, 1 << 20), max_size=10),
)
def test_mutated_bytes_mean_the_same_however_they_are_cut(requests, changes, tail, cuts):
    data = bytearray(HELLO + b"".join(map(encode, requests)) + tail)
    for at, byte in changes:
        data[at % len(data)] = byte
    parser = m.Parser()
    whole, whole_bad = feed_split(parser, bytes(data), [])
    cut, cut_bad = feed_split(m.Parser(), bytes(data), cuts)
    assert whole == cut
    # In pieces, a bad length may be read later: once all bytes that must follow have arrived.
    assert whole_bad or not cut_bad
    assert len(parser.held) <= len(data)


@pytest.mark.parametrize("kind", range(1, 256))
def test_requests_before_validate_are_refused(kind):
    with pytest.raises(m.BadFrame):
        list(m.Parser().feed(bytes((kind,)) + bytes(64)))


def test_a_wrong_magic_is_a_bad_frame():
    with pytest.raises(m.BadFrame):
        list(m.Parser().feed(m.with_u32(m.VALIDATE, m.MAGIC ^ 1)))


@pytest.mark.parametrize("kind", range(m.QUEUE_TAKE + 1, 256))
def test_an_unknown_kind_is_a_bad_frame(kind):
    assert fed(bytes((kind,)))[1:] == ([], True)


LIMITS = m.Limits(key=4, value=8, total=100, items=3)
BEYOND = {
    "key": m.with_key(m.GET, b"12345"),
    "value": m.with_values(m.SET, b"k", b"123456789"),
    "desired": m.with_values(m.COMPARE_SET, b"k", b"", b"123456789"),
    "listed key": m.with_keys(m.WAIT, [b"12345"]),
    "list": m.with_keys(m.CHECK, [b"k"] * 4),
    "pairs": m.with_pairs([(b"k", b"v")] * 4),
    "paired value": m.with_pairs([(b"k", b"123456789")]),
    "endless key": bytes((m.GET,)) + b"\xff" * 8,
    "endless list": bytes((m.WAIT,)) + b"\xff" * 8,
}


@pytest.mark.parametrize("what", BEYOND)
def test_a_request_beyond_a_bound_is_a_bad_frame_after_valid_requests(what):
    good = m.with_values(m.SET, b"1234", b"12345678")
    assert fed(good + BEYOND[what], LIMITS)[1:] == ([(m.SET, b"1234", b"12345678")], True)


def test_a_request_is_parsed_only_after_the_previous_request_is_taken():
    # The clients that a SET wakes must be answered first.
    requests = m.Parser().feed(HELLO + m.simple(m.GETNUMKEYS) + bytes((m.QUEUE_TAKE + 1,)))
    assert [next(requests), next(requests)] == [(m.VALIDATE,), (m.GETNUMKEYS,)]
    with pytest.raises(m.BadFrame):
        next(requests)


def test_an_announced_gibibyte_takes_no_memory_before_it_arrives():
    parser, _, _ = fed(b"")
    frame = m.with_key(m.SET, b"k") + m.U64.pack(1 << 30)
    tracemalloc.start()
    try:
        assert list(parser.feed(frame + bytes(1000))) == []
        assert tracemalloc.get_traced_memory()[1] < 64 << 10
    finally:
        tracemalloc.stop()
    assert len(parser.held) == len(frame) + 1000


def test_a_long_list_in_small_pieces_is_not_parsed_again_for_each_piece():
    keys = [b"%06d" % i for i in range(20_000)]
    data = m.with_keys(m.WAIT, keys)
    parser, _, _ = fed(b"")
    # Quadratic parsing would take minutes here.
    requests = [r for at in range(0, len(data), 7) for r in parser.feed(data[at : at + 7])]
    assert requests == [(m.WAIT, keys)]


def test_a_number_beyond_64_bits_is_a_value_error():
    with pytest.raises(ValueError, match="64 bits"):
        m.with_number(m.ADD, b"k", 1 << 63)
