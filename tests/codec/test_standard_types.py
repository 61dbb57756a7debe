"""Types that need no registration come back the same; classes are found by name and run nothing."""

import argparse
import enum
import pathlib
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

import nc10d as dist
from nc10d.codec import encode, standard_types
from nc10d.errors import CodecError


class Pair(NamedTuple):
    left: Any
    right: Any = 2


class Named(namedtuple("Named", "x")):
    def double(self) -> Any:
        return 2 * self.x


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    HIGH = 3


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Outer:
    class Inner(NamedTuple):
        z: int


def through(value: Any) -> Any:
    message = encode(value)
    return message.envelope().open(message.flat())


def with_attributes(value: Any, **attributes: Any) -> Any:
    vars(value).update(attributes)
    return value


VALUES = [
    OrderedDict([("b", 1), ("a", [2])]),
    defaultdict(list, {"a": [1]}),
    defaultdict(None, {1: 2}),
    Counter("abca"),
    deque([1, 2, 3], 3),
    deque([1]),
    argparse.Namespace(lr=0.1, path=pathlib.Path("/data")),
    SimpleNamespace(a=argparse.Namespace()),
    pathlib.Path("/data/7"),
    pathlib.PurePosixPath("a/b"),
    Pair(1, ["x"]),
    Pair(Pair(0), None),
    Named(3),
    Outer.Inner(4),
    Colour.RED,
    Level.HIGH,
    Access.READ,
    {Pair(1): Colour.RED, pathlib.Path("k"): 1, Level.HIGH: (Pair(2),)},
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_comes_back_with_its_type(value: Any) -> None:
    back = through(value)
    assert back == value
    assert type(back) is type(value)
    if isinstance(value, OrderedDict):
        assert list(back) == list(value)
    if isinstance(value, defaultdict):
        assert back.default_factory is value.default_factory
    if isinstance(value, deque):
        assert back.maxlen == value.maxlen


def test_an_ordered_dict_keeps_its_attributes_as_a_state_dict_needs() -> None:
    value = with_attributes(OrderedDict(weight=np.ones(3)), _metadata=OrderedDict({"": {"v": 2}}))
    back = through(value)
    assert back["weight"].tolist() == [1, 1, 1]
    assert back._metadata == value._metadata


def test_a_named_tuple_keeps_its_methods_and_is_one_object_where_it_was_one() -> None:
    pair = Pair(1)
    back = through([pair, pair, Named(4)])
    assert back[0] is back[1]
    assert back[2].double() == 8


@pytest.mark.ranks(2)
def test_objects_of_programs_travel_between_ranks(world: dist.ProcessGroup) -> None:
    places = [Pair(world.rank, OrderedDict(a=1)) if world.rank == 0 else None]
    dist.broadcast_object_list(places)
    assert places[0] == Pair(0, OrderedDict(a=1))


REFUSED = [
    (namedtuple("Unknown", "a")(1), "Unknown"),
    (Access.READ | Access.WRITE, "send its value"),
    (defaultdict(lambda: 1), "factory"),
    (enum.Enum("Made", "ONE")(1), "Made"),
    (sys.float_info, "float_info"),
]


@pytest.mark.parametrize(("value", "words"), REFUSED)
def test_a_class_that_no_receiver_could_find_is_refused(value: Any, words: str) -> None:
    with pytest.raises(CodecError, match=words):
        encode(value)


def hostile(state: Any, name: Any = standard_types.NAMED_TUPLE) -> Any:
    """Decode a stream that names a class of its sender's choice."""
    return through(Forged(name, state))


class Forged(NamedTuple):
    name: Any
    state: Any


@pytest.fixture(autouse=True)
def forge(monkeypatch: pytest.MonkeyPatch) -> None:
    from nc10d.codec import encoder

    known = encoder._state

    def state(value: Any, kind: type[Any]) -> Any:
        return tuple(value) if kind is Forged else known(value, kind)

    monkeypatch.setattr(encoder, "_state", state)


class Loud(NamedTuple):
    x: int

    def __eq__(self, other: object) -> bool:
        raise AssertionError("a stream has run code")

    __hash__ = None  # type: ignore[assignment]


class Closing(namedtuple("Closing", "path")):
    def __del__(self) -> None:
        raise AssertionError("a stream has run code")


class Bait(ModuleType):
    def __getattr__(self, name: str) -> Any:
        raise AssertionError("a stream has run code")


HERE = __name__
DOUBLED: Any = ()
for _ in range(60):
    DOUBLED = DOUBLED, DOUBLED
FORGERIES = [
    (HERE, "Missing", ("x",), (1,)),
    ("subprocess", "Popen", ("args",), ("true",)),
    ("not.imported", "Pair", ("left", "right"), (1, 2)),
    ("bait", "Pair", ("left", "right"), (1, 2)),
    (HERE, "Pair.left", ("x",), (1,)),
    (HERE, "VALUES", ("x",), (1,)),
    (HERE, "Pair", ("left",), (1,)),
    (HERE, "Pair", ("left", "right"), (1, 2, 3)),
    (HERE, "Loud", ("x",), (1,)),
    (HERE, "Closing", ("path",), ("/",)),
    (HERE, "Outer", (), ()),
    ("time", "struct_time", (), ()),
    (1, 2, 3, 4),
    "text",
]


@pytest.mark.parametrize("state", FORGERIES, ids=str)
def test_a_forged_named_tuple_is_an_error_and_runs_nothing(
    state: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "bait", Bait("bait"))
    with pytest.raises(CodecError):
        hostile(state)


@pytest.mark.parametrize(
    ("name", "state"),
    [
        (standard_types.MEMBER, (HERE, "Colour", "BLUE")),
        (standard_types.MEMBER, (HERE, "Pair", "left")),
        (standard_types.MEMBER, (HERE, "Colour", 1)),
        ("collections.OrderedDict", {"a": 1}),
        ("collections.OrderedDict", ({}, {1: 2})),
        ("collections.defaultdict", (("eval",), {})),
        ("collections.deque", ([], ("x",))),
        ("collections.Counter", [1]),
        ("argparse.Namespace", [1]),
        ("pathlib.PosixPath", 3),
        # Tuples of 2**60 parts take no time.
        ("collections.OrderedDict", DOUBLED),
        ("collections.defaultdict", ((DOUBLED,), {})),
        ("collections.deque", ([], (DOUBLED,))),
        ("datetime.timedelta", DOUBLED),
        ("datetime.datetime", DOUBLED),
        (standard_types.MEMBER, (HERE, "Colour", DOUBLED)),
        (standard_types.NAMED_TUPLE, (HERE, "Pair", DOUBLED, ())),
        (standard_types.NAMED_TUPLE, DOUBLED),
        (DOUBLED, 1),
    ],
)
@pytest.mark.timeout(10)
def test_a_forged_state_is_an_error(name: Any, state: Any) -> None:
    with pytest.raises(CodecError):
        hostile(state, name)


def test_a_stream_imports_no_module() -> None:
    sys.modules.pop("wave", None)
    with pytest.raises(CodecError, match="imported no such class"):
        hostile(("wave", "_wave_params", ("nchannels",), (1,)))
    assert "wave" not in sys.modules
