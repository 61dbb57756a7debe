"""Plain objects: every one travels as it is, and no stream can do anything else."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_codec import same

from nc10d.codec import MessageKind, encode
from nc10d.codec.plain import LARGEST_STREAM, decode_plain, encode_plain, is_plain
from nc10d.errors import CodecError

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.text(alphabet="\ud800é", max_size=3),
    st.binary(max_size=300),
    st.builds(bytearray, st.binary(max_size=5)),
)
KEYS = st.recursive(
    st.integers() | st.text() | st.binary(), lambda inner: st.tuples(inner, inner), max_leaves=5
)
PLAIN = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner),
        st.lists(inner).map(tuple),
        st.dictionaries(KEYS, inner),
        st.sets(KEYS),
        st.frozensets(KEYS),
        inner.map(lambda shared: [shared, (shared,), shared]),
    ),
    max_leaves=30,
)


def bytes_of(stream: bytes) -> Any:
    return np.frombuffer(stream, np.uint8)


def decoded(stream: bytes) -> Any:
    return decode_plain(bytes_of(stream))


@settings(deadline=None)
@given(PLAIN)
def test_a_plain_object_travels_as_it_is(value: Any) -> None:
    stream = encode_plain(value)
    assert stream is not None
    assert same(decoded(stream), value)
    assert encode(value).kind is MessageKind.PLAIN


def test_one_object_in_two_places_stays_one_and_may_contain_itself() -> None:
    inner: list[Any] = [1]
    inner.append(inner)
    stream = encode_plain({"a": inner, "b": inner})
    assert stream is not None
    found = decoded(stream)
    assert found["a"] is found["b"]
    assert found["a"][1] is found["a"]


class Touched(Exception):
    """Code of a type has run."""


class Touchy(dict[str, int]):
    """A type whose own code must not run."""

    def __reduce_ex__(self, _: Any) -> Any:
        raise Touched


@pytest.mark.parametrize(
    "value",
    [
        1j,
        np.zeros(3),
        np.float64(1),
        pickle.PickleBuffer(b"x"),
        OrderedDict(a=1),
        Touchy(a=1),
        int,
        len,
        Ellipsis,
        range(3),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_object_with_another_type_in_it_is_not_plain_and_is_not_touched(value: Any) -> None:
    for whole in (value, [[value]], {"a": (1, value)}):
        assert encode_plain(whole) is None


def test_a_large_object_is_not_plain() -> None:
    assert encode_plain([b"x" * 1000] * 3 + [bytes(LARGEST_STREAM)]) is None
    assert encode_plain([bytes([i % 256]) * 200 for i in range(LARGEST_STREAM // 200)]) is None


def test_a_deep_object_is_not_plain() -> None:
    for wrap in (lambda x: [x], lambda x: (x,), lambda x: {1: x}, lambda x: frozenset([x, 1])):
        value: Any = ()
        for _ in range(300):
            value = wrap(value)
        assert encode_plain(value) is None


def with_key(levels: int, use: str) -> bytes:
    """Return a stream that hashes a tuple of 2**levels parts, all of them the same few objects."""
    get = [pickle.BINGET + bytes([level]) for level in range(levels + 1)]
    tuples = [pickle.EMPTY_TUPLE + pickle.MEMOIZE]
    tuples += [each + each + pickle.TUPLE2 + pickle.MEMOIZE for each in get[:-1]]
    uses = {
        "item": pickle.EMPTY_DICT + get[-1] + pickle.NONE + pickle.SETITEM,
        "items": pickle.EMPTY_DICT + pickle.MARK + get[-1] + pickle.NONE + pickle.SETITEMS,
        "set": pickle.EMPTY_SET + pickle.MARK + get[-1] + pickle.ADDITEMS,
        "frozenset": pickle.MARK + get[-1] + pickle.FROZENSET,
    }
    head = pickle.PROTO + bytes([5]) + pickle.MARK
    return head + b"".join(tuples) + uses[use] + pickle.TUPLE + pickle.STOP


@pytest.mark.parametrize("use", ["item", "items", "set", "frozenset"])
def test_a_short_stream_with_a_huge_key_is_refused(use: str) -> None:
    assert is_plain(bytes_of(with_key(3, use)))
    assert not is_plain(bytes_of(with_key(60, use)))


class Evil:
    """Runs a function of another module when it is unpickled."""

    def __reduce__(self) -> Any:
        return print, ("run",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_that_names_a_function_is_refused(
    protocol: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in (Evil(), [Evil()], OrderedDict(a=1), 1j, np.zeros(2), print):
        with pytest.raises(CodecError, match="malformed"):
            decoded(pickle.dumps(value, protocol))
    assert not capsys.readouterr().out


OPCODES = st.sampled_from([bytes([code]) for code in range(256)])


@settings(deadline=None, max_examples=400)
@given(st.lists(OPCODES | st.binary(max_size=9), max_size=30))
def test_no_stream_of_opcodes_gives_anything_but_plain_objects(parts: list[bytes]) -> None:
    only_plain(b"".join(parts))


@settings(deadline=None, max_examples=400)
@given(PLAIN, st.data())
def test_a_changed_stream_gives_nothing_but_plain_objects(value: Any, data: st.DataObject) -> None:
    stream = bytearray(encode_plain(value) or b"")
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(stream)))
        stream[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3) | OPCODES)
    only_plain(bytes(stream))


def only_plain(stream: bytes) -> None:
    try:
        found = decoded(stream)
    except CodecError:
        return
    types = {type(None), bool, int, float, str, bytes, bytearray, list, tuple, dict, set, frozenset}
    seen: dict[int, Any] = {}
    rest = [found]
    while rest:
        value = rest.pop()
        assert type(value) in types
        if id(value) not in seen:
            seen[id(value)] = value
            rest += value if isinstance(value, (list, tuple, set, frozenset)) else ()
            rest += [*value, *value.values()] if isinstance(value, dict) else ()
