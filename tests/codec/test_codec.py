"""The codec: supported objects come back the same; every other stream is an error."""

import dataclasses
import enum
import math
import pickle
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from same_objects import same

from nc10d import register_dataclass, register_type
from nc10d.arrays.dtypes import DType
from nc10d.codec import (
    MAX_DEPTH,
    EncodedMessage,
    Envelope,
    MessageKind,
    decode,
    encode,
    encode_pickled,
)
from nc10d.codec.decoder import Payload, aligned, rounded
from nc10d.codec.encoder import walk
from nc10d.codec.plain import encode_plain
from nc10d.codec.tags import COUNT, INLINE, INT64, PACKED, Tag
from nc10d.errors import CodecError
from nc10d.testing import layouts
from nc10d.testing.strategies import arrays, dtypes, mixed_values, shapes


def through(value: Any, **how: Any) -> Any:
    """Send a value through the codec, as it would travel; a plain value in both forms."""
    message = encode(value)
    found = message.envelope().open(message.flat(), **how)
    if message.kind is MessageKind.PLAIN:
        message = walk(value)
        assert same(message.envelope().open(message.flat(), **how), found)
    return found


@register_dataclass
@dataclasses.dataclass
class Report:
    step: int
    content: Any


@register_dataclass(name="the point")
@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    x: Any
    y: Any


class Colour(enum.Enum):
    RED = 1


register_type(Colour, lambda colour: colour.value, Colour)

TEXTS = st.text(st.characters(), max_size=6) | st.text(st.characters(categories=["Cs"]), max_size=2)
BYTE_STRINGS = st.binary(max_size=9) | st.sampled_from([INLINE, INLINE + 1]).map(bytes)
INTS = st.integers() | st.integers(-300, 300) | st.integers(-(2**70), 2**70).map(lambda n: n**9)
KEYS = st.recursive(
    st.none()
    | st.booleans()
    | INTS
    | TEXTS
    | BYTE_STRINGS
    | st.just(Colour.RED)
    | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=3).map(tuple)
        | st.frozensets(inner, max_size=3)
        | st.builds(Point, inner, inner)
    ),
    max_leaves=4,
)


@st.composite
def numpy_things(draw: st.DrawFn) -> Any:
    """Draw an array of any layout, a scalar or a dtype."""
    dtype = draw(dtypes())
    array = draw(shapes(64).flatmap(lambda shape: arrays(dtype, shape)))
    layout = draw(st.sampled_from(["array", "strided", "scalar", "dtype"]))
    if layout == "strided" and array.ndim:
        return layouts.lay(array, draw(st.sampled_from(["strided", "reversed", "transposed"])))
    if layout == "scalar":
        return mixed_values(dtype, (1,), draw(st.integers(0, 99)))[0]
    return dtype.numpy if layout == "dtype" else array


LEAVES = KEYS | st.floats() | st.complex_numbers() | numpy_things() | BYTE_STRINGS.map(bytearray)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.lists(INTS, min_size=PACKED - 1, max_size=PACKED + 1)
        | st.lists(st.floats(), min_size=PACKED - 1, max_size=PACKED + 1)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.sets(KEYS, max_size=4)
        | st.builds(Report, st.integers(), inner)
    ),
    max_leaves=12,
)


@settings(deadline=None, max_examples=300)
@given(value=VALUES)
@example(value=[math.nan, -math.nan, math.inf, -0.0, complex(math.nan, -0.0), "\ud800", 2**63])
def test_supported_values_come_back_the_same(value: Any) -> None:
    assert same(through(value), value)


@pytest.mark.parametrize("dtype", DType)
def test_arrays_of_every_dtype_and_layout(dtype: DType) -> None:
    x = mixed_values(dtype, (3, 4, 5), 1)
    for view in (x, x.T, x[::2, ::-1], x[0, 0, 0:1][0:0], x[1, 2, 3, ...], x[:, None]):
        back = through(view)
        assert same(back, view)
        assert back.flags.c_contiguous
        assert back.flags.writeable
        assert back.flags.aligned


def test_an_array_is_not_copied_by_encode_or_decode() -> None:
    x = np.arange(1000.0)
    message = walk({"x": x})
    assert message.chunks[0] is x
    flat = message.flat()
    assert np.shares_memory(message.envelope().open(flat)["x"], flat)


