"""The handshake and its frames accept only the right peer and its data, in order."""

from __future__ import annotations

import contextlib
import hmac
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nc10d.auth.handshake import (
    ANSWER_BYTES,
    HELLO,
    LONGEST_FRAME,
    PROOF_BYTES,
    SEAL_BYTES,
    UNPROVEN_BYTES,
    BadHandshake,
    BadSeal,
    HandshakeAnswerer,
    HandshakeCaller,
    Introduction,
    Opener,
    Sealer,
    group_digest,
    seal_function,
)

KEY = b"k" * 32
INTRODUCTION = Introduction(3, 1, 0, group_digest("world"))
CUTS = st.lists(st.integers(1, 40), max_size=8)


def expected(introduction: Introduction) -> bool:
    return introduction == INTRODUCTION


def in_pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    pieces = []
    for cut in cuts:
        pieces.append(data[:cut])
        data = data[cut:]
    return [piece for piece in [*pieces, data] if piece]


def feed(side: HandshakeCaller | HandshakeAnswerer, data: bytes, cuts: list[int]) -> bytes:
    """Feed `data` in pieces, never more than `wants`; return the bytes to send."""
    answer = b""
    for piece in in_pieces(data, cuts):
        assert len(piece) <= side.wants
        answer += side.feed(piece)
    return answer


def shaken(cuts: list[int], key: bytes = KEY) -> tuple[HandshakeCaller, HandshakeAnswerer]:
    caller, answerer = HandshakeCaller(KEY, INTRODUCTION), HandshakeAnswerer(key, expected)
    answer = feed(answerer, caller.hello, cuts)
    feed(answerer, feed(caller, answer, cuts), cuts)
    return caller, answerer


@given(cuts=CUTS)
def test_two_sides_with_the_key_share_fresh_keys_however_bytes_are_cut(cuts: list[int]) -> None:
    caller, answerer = shaken(cuts)
    assert caller.wants == answerer.wants == 0
    assert answerer.introduction == INTRODUCTION
    assert caller.keys is not None
    assert answerer.keys is not None
    assert (caller.keys.sending, caller.keys.taking) == (
        answerer.keys.taking,
        answerer.keys.sending,
    )
    other, _ = shaken(cuts)
    assert len({*(other.keys or ()), *caller.keys}) == 4, "no key serves twice"


def test_few_bytes_are_read_from_an_unproven_connection() -> None:
    assert UNPROVEN_BYTES == HELLO.size + PROOF_BYTES <= 128


def test_the_caller_detects_another_key_first() -> None:
    with pytest.raises(BadHandshake, match="does not know the key"):
        shaken([], key=b"K" * 32)


@pytest.mark.parametrize(
    ("changed", "length"), [("hello", HELLO.size), ("answer", ANSWER_BYTES), ("proof", PROOF_BYTES)]
)
@given(data=st.data())
def test_no_bit_of_a_handshake_may_change(changed: str, length: int, data: st.DataObject) -> None:
    at, bit = data.draw(st.integers(0, length - 1)), data.draw(st.integers(0, 7))

    def sent(part: str, wire: bytes) -> bytes:
        return flipped(wire, at, bit) if part == changed else wire

    caller, answerer = HandshakeCaller(KEY, INTRODUCTION), HandshakeAnswerer(KEY, expected)

    def shake_hands() -> None:
        answer = answerer.feed(sent("hello", caller.hello))
        answerer.feed(sent("proof", caller.feed(sent("answer", answer))))

    with pytest.raises(BadHandshake):
        shake_hands()
    assert answerer.keys is None
    assert changed == "proof" or caller.keys is None


def flipped(data: bytes, at: int, bit: int) -> bytes:
    return data[:at] + bytes([data[at] ^ (1 << bit)]) + data[at + 1 :]


def test_a_recorded_handshake_proves_nothing_later() -> None:
    caller, answerer = HandshakeCaller(KEY, INTRODUCTION), HandshakeAnswerer(KEY, expected)
    proof = caller.feed(answerer.feed(caller.hello))
    again = HandshakeAnswerer(KEY, expected)
    again.feed(caller.hello)
    with pytest.raises(BadHandshake):
        again.feed(proof)


def test_an_answer_is_not_a_proof_of_the_caller() -> None:
    """A client without the key can't use an answerer's proof for another answerer."""
    first, second = HandshakeAnswerer(KEY, expected), HandshakeAnswerer(KEY, expected)
    hello = HandshakeCaller(KEY, INTRODUCTION).hello
    second.feed(hello)
    with pytest.raises(BadHandshake):
        second.feed(first.feed(hello)[-PROOF_BYTES:])


@pytest.mark.parametrize(
    "introduction",
    [
        INTRODUCTION._replace(rank=2),
        INTRODUCTION._replace(peer=0),
        INTRODUCTION._replace(purpose=1),
        INTRODUCTION._replace(group=group_digest("other")),
    ],
)
def test_a_caller_that_is_not_expected_gets_no_answer(introduction: Introduction) -> None:
    with pytest.raises(BadHandshake, match="nobody of that description"):
        HandshakeAnswerer(KEY, expected).feed(HandshakeCaller(KEY, introduction).hello)


