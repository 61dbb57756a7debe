"""Errors as ranks tell each other: the same type, words and attributes; and nothing else, ever."""

from __future__ import annotations

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nc10d import errors, retold
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
def test_what_was_written_is_read(
    kind: type[DistError], message: str, rank: int | None, last: dict[int, int] | None
) -> None:
    error = kind(message, rank=rank, last=last, cause="killed by signal 9", waited=0.5)
    again = retold.read(retold.written(error))
    assert type(again) is kind
    assert str(again) == message
    assert vars(again) == vars(error)
    assert vars(pickle.loads(pickle.dumps(again))) == vars(error)


@given(message=st.text(min_size=1), most=st.integers(400, 2000))
def test_a_message_is_cut_until_it_fits(message: str, most: int) -> None:
    error = errors.PeerLost(500 * message, rank=1, host="h" * 500)
    text = retold.written(error, most)
    assert len(text) <= most
    assert retold.read(text).rank == 1


class Own(DistError):
    """A caller's."""


class PeerLost(Own):
    """A caller's, by a name that nc10d knows."""


@pytest.mark.parametrize("kind", [Own, PeerLost])
def test_a_callers_own_type_is_told_as_what_it_means(kind: type[DistError]) -> None:
    again = retold.read(retold.written(kind("why", rank=2), group="world"))
    assert type(again) is Aborted
    assert (str(again), again.rank, again.group) == ("why", 2, "world")


def said(kind: object) -> str:
    return json.dumps({**json.loads(retold.written(Aborted("why"))), "kind": kind})


@given(
    text=st.text()
    | st.builds(json.dumps, JSON)
    | st.sampled_from(["Any", "annotations", "_rebuild", "OSError", "RuntimeError", 3]).map(said)
)
def test_what_can_not_be_read_is_an_error_all_the_same(text: str) -> None:
    error = retold.read(text)
    assert type(error) is Aborted
    assert "can't be read" in str(error)


def test_a_number_that_is_none_makes_it_unreadable() -> None:
    text = retold.written(Aborted("why"), last={0: float("inf")})
    assert "can't be read" in str(retold.read(text))