def test_a_small_array_does_not_keep_a_large_message_alive() -> None:
    message = walk([np.zeros(100_000), np.zeros(3)])
    flat = message.flat()
    large, small = message.envelope().open(flat)
    assert np.shares_memory(large, flat)
    assert not np.shares_memory(small, flat)


def test_an_object_that_occurs_twice_is_one_object_again() -> None:
    inner: list[Any] = []
    array, report, blob = np.ones(3), Report(1, inner), bytearray(2000)
    value = [inner, (inner, array), {"k": array}, report, report, blob, blob]
    back = through(value)
    assert back[1][0] is back[0] is back[3].content
    assert back[1][1] is back[2]["k"]
    assert back[3] is back[4]
    assert back[5] is back[6]


def test_texts_that_occur_often_travel_once() -> None:
    single = len(walk([{"a name of some length": 1}]).header)
    many = len(walk([{"a name of some length": 1} for _ in range(100)]).header)
    assert many < 100 * 16 + single


@pytest.mark.parametrize("number", [0.1, 7, True, 2**64])
def test_long_lists_of_numbers_keep_their_types(number: Any) -> None:
    for value in ([number] * 1000, [number] * 500 + [1.5] * 500, [number] * 999 + [None]):
        assert same(through(value), value)
    packed = len(walk([number] * 1000).header) < 20
    assert packed == (number in (0.1, 7))