@given(first=st.binary(min_size=1, max_size=8).filter(lambda b: not b"nc10d-2\n".startswith(b)))
def test_another_protocol_is_detected_at_its_first_bytes(first: bytes) -> None:
    with pytest.raises(BadHandshake):
        HandshakeAnswerer(KEY, expected).feed(first)


# ---- frames --------------------------------------------------------------------------------------

MESSAGES = st.lists(st.binary(max_size=60), min_size=1, max_size=6)


@given(messages=MESSAGES, cuts=CUTS)
def test_sealed_data_is_opened_in_order_however_it_is_cut(
    messages: list[bytes], cuts: list[int]
) -> None:
    sealer, opener = Sealer(KEY), Opener(KEY)
    wire = b"".join(map(sealer.seal, messages))
    assert b"".join(map(opener.feed, in_pieces(wire, cuts))) == b"".join(messages)


@given(key=st.binary(min_size=32, max_size=32), data=st.binary(max_size=200))
def test_a_seal_equals_the_standard_librarys_hmac(key: bytes, data: bytes) -> None:
    assert seal_function(key)(data) == hmac.digest(key, data, "sha256")[:SEAL_BYTES]


@pytest.mark.parametrize("nbytes", [0, 1, LONGEST_FRAME, LONGEST_FRAME + 1, 3 * LONGEST_FRAME])
def test_any_length_is_sealed_in_frames_of_bounded_length(nbytes: int) -> None:
    data = bytes(range(256)) * (nbytes // 256 + 1)
    assert Opener(KEY).feed(Sealer(KEY).seal(data[:nbytes])) == data[:nbytes]
    assert Opener(KEY).feed(Sealer(KEY).seal(memoryview(data)[:nbytes])) == data[:nbytes]


@given(messages=MESSAGES, data=st.data())
def test_changed_frames_are_never_returned(messages: list[bytes], data: st.DataObject) -> None:
    sealer, opener = Sealer(KEY), Opener(KEY)
    wire = b"".join(map(sealer.seal, messages))
    at = data.draw(st.integers(0, len(wire) - 1))
    mutated = flipped(wire, at, data.draw(st.integers(0, 7)))
    assert b"".join(messages).startswith(opened(opener, mutated))
    # An opener waits for a length that has grown; the following bytes are no valid frame.
    with pytest.raises(BadSeal):
        opener.feed(bytes(LONGEST_FRAME + 100))


def opened(opener: Opener, wire: bytes) -> bytes:
    """Open byte by byte until a seal is wrong; return the opened data."""
    given = b""
    try:
        for at in range(len(wire)):
            given += opener.feed(wire[at : at + 1])
    except BadSeal:
        pass
    return given


@given(order=st.permutations(range(4)))
def test_frames_can_not_be_reordered_left_out_or_repeated(order: list[int]) -> None:
    sealer, opener = Sealer(KEY), Opener(KEY)
    frames = [sealer.seal(bytes([number])) for number in range(4)]
    given = opened(opener, b"".join(frames[at] for at in order))
    right = bytes(
        at for place, at in enumerate(order) if list(order[: place + 1]) == list(range(place + 1))
    )
    assert given == right


@pytest.mark.parametrize("rounds", [20_000, pytest.param(500_000, marks=pytest.mark.long)])
def test_mutated_frames_are_never_returned(rounds: int) -> None:
    chance = random.Random(4)
    frame = Sealer(KEY).seal(b"a request of the store")
    for _ in range(rounds):
        mutated = mutation(frame, chance)
        if mutated.startswith(frame):
            continue
        with contextlib.suppress(BadSeal):
            assert Opener(KEY).feed(mutated) == b""


def mutation(frame: bytes, chance: random.Random) -> bytes:
    """Change, drop or repeat some bytes of a frame."""
    wire = bytearray(frame)
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(wire))
        match chance.randrange(4):
            case 0:
                wire[at] ^= 1 << chance.randrange(8)
            case 1:
                del wire[at : at + chance.randint(1, 9)]
                wire += chance.randbytes(1)
            case 2:
                wire[at:at] = wire[at : at + chance.randint(1, 9)]
            case _:
                wire[at] = chance.randrange(256)
    return bytes(wire)


@settings(max_examples=200)
@given(garbage=st.binary(max_size=200))
def test_garbage_ends_a_handshake_or_is_waited_for(garbage: bytes) -> None:
    answerer = HandshakeAnswerer(KEY, expected)
    try:
        while garbage and answerer.wants:
            answerer.feed(garbage[: answerer.wants])
            garbage = garbage[answerer.wants :]
    except BadHandshake:
        pass
    assert answerer.keys is None
