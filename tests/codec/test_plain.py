"""Plain objects: every one travels as it is, and no stream can do anything else."""

import pickle
import struct
import subprocess
import sys
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from same_objects import same

from nc10d import register_type
from nc10d.codec import MessageKind, constructors, encode
from nc10d.codec.plain import LARGEST_STREAM, decode_plain, encode_plain, is_plain
from nc10d.errors import CodecError
from nc10d.testing.strategies import arrays, dtypes, shapes

THINGS = st.one_of(
    st.builds(arrays, dtypes(), shapes(40)).flatmap(lambda drawn: drawn),
    dtypes().flatmap(lambda dtype: arrays(dtype, (1,))).map(lambda x: x[0]),
)
"""Values that a stream makes by calls."""
LEAVES = st.one_of(
    THINGS,
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
        np.zeros(1000),
        np.zeros(3, "M8[s]"),
        np.array([None]),
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


NONE, STOP, REDUCE = pickle.NONE, pickle.STOP, pickle.REDUCE
HEAD, EMPTY = pickle.PROTO + bytes([5]), pickle.EMPTY_TUPLE


def text(words: str) -> bytes:
    return pickle.SHORT_BINUNICODE + bytes([len(words)]) + words.encode()


def named(name: str = "array_from", module: str = constructors.__name__) -> bytes:
    return text(module) + text(name) + pickle.STACK_GLOBAL


def pickled(value: Any) -> bytes:
    """Return the opcodes of a value, to be put into a stream."""
    return pickle.dumps(value, 5)[2:-1]


def call(*arguments: Any) -> bytes:
    """Return the opcodes of a call."""
    given = b"".join(pickled(each) for each in arguments)
    return named() + pickle.MARK + given + pickle.TUPLE + REDUCE


WRONG_USES = {
    "the function itself": named(),
    "a list of the function": pickle.EMPTY_LIST + named() + pickle.APPEND,
    "a list of several": pickle.EMPTY_LIST + pickle.MARK + NONE + named() + pickle.APPENDS,
    "a tuple of the function": named() + pickle.TUPLE1,
    "a long tuple of the function": pickle.MARK + named() + pickle.TUPLE,
    "a key": pickle.EMPTY_DICT + named() + NONE + pickle.SETITEM,
    "a value": pickle.EMPTY_DICT + NONE + named() + pickle.SETITEM,
    "an argument": named() + named() + pickle.TUPLE1 + REDUCE,
    "called without arguments": named() + REDUCE,
    "called with a list": named() + pickle.EMPTY_LIST + REDUCE,
    "called by none": EMPTY + REDUCE,
    "None is called": NONE + EMPTY + REDUCE,
    "a text is called": text("array_from") + EMPTY + REDUCE,
    "built": named() + NONE + pickle.BUILD,
    "made as an object": named() + EMPTY + pickle.NEWOBJ,
    "another function of the module": named("call_for") + EMPTY + REDUCE,
    "a longer name": named("array_from.__globals__") + EMPTY + REDUCE,
    "another module": named(module="os") + EMPTY + REDUCE,
    "a builtin": named("eval", "builtins") + text("1") + pickle.TUPLE1 + REDUCE,
    "the names in the other order": text("array_from")
    + text(constructors.__name__)
    + pickle.STACK_GLOBAL
    + EMPTY
    + REDUCE,
    "a name of an older protocol": b"cnc10d.codec.constructors\narray_from\n" + EMPTY + REDUCE,
}


@pytest.mark.parametrize("use", WRONG_USES)
def test_a_function_of_a_stream_can_only_be_called_and_no_other_can(use: str) -> None:
    assert is_plain(bytes_of(HEAD + call(14, (1,), EIGHT) + STOP))
    assert not is_plain(bytes_of(HEAD + WRONG_USES[use] + STOP))


DOUBLED: Any = ()
for _ in range(60):
    DOUBLED = DOUBLED, DOUBLED
EIGHT = bytes(8)
ABSURD = 0, 2**62, 2**62
WRONG_ARRAYS: list[tuple[Any, ...]] = [
    *[(), (14,), (14, (1,)), (14, (1,), EIGHT, "no such type"), (14, (1,), EIGHT, "torch.Size")],
    *[(14, (2,), EIGHT), (14, (-1, -1), EIGHT), (14, (1.0,), EIGHT), (14, [1], EIGHT)],
    *[(14, (1,), bytearray(8)), (14, (True,), EIGHT), (14, (1,) * 65, EIGHT), (99, (1,), EIGHT)],
    *[(14, ABSURD, b""), (14, (-1, 0), b""), (0, (8,), b"7" * 8)],
    *[(DOUBLED, (1,), EIGHT), (14, DOUBLED, EIGHT), (14, (1,), DOUBLED)],
    *[(14, (1,), EIGHT, DOUBLED), (14, (1,), EIGHT, "collections.Counter")],
    *[
        (1, (5000,), bytes(5000)),
        (14.0, (1,), EIGHT),
        (14, (2**2000,) * 60, EIGHT),
        (14, (2 ** (8 * 10**5),) * 9 + (0,), b""),
    ],
]


@pytest.mark.parametrize("arguments", WRONG_ARRAYS, ids=[str(n) for n in range(len(WRONG_ARRAYS))])
@pytest.mark.timeout(10)
def test_an_array_that_can_not_be_is_an_error_at_once(arguments: tuple[Any, ...]) -> None:
    with pytest.raises((ValueError, TypeError)):
        constructors.array_from(*arguments)
    with pytest.raises(CodecError):
        decoded(HEAD + call(*arguments) + STOP)


def test_a_key_of_long_ints_is_weighed() -> None:
    tuples = b"".join(
        pickle.BINGET + bytes([n]) + pickle.BINGET + bytes([n]) + pickle.TUPLE2 + pickle.MEMOIZE
        for n in range(20)
    )
    key = pickle.MARK + pickled(1 << 16000) + pickle.MEMOIZE + tuples
    stream = HEAD + key + pickle.EMPTY_DICT + pickle.BINGET + bytes([20]) + NONE + pickle.SETITEM
    assert not is_plain(bytes_of(stream + pickle.TUPLE + STOP))


def test_arrays_of_the_same_bytes_do_not_grow_beyond_all_proportion() -> None:
    content = pickled(b"x" * 4000)
    first = named() + pickle.MEMOIZE + pickle.MARK + pickled(1) + pickled((4000,)) + content
    first += pickle.TUPLE + pickle.MEMOIZE + REDUCE
    again = pickle.BINGET + bytes([0]) + pickle.BINGET + bytes([3]) + REDUCE
    for times, fits in ((5, True), (5000, False)):
        stream = HEAD + pickle.MARK + first + again * times + pickle.TUPLE + STOP
        assert is_plain(bytes_of(stream)) == fits
        if fits:
            assert len(decoded(stream)) == times + 1
    assert encode_plain([np.zeros(1, np.uint8)] * 2 + [np.zeros(0), np.ones(1)] * 1000) is not None


class Unhashable(np.ndarray):
    def __hash__(self) -> int:
        raise AttributeError("hash here")


def test_errors_of_the_programs_own_hash_are_codec_errors() -> None:
    def unhashable(state: Any) -> Any:
        return state.view(Unhashable)

    register_type(Unhashable, np.asarray, unhashable, "unhashable", lambda x, _: x)
    array = named() + pickle.MARK + b"".join(map(pickled, (14, (1,), EIGHT, "unhashable")))
    key = pickle.EMPTY_DICT + array + pickle.TUPLE + REDUCE + NONE + pickle.SETITEM
    assert type(decoded(HEAD + array + pickle.TUPLE + REDUCE + STOP)) is Unhashable
    with pytest.raises(CodecError, match="hash here"):
        decoded(HEAD + key + STOP)


def test_an_array_keeps_no_other_part_of_its_object() -> None:
    """A stream gives the bytes of an array once more, as a value."""
    shared = pickled(bytes(8)) + pickle.MEMOIZE
    array = named() + pickle.MARK + pickled(14) + pickled((1,)) + pickle.BINGET + bytes([0])
    stream = HEAD + pickle.MARK + shared + array + pickle.TUPLE + REDUCE + pickle.TUPLE + STOP
    content, x = decoded(stream)
    x[:] = 1.0
    assert content == bytes(8)
    changeable = stream.replace(pickled(bytes(8)), pickled(bytearray(8)))
    with pytest.raises(CodecError):
        decoded(changeable)


def test_a_frame_that_ends_within_an_opcode_hides_nothing() -> None:
    """From a file, CPython would drop the rest of the frame and read on behind it."""
    frame = pickle.FRAME + struct.pack("<Q", 7)
    stream = frame + text("A" * 20) + pickle.SHORT_BINBYTES + b"\x05xxxN." + pickle.TUPLE2 + STOP
    for locate in (None, lambda array: array):
        assert decode_plain(bytes_of(stream), locate) == ("A" * 20, b"xxxN.")


def test_a_location_is_for_the_arrays_of_its_own_object() -> None:
    inner = bytes_of(encode_plain(np.ones(2)) or b"")
    outer = bytes_of(encode_plain([np.zeros(1), np.float32(1)]) or b"")
    found = decode_plain(outer, lambda array: [array, decode_plain(inner)])
    assert same(found, [[np.zeros(1), np.ones(2)], np.float32(1)])
    with pytest.raises(CodecError, match="map_location failed: ZeroDivisionError"):
        decode_plain(outer, lambda array: 1 / 0)
    assert same(decode_plain(inner), np.ones(2))


def test_arrays_have_memory_of_their_own_and_scalars_are_scalars() -> None:
    x, scalar = np.arange(6.0).reshape(2, 3).T, np.float32(0.5)
    stream = bytes_of(encode_plain([x, x, scalar, {scalar: 1}]) or b"")
    for locate in (None, lambda array: array):
        found = decode_plain(stream, locate)
        assert same(found, [x, x, scalar, {scalar: 1}])
        assert found[0] is found[1]
        assert found[0].flags.writeable
        assert found[0].flags.c_contiguous
        assert not np.shares_memory(found[0], stream)


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
    types = {type(None), bool, int, float, str, bytes, bytearray, list, tuple, dict, set}
    types |= {frozenset, np.ndarray}
    seen: dict[int, Any] = {}
    rest = [found]
    while rest:
        value = rest.pop()
        assert type(value) in types or isinstance(value, np.generic)
        if id(value) not in seen:
            seen[id(value)] = value
            rest += value if isinstance(value, (list, tuple, set, frozenset)) else ()
            rest += [*value, *value.values()] if isinstance(value, dict) else ()


def test_a_container_is_not_filled_by_references_to_it() -> None:
    """Else a chain of lists could be as long as the stream, each of one level when it is kept."""
    kept = (pickle.EMPTY_LIST + pickle.MEMOIZE) * 300
    links = b"".join(
        pickle.BINGET + bytes([i]) + pickle.BINGET + bytes([i + 1]) + pickle.APPEND
        for i in range(200)
    )
    stream = pickle.MARK + kept + links + pickle.TUPLE + STOP
    assert not is_plain(bytes_of(stream))
    assert is_plain(bytes_of(pickle.MARK + kept + pickle.TUPLE + STOP))


LEVELS = {
    "lists": (pickle.EMPTY_LIST, pickle.APPEND),
    "tuples": (b"", pickle.TUPLE1),
    "dicts": (pickle.EMPTY_DICT + pickle.BININT1 + b"\0", pickle.SETITEM),
}
"""What begins and ends a level around an item."""


def from_cycle_to_cycle(kind: str, cycles: int, levels: int) -> bytes:
    """Return a stream that nests deeper than it counts, by references that close cycles.

    Pair k holds a list that refers to the pair, and `levels` levels around the list of pair k - 1.
    """
    begins, ends = (part * levels for part in LEVELS[kind])
    kept = pickle.EMPTY_LIST + pickle.MEMOIZE

    def reference(number: int) -> bytes:
        return pickle.LONG_BINGET + struct.pack("<I", number)

    pairs = (
        kept
        + (kept + reference(2 * k) + pickle.APPEND + pickle.APPEND)
        + (begins + reference(2 * k - 1) + ends + pickle.APPEND if k else b"")
        for k in range(cycles)
    )
    body = pickle.EMPTY_LIST + pickle.MARK + b"".join(pairs) + pickle.APPENDS
    return pickle.PROTO + b"\x05" + body + pickle.STOP


USES_OF_DEEP_OBJECT = """
import copy, gc, pickle, sys
import numpy as np
from nc10d.codec import encode
from nc10d.codec.plain import decode_plain
from nc10d.errors import CodecError

stream = np.frombuffer(sys.stdin.buffer.read(), np.uint8)
value, same = decode_plain(stream), decode_plain(stream)
path, below = set(), value[-1]
while id(below) not in path:
    path.add(id(below))
    below = below[1] if len(below) == 2 else below[0]
uses = repr, lambda x: x == same, lambda x: hash(x[-1][1]), copy.deepcopy, pickle.dumps, encode
for use in uses:
    try:
        use(value)
    except (RecursionError, TypeError, CodecError):
        pass
del value, same, below
gc.collect()
print(len(path))
"""


@pytest.mark.parametrize("kind", LEVELS)
def test_a_stream_that_is_deep_by_cycles_harms_no_use_of_the_object(kind: str) -> None:
    stream = from_cycle_to_cycle(kind, cycles=400, levels=200)
    use = [sys.executable, "-c", USES_OF_DEEP_OBJECT]
    used = subprocess.run(use, input=stream, capture_output=True, timeout=100)
    assert used.returncode == 0, used.stderr.decode()
    assert int(used.stdout) > 50_000


def test_a_stream_whose_bytes_do_not_lie_side_by_side_is_refused() -> None:
    memory = np.zeros(4, np.uint8)
    memory[::2] = bytes_of(b"N.")
    for stream in (memory[::2], memory.view(np.uint16)):
        with pytest.raises(TypeError, match="contiguous bytes"):
            is_plain(stream)
