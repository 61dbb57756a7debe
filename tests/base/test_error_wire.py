"""Serialized errors keep type, message and attributes; other bytes become an Aborted."""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nc10d import errors
from nc10d.base import error_wire
from nc10d.errors import Aborted, DistError

KINDS = [
    kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, DistError)
]
JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=5)


@given(
    kind=st.sampled_from(KINDS),
    message=st.text(st.characters(exclude_categories=["Cs"])),
    rank=st.none() | st.integers(0, 9),
    last=st.none() | st.dictionaries(st.integers(0, 9), st.integers(0, 99)),
)
def test_an_encoded_error_is_decoded_equal(
    kind: type[DistError], message: str, rank: int | None, last: dict[int, int] | None
) -> None:
    error = kind(message, rank=rank, last=last, cause="killed by signal 9", waited=0.5)
    again = error_wire.decode_error(error_wire.encode_error(error))
    assert type(again) is kind
    assert str(again) == message
    assert vars(again) == vars(error)
    assert vars(pickle.loads(pickle.dumps(again))) == vars(error)


@given(message=st.text(min_size=1), most=st.integers(400, 2000))
def test_a_message_is_cut_until_it_fits(message: str, most: int) -> None:
    error = errors.PeerLost(500 * message, rank=1, host="h" * 500)
    text = error_wire.encode_error(error, most)
    assert len(text) <= most
    assert error_wire.decode_error(text).rank == 1


@given(
    words=st.text(max_size=300),
    ranks=st.integers(0, 500),
    most=st.integers(512, 2000),
    of=st.sampled_from(["host", "cause", "op"]),
)
def test_attributes_are_cut_where_there_is_no_room_for_them(
    words: str, ranks: int, most: int, of: str
) -> None:
    last = dict.fromkeys(range(ranks), 10**9)
    error = errors.PeerLost("why", rank=1, last=last, group="\0" * 200, **{of: words})
    text = error_wire.encode_error(error, most)
    assert len(text) <= most
    again = error_wire.decode_error(text)
    assert (type(again), str(again), again.rank) == (errors.PeerLost, "why", 1)
    assert again.last in (last, None)


def test_the_message_is_kept_rather_than_each_ranks_last_call() -> None:
    error = errors.PeerLost("the fan broke", rank=1, last=dict.fromkeys(range(500), 10**9))
    assert str(error_wire.decode_error(error_wire.encode_error(error, 600))) == "the fan broke"


class Wordless(DistError):
    """A caller's error whose str() raises."""

    def __str__(self) -> str:
        raise LookupError("no words")


@pytest.mark.parametrize(
    ("given_as", "decoded_as"),
    [
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (ValueError("why"), "why"),
        (Wordless("why"), "Wordless, which can't be put in words"),
        (1 << 20000, "int, which can't be put in words"),
        ([1], "[1]"),
    ],
    ids=["integer", "float", "error", "wordless", "digits", "list"],
)
def test_an_error_with_any_attribute_is_encoded(given_as: Any, decoded_as: object) -> None:
    again = error_wire.decode_error(
        error_wire.encode_error(errors.PeerLost("x", rank=given_as, cause=given_as))
    )
    assert (again.rank, again.cause) == (decoded_as, decoded_as)
    numbers = error_wire.decode_error(
        error_wire.encode_error(Aborted("x", last={np.int64(1): np.int64(2)}))
    )
    assert numbers.last == {1: 2}
    malformed = Aborted("x", last={"a": 2})  # type: ignore[dict-item]
    assert error_wire.decode_error(error_wire.encode_error(malformed)).last is None


def test_an_error_without_a_message_is_encoded() -> None:
    again = error_wire.decode_error(error_wire.encode_error(Wordless("why", rank=2)))
    assert (str(again), again.rank) == ("Wordless, which can't be put in words", 2)


class Own(DistError):
    """A caller's error."""


class PeerLost(Own):
    """A caller's error with the name of an error of nc10d."""


@pytest.mark.parametrize("kind", [Own, PeerLost])
def test_a_callers_own_type_is_encoded_as_aborted(kind: type[DistError]) -> None:
    again = error_wire.decode_error(error_wire.encode_error(kind("why", rank=2), group="world"))
    assert type(again) is Aborted
    assert (str(again), again.rank, again.group) == ("why", 2, "world")


def with_kind(kind: object) -> str:
    return json.dumps({**json.loads(error_wire.encode_error(Aborted("why"))), "kind": kind})


@given(
    text=st.text()
    | st.builds(json.dumps, JSON)
    | st.sampled_from(["Any", "annotations", "_rebuild", "OSError", "RuntimeError", 3]).map(
        with_kind
    )
)
def test_undecodable_text_gives_an_aborted(text: str) -> None:
    error = error_wire.decode_error(text)
    assert type(error) is Aborted
    assert "can't be read" in str(error)


def test_a_rank_that_is_no_number_makes_the_text_undecodable() -> None:
    text = error_wire.encode_error(Aborted("why"), last={0: float("inf")})
    assert "can't be read" in str(error_wire.decode_error(text))