def test_a_structure_that_doubles_at_each_level_stays_small() -> None:
    value: Any = []
    for _ in range(100):
        value = [value, value]
    message = walk(value)
    assert len(message.header) < 2000
    back = message.envelope().open(message.flat())
    assert back[0] is back[1]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (type("Ordered", (OrderedDict,), {})(a=1), "Ordered"),
        (namedtuple("Pair", "a b")(1, 2), "Pair"),
        (enum.IntEnum("Number", "ONE")(1), "Number"),
        (object(), "register"),
        (len, "allow_pickle"),
        ([{1: (lambda: 0,)}], "function"),
        (np.ones(2, "O"), "object"),
        (np.ones(2, ">f8"), "byte order"),
        (np.ones(2, "i4,f4"), "dtypes"),
        (np.longdouble(1), "dtypes"),
        (np.datetime64(1, "s"), "dtypes"),
        (np.ma.ones(2), "MaskedArray"),
        (np.dtype("U3"), "dtypes"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_unsupported_type_is_refused_by_name(value: Any, words: str) -> None:
    with pytest.raises(CodecError, match=words):
        walk(value)


def test_an_object_that_contains_itself_is_refused() -> None:
    loop: list[Any] = [1]
    loop.append({"again": loop})
    with pytest.raises(CodecError, match="list contains itself"):
        walk(loop)


WRAPS: list[Callable[[Any], Any]] = [lambda x: [x], lambda x: (x,), lambda x: {1: x}]


def nested(wrap: Callable[[Any], Any], levels: int) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = wrap(value)
    return value


@pytest.mark.parametrize("wrap", WRAPS)
def test_depth_has_one_limit_on_both_sides(wrap: Callable[[Any], Any]) -> None:
    assert through(nested(wrap, MAX_DEPTH)) == nested(wrap, MAX_DEPTH)
    with pytest.raises(CodecError, match="deeper than"):
        walk(nested(wrap, MAX_DEPTH + 1))


@pytest.mark.parametrize("wrap", WRAPS)
def test_levels_of_an_object_that_occurs_twice_count_where_it_occurs_again(
    wrap: Callable[[Any], Any],
) -> None:
    inner = nested(wrap, MAX_DEPTH // 2)
    deepest = [inner, around(inner, MAX_DEPTH // 2 - 1)]
    assert through(deepest) == deepest
    deeper = [inner, around(inner, MAX_DEPTH // 2)]
    assert encode_plain(deeper) is None
    with pytest.raises(CodecError, match="deeper than"):
        walk(deeper)


def around(value: Any, levels: int) -> Any:
    for _ in range(levels):
        value = [value]
    return value


def test_a_stream_with_deep_references_is_refused() -> None:
    step = bytes([Tag.LIST]) + COUNT.pack(1)
    stream, count = bytes([Tag.LIST]) + COUNT.pack(5) + bytes([Tag.NONE]), -1
    for _ in range(4):  # lists of 100 levels, each around the one before
        inner = bytes([Tag.NONE]) if count < 0 else bytes([Tag.REF]) + COUNT.pack(count)
        stream, count = stream + step * 100 + inner, count + 100
    with pytest.raises(CodecError, match="deeper than"):
        decode(memoryview(stream), Payload(np.empty(0, np.uint8)))


def test_the_deepest_key_is_supported() -> None:
    value = {nested(lambda x: (x,), MAX_DEPTH - 1): 1}
    assert through(value) == value
    with pytest.raises(CodecError, match="deeper than"):
        walk({nested(lambda x: (x,), MAX_DEPTH): 1})


def test_registered_types_run_only_the_receivers_own_functions() -> None:
    ran: list[str] = []

    class Loud:
        def __init__(self) -> None:
            ran.append("made")

        def __reduce__(self) -> Any:
            raise AssertionError("pickle was asked")

    register_type(Loud, lambda _: "state", lambda state: ran.append(state) or Loud(), "loud")
    through(Loud())
    assert ran == ["made", "state", "made"]


def test_a_dataclass_is_filled_in_without_its_constructor() -> None:
    @register_dataclass
    @dataclasses.dataclass
    class Checked:
        x: int
        seen: list[int] = dataclasses.field(default_factory=list)

        def __post_init__(self) -> None:
            self.seen.append(self.x)

    assert through(Checked(3)).seen == [3]


def test_a_type_that_the_receiver_does_not_know_is_an_error() -> None:
    message = walk(Report(1, 2))
    header = message.header.replace(b"Report", b"Retort")
    with pytest.raises(CodecError, match=r"Retort.*register_dataclass"):
        decode(memoryview(header), Payload(np.empty(0, np.uint8)))


def test_a_dataclass_of_other_fields_is_an_error() -> None:
    header = walk(Report(1, 2)).header.replace(b"step", b"stop")
    with pytest.raises(CodecError, match="has the fields"):
        decode(memoryview(header), Payload(np.empty(0, np.uint8)))


def test_names_are_given_once() -> None:
    with pytest.raises(ValueError, match="the point"):
        register_type(complex, str, complex, "the point")
    with pytest.raises(TypeError, match="not a dataclass"):
        register_dataclass(Colour)


def test_map_location_replaces_arrays() -> None:
    x = np.arange(3)
    assert through([x, {"y": x}, 5], locate=lambda a: a.tolist()) == [
        [0, 1, 2],
        {"y": [0, 1, 2]},
        5,
    ]
    with pytest.raises(CodecError, match="map_location failed: ZeroDivisionError"):
        through(x, locate=lambda a: 1 / 0)


# Pickles


class Bomb:
    went_off = False

    def __reduce__(self) -> Any:
        return setattr, (Bomb, "went_off", True)


def test_a_pickle_runs_only_with_allow_pickle() -> None:
    message = encode_pickled(Bomb())
    envelope, flat = message.envelope(), message.flat()
    with pytest.raises(CodecError, match="allow_pickle=True"):
        envelope.open(flat)
    assert not Bomb.went_off
    envelope.open(flat, allow_pickle=True)
    assert Bomb.went_off
    Bomb.went_off = False


def test_a_pickle_disguised_as_codec_runs_nothing() -> None:
    message = encode_pickled(Bomb())
    disguised = Envelope(MessageKind.CODEC, len(message.header), 0)
    with pytest.raises(CodecError):
        disguised.open(message.flat(), allow_pickle=True)
    assert not Bomb.went_off


@settings(deadline=None, max_examples=60)
@given(value=VALUES)
def test_pickles_carry_arrays_out_of_band(value: Any) -> None:
    message = encode_pickled(value)
    assert same(message.envelope().open(message.flat(), allow_pickle=True), value)
    x = np.arange(5000)
    assert np.shares_memory(encode_pickled(x).chunks[0], x)


def test_a_broken_pickle_is_a_codec_error() -> None:
    for stream in (b"", b"\x00" * 4, COUNT.pack(2**32 - 1), COUNT.pack(0) + b"garbage"):
        message = EncodedMessage(MessageKind.PICKLE, stream)
        with pytest.raises(CodecError, match="pickle can't be read"):
            message.envelope().open(message.flat(), allow_pickle=True)


# Untrusted streams


def opened(header: bytes, payload: bytes = b"") -> Any:
    return decode(memoryview(header), Payload(np.frombuffer(payload, np.uint8)))


@settings(deadline=None, max_examples=400)
@given(header=st.binary(max_size=60), payload=st.binary(max_size=200))
def test_garbage_is_an_error_or_a_value(header: bytes, payload: bytes) -> None:
    try:
        opened(header, payload)
    except CodecError:
        return


@st.composite
def mutations(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """Draw a message with a few bytes changed, removed, inserted or cut off."""
    message = walk(draw(VALUES))
    header, flat = bytearray(message.header), message.flat()
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(header)))
        new = draw(st.binary(max_size=8) | st.sampled_from([b"\xff" * 4, b"\xff" * 8]))
        header[at : at + draw(st.integers(0, 8))] = new
    start = aligned(message.envelope().header)
    return bytes(header), flat[start : start + draw(st.integers(0, 300))].tobytes()


@settings(deadline=None, max_examples=600)
@given(mutated=mutations())
def test_a_damaged_message_is_an_error_or_a_value(mutated: tuple[bytes, bytes]) -> None:
    try:
        opened(*mutated)
    except CodecError:
        return


@settings(deadline=None, max_examples=100)
@given(value=VALUES, data=st.data())
def test_a_message_that_was_cut_off_is_an_error(value: Any, data: st.DataObject) -> None:
    header = walk(value).header
    end = data.draw(st.integers(0, len(header) - 1))
    with pytest.raises(CodecError):
        opened(header[:end], bytes(10_000))


NONE, REF = bytes([Tag.NONE]), bytes([Tag.REF])
MANY = COUNT.pack(2**32 - 1)


def doubling(tag: Tag, levels: int, around: bytes = b"") -> bytes:
    """Return a stream with a key of nested tuples, each holding the next twice, in `around`."""
    tuples = b"".join(
        bytes([Tag.TUPLE]) + COUNT.pack(2) + 2 * (REF + COUNT.pack(n)) for n in range(levels)
    )
    key = around + REF + COUNT.pack(levels)
    body = bytes([Tag.TUPLE]) + COUNT.pack(0) + tuples + bytes([tag]) + COUNT.pack(1) + key
    return bytes([Tag.LIST]) + COUNT.pack(levels + 2) + body + (NONE if tag is Tag.DICT else b"")


HOSTILE = {
    "nothing": b"",
    "an unknown tag": b"\xc8",
    "a list of 4 billion": bytes([Tag.LIST]) + MANY,
    "a dict of 4 billion": bytes([Tag.DICT]) + MANY + NONE * 50,
    "text of 4 GB": bytes([Tag.TEXT]) + MANY + b"abc",
    "an int of 4 GB": bytes([Tag.BIG_INT]) + MANY + b"abc",
    "a blob of 2**62": bytes([Tag.BLOB]) + INT64.pack(2**62),
    "a blob of less than nothing": bytes([Tag.BLOB]) + INT64.pack(-1),
    "an array of 2**62": bytes([Tag.ARRAY, 14, 1]) + INT64.pack(2**62),
    "an array whose size overflows": bytes([Tag.ARRAY, 14, 2]) + INT64.pack(2**62) * 2,
    "an array of negative shape": bytes([Tag.ARRAY, 14, 2]) + INT64.pack(-1) * 2,
    "an empty array of absurd shape": bytes([Tag.ARRAY, 14, 3]) + INT64.pack(2**62) * 2 + bytes(8),
    "an array of 255 dimensions": bytes([Tag.ARRAY, 14, 255]) + INT64.pack(1) * 255,
    "an array of no known type": bytes([Tag.ARRAY, 99, 0]),
    "a dtype of no known type": bytes([Tag.DTYPE, 99]),
    "a truth value of 7": bytes([Tag.SCALAR, 0, 7]),
    "bad UTF-8": bytes([Tag.TEXT]) + COUNT.pack(1) + b"\xff",
    "a reference to nothing": REF + COUNT.pack(0),
    "a reference to its own container": bytes([Tag.LIST]) + COUNT.pack(1) + REF + COUNT.pack(0),
    "a list as a key": bytes([Tag.DICT]) + COUNT.pack(1) + bytes([Tag.LIST]) + bytes(4) + NONE,
    "a key twice": bytes([Tag.DICT]) + COUNT.pack(2) + NONE * 4,
    "an element twice": bytes([Tag.SET]) + COUNT.pack(2) + NONE * 2,
    "1 and True as keys": bytes([Tag.SET]) + COUNT.pack(2) + bytes([Tag.TRUE, Tag.INT8, 1]),
    "an object named by a list": bytes([Tag.OBJECT, Tag.LIST]) + bytes(4) + NONE,
    "an object of a builtin": bytes([Tag.OBJECT, Tag.TEXT]) + COUNT.pack(4) + b"eval" + NONE,
    "100,000 levels of lists": (bytes([Tag.LIST]) + COUNT.pack(1)) * 100_000 + NONE,
    "100,000 levels of tuples": (bytes([Tag.TUPLE]) + COUNT.pack(1)) * 100_000 + NONE,
    "a set of 2**60": doubling(Tag.SET, 60),
    "a key of 2**60": doubling(Tag.DICT, 60),
    "2**60 within a key": doubling(Tag.DICT, 60, bytes([Tag.TUPLE]) + COUNT.pack(1)),
    "something left over": NONE + NONE,
}


@pytest.mark.parametrize("header", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.timeout(10)
def test_hostile_streams_are_errors_at_once(header: bytes) -> None:
    with pytest.raises(CodecError):
        opened(header)


def test_an_array_of_truth_values_holds_no_others() -> None:
    head = bytes([Tag.ARRAY, 0, 1]) + INT64.pack(2)
    assert opened(head, b"\0\1").tolist() == [False, True]
    with pytest.raises(CodecError, match="truth"):
        opened(head, b"\0\2")


def test_unused_payload_is_an_error() -> None:
    with pytest.raises(CodecError, match="payload"):
        opened(NONE, bytes(64))


# Messages


@given(n=st.integers(1, 2**41))
def test_sizes_are_few_and_hardly_larger(n: int) -> None:
    assert n <= rounded(n) <= max(n + 63, n + n // 16 + 1)
    assert rounded(rounded(n)) == rounded(n)
    assert rounded(n) % 64 == 0


def test_between_powers_of_two_there_are_16_sizes() -> None:
    assert len({rounded(n) for n in range(2**16 + 1, 2**17 + 1)}) == 16


@given(words=st.tuples(*[st.integers(-(2**63), 2**63 - 1) | st.integers(-1, 4)] * 4))
def test_no_envelope_claims_more_than_a_terabyte(words: tuple[int, int, int, int]) -> None:
    try:
        envelope = Envelope.read(np.array(words).view(np.uint8))
    except CodecError:
        return
    assert 0 <= envelope.nbytes <= 2**41


def test_gaps_of_a_message_hold_no_old_memory() -> None:
    message = walk([np.full(3, 7, np.uint8), np.full(5, 7, np.uint8)])
    flat = message.flat()
    start = aligned(len(message.header))
    assert flat[:start].tobytes() == message.header.ljust(start, b"\0")
    assert flat[start:].tobytes() == (b"\7" * 3).ljust(64, b"\0") + (b"\7" * 5).ljust(
        flat.size - start - 64, b"\0"
    )


def test_a_failure_reports_its_reason() -> None:
    message = EncodedMessage.failed(ValueError("no way"))
    with pytest.raises(CodecError, match="ValueError: no way"):
        message.envelope().open(message.flat())


def test_the_mark_of_a_scatter_is_never_taken_for_a_pickle() -> None:
    stream = pickle.dumps(1)
    disguised = Envelope(MessageKind.TABLE_FOLLOWS, len(stream), 0)
    with pytest.raises(CodecError, match="scatter"):
        disguised.open(np.frombuffer(stream, np.uint8), allow_pickle=True)


def test_errors_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(CodecError("x", rank=3)))
    assert isinstance(error, ValueError)
    assert error.rank == 3
