"""Object calls whose operation is prepared: hooks of compiled code write and read the objects.

A call of a kind is prepared from its second time on. It then behaves as the first, whatever the
earlier calls have carried, and leaves nothing behind.
"""

import gc
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from entered_functions import python_frames
from hypothesis import given, settings
from hypothesis import strategies as st

import nc10d as dist
from nc10d import CodecError
from nc10d.codec.messages import OPENING, WORDS, MessageKind
from nc10d.codec.openings import pools
from nc10d.testing import Ranks, run_ranks

SIZE = 2
Call = Callable[[Any, Any, Any], Any]


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(SIZE, timeout=20) as ranks:
        yield ranks


# Each call moves an object of each rank, or of rank 1; it returns the objects that came.


def broadcast(group: Any, obj: Any, places: list[Any]) -> Any:
    places[:] = [obj if group.rank == 1 else None]
    dist.broadcast_object_list(places, 1, group)
    return [*places]


def all_gather(group: Any, obj: Any, places: list[Any]) -> Any:
    places[:] = [None] * SIZE
    dist.all_gather_object(places, obj, group)
    return [*places]


def gather(group: Any, obj: Any, places: list[Any]) -> Any:
    places[:] = [None] * SIZE
    dist.gather_object(obj, places if group.rank == 1 else None, 1, group)
    return [*places] if group.rank == 1 else None


def message(group: Any, obj: Any, places: list[Any]) -> Any:
    places[:] = [None]
    if group.rank == 1:
        dist.send_object_list([obj], 0, group)
    else:
        assert dist.recv_object_list(places, 1, group) == 1
    return [*places]


def scatter(group: Any, obj: Any, places: list[Any]) -> Any:
    places[:] = [None, "not filled"]
    dist.scatter_object_list(places, [obj, "for rank 1"] if group.rank == 1 else None, 1, group)
    assert places[1:] == ["not filled"]
    return places[:1]


CALLS: list[Call] = [broadcast, all_gather, gather, scatter, message]


def expected(call: Call, rank: int, objs: list[Any]) -> Any:
    if call is all_gather or (call is gather and rank == 1):
        return objs
    if call is gather:
        return None
    if rank == 1 and call in (message, scatter):
        return [None] if call is message else ["for rank 1"]
    return [objs[1]]


class Broken:
    """An object that can't be encoded."""

    def __reduce__(self) -> Any:
        raise LookupError("it won't be pickled")


SMALL = st.recursive(
    st.none() | st.integers() | st.text(max_size=5) | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
OBJECTS = st.one_of(
    SMALL,
    st.integers(900, OPENING + 100).map(bytes),
    st.sampled_from([1, 40, 2000, 100_000]).map(lambda n: np.arange(n).tobytes()),
    st.just((1, 2, {3: frozenset({4})})),
    st.builds(Broken),
)


def nothing_follows_the_messages() -> bool:
    """Return whether the openings that came last, by all_gather and scatter, end in zeros."""
    kept = [row for each in pools[SIZE] for row in (*each.table, each.own)]
    ends = [WORDS.size + int(WORDS.unpack_from(row.data)[1]) for row in kept]
    return not any(row[end:].any() for row, end in zip(kept, ends, strict=True))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(CALLS), OBJECTS, OBJECTS), min_size=2, max_size=8))
def test_any_sequence_of_calls_carries_its_objects(two: Ranks, rounds: list[Any]) -> None:
    def body(group: Any) -> list[Any]:
        found, places = [], list[Any]()
        for call, *objs in rounds:
            try:
                found.append(call(group, objs[group.rank], places))
            except CodecError as error:
                found.append(error)
        assert all_gather(group, None, places) == [None] * SIZE, "the ranks are out of step"
        return found

    for rank, results in enumerate(two.run(body)):
        for (call, *objs), result in zip(rounds, results, strict=True):
            sent = objs if call in (all_gather, gather) else objs[1:]
            if any(isinstance(each, Broken) for each in sent):
                assert isinstance(result, CodecError)
            else:
                assert result == expected(call, rank, objs)
    assert nothing_follows_the_messages(), "bytes of earlier objects have travelled"


def made_twice(group: Any) -> None:
    """Make each call as often as it takes to prepare it."""
    for _ in range(2):
        for call in CALLS:
            call(group, group.rank, [])


def fewest_frames(calls: Callable[[], object]) -> int:
    """Return the fewest Python frames of some equal calls: of one whose peer was not late."""
    return min(python_frames(calls) for _ in range(30))


FRAMES: dict[str, tuple[Any, int]] = {
    "int": (1, 8),
    "dict": ({"a": [1, 2.5]}, 8),
    "bytes": (bytes(3000), 8),
    "array": (np.arange(3), 18),  # functions of Python encode and decode it
}


@pytest.mark.parametrize("kind", FRAMES)
def test_a_prepared_call_takes_few_python_frames(two: Ranks, kind: str) -> None:
    obj, most = FRAMES[kind]

    def body(group: Any) -> list[int]:
        return [fewest_frames(partial(call, group, obj, [])) for call in CALLS]

    assert max(map(max, two.run(body))) <= most  # the rest of a call in Python takes 20 more


def test_arrays_to_the_same_rank_do_not_displace_it(two: Ranks) -> None:
    def body(group: Any) -> int:
        array = np.full(5, group.rank, np.float32)

        def both() -> None:
            found = message(group, {"shape": 5}, [])
            group.send(array, 0) if group.rank == 1 else group.recv(array, 1)
            assert found == [{"shape": 5}] or group.rank == 1
            assert array.sum() == 5

        return fewest_frames(both)

    assert max(two.run(body)) <= 20


class OtherList(list[Any]):
    """A list of another type."""


def test_lists_of_other_types_are_sent_and_filled_as_well(two: Ranks) -> None:
    def body(group: Any) -> Any:
        made_twice(group)
        sent, places, all_places = (OtherList([7]), OtherList([None]), OtherList([None] * SIZE))
        if group.rank == 1:
            dist.send_object_list(sent, 0, group)
        else:
            dist.recv_object_list(places, 1, group)
        dist.all_gather_object(all_places, group.rank, group)
        return places, all_places

    assert two.run(body) == [
        (OtherList([7]), OtherList([0, 1])),
        (OtherList([None]), OtherList([0, 1])),
    ]


def forged(stream: bytes) -> np.ndarray[Any, Any]:
    """Return the first piece of a message with this stream."""
    piece = np.zeros(1024, np.uint8)
    WORDS.pack_into(piece.data, 0, MessageKind.PLAIN, len(stream), 0, 0)
    piece[WORDS.size : WORDS.size + len(stream)] = np.frombuffer(stream, np.uint8)
    return piece


@pytest.mark.parametrize(
    "stream",
    [
        b"\x80\x05]\x8c\x02\xff\xfea.",  # text that is no UTF-8: found by pickle alone
        b"\x80\x05]}]K\x01sa.",  # a key that can't be hashed
        b"\x80\x05cos\nsystem\n.",
        b"\x80\x05].",  # a list of another length
        b"\x80\x05K\x01.",  # no list
    ],
)
def test_a_forged_stream_is_an_error_that_names_its_sender(two: Ranks, stream: bytes) -> None:
    def body(group: Any) -> Any:
        made_twice(group)
        places, result = [5], None
        if group.rank == 1:
            group.send(forged(stream), 0)
        else:
            with pytest.raises(CodecError, match=r"from rank 1|rank 1 has sent") as error:
                dist.recv_object_list(places, 1, group)
            result = error.value.rank, places
        return result, message(group, "after", [])

    assert two.run(body) == [((1, [5]), ["after"]), (None, [None])]


@pytest.mark.parametrize("error", [MemoryError, RecursionError, LookupError])
def test_a_call_that_fails_before_its_hooks_begin_is_made_in_python(
    two: Ranks, error: type[Exception]
) -> None:
    def fails(*_: Any) -> int:
        raise error

    def body(group: Any) -> Any:
        made_twice(group)
        for prepared in group._preparing.hooked.values():
            prepared.run_hooked = fails
        found = [call(group, {"new": group.rank}, []) for call in CALLS]
        for prepared in group._preparing.hooked.values():
            prepared.make_hooked()
        return found, [call(group, {"newer": group.rank}, []) for call in CALLS]

    for rank, found in enumerate(two.run(body)):
        for name, results in zip(("new", "newer"), found, strict=True):
            objs = [{name: each} for each in range(SIZE)]
            assert results == [expected(call, rank, objs) for call in CALLS]


def launches(group: Any) -> list[int]:
    """Return how many launches each of several equal messages and collectives is."""
    found = []
    for obj in (1, bytes(2500), bytes(100_000)):
        for turn in range(4):
            if turn == 3 and group.rank == 1:
                threading.Event().wait(0.2)  # as in `late`: the number is the same
            before = group.seq
            message(group, obj, [])
            all_gather(group, obj, [])
            found.append(group.seq - before)
    return found


def test_a_call_is_as_many_launches_with_hooks_as_without(two: Ranks) -> None:
    counts = two.run(launches)
    assert counts == [[2] * 4 + [4] * 4 + [4] * 4] * SIZE


class Counted:
    """A small array whose encoder is counted, and may do something else."""

    nbytes = 16

    def __init__(self, also: Callable[[], object] = int) -> None:
        self.also, self.encoded = also, 0

    def encode(self) -> Any:
        self.encoded += 1
        self.also()
        return np.zeros(2)


dist.register_type(
    Counted, Counted.encode, lambda _: Counted(), "counted", move=lambda value, _: value
)


def test_the_encoder_of_a_small_array_runs_once_in_each_call(two: Ranks) -> None:
    def body(group: Any) -> list[list[int]]:
        sub = group.split_group([[0, 1]])  # whose first calls these are
        sent = [[Counted() for _ in range(4)] for _ in CALLS]
        for call, counted in zip(CALLS, sent, strict=True):
            for each in counted:
                call(sub, each, [])
        sub.close()
        return [[each.encoded for each in counted] for counted in sent]

    counts = two.run(body)
    assert counts == [[[0] * 4, [1] * 4, [1] * 4, [0] * 4, [0] * 4], [[1] * 4] * 5]


@pytest.mark.parametrize("other", [2, "x" * 5000, {1j}], ids=["fits", "long", "not plain"])
def test_the_encoder_of_a_scattered_array_runs_once_whatever_else_is_sent(
    two: Ranks, other: Any
) -> None:
    def body(group: Any) -> Any:
        made_twice(group)
        sent, places = Counted(), [None]
        objects = [sent, other] if group.rank == 1 else None
        dist.scatter_object_list(places, objects, 1, group)
        return sent.encoded, places[0]

    (none, array), (once, value) = two.run(body)
    assert (none, once) == (0, 1)
    assert isinstance(array, Counted)
    assert value == other


def test_a_place_that_goes_amid_a_scatter_comes_back(two: Ranks) -> None:
    def body(group: Any, **how: Any) -> Any:
        made_twice(group)
        places: list[Any] = [None]
        objects = [Counted(places.clear), 2] if group.rank == 1 else None
        dist.scatter_object_list(places, objects, 1, group, **how)
        return places

    for how in ({}, {"map_location": "cpu"}):  # the second in Python
        assert two.run(partial(body, **how))[1] == [2]


@pytest.mark.parametrize("word", [MessageKind.FAILED, MessageKind.CODEC + 256])
def test_a_scattered_opening_without_its_parts_is_an_error_that_names_the_root(
    two: Ranks, word: int
) -> None:
    opening = np.zeros(OPENING, np.uint8)
    WORDS.pack_into(opening.data, 0, word, OPENING, 10, 0)
    opening[WORDS.size :].data[:16] = np.array([0, 1 << 20]).tobytes()  # a long chunk

    def body(group: Any) -> Any:
        made_twice(group)
        if group.rank == 1:
            group.scatter_single(opening.copy(), np.tile(opening, (SIZE, 1)), 1)
        else:
            with pytest.raises(CodecError, match="rank 1 has sent a part"):
                dist.scatter_object_list([None], None, 1, group)
        return scatter(group, "after", [])

    assert two.run(body) == [["after"], ["for rank 1"]]


@pytest.mark.parametrize("call", CALLS)
def test_calls_that_fail_leave_no_cycles(two: Ranks, call: Call) -> None:
    def body(group: Any) -> int:
        made_twice(group)
        group.barrier()
        gc.collect()
        gc.disable()
        group.barrier()
        for _ in range(10):
            with pytest.raises(CodecError):
                call(group, object.__new__(Broken), [])
        group.barrier()
        found = gc.collect() if group.rank == 0 else 0
        group.barrier()
        gc.enable()
        return found

    # A first failure, on either rank, loads code.
    assert any(two.run(body)[0] < 30 for _ in range(3)), "3 objects a call"


@pytest.mark.parametrize("obj", [b"short", bytes(100_000)], ids=len)
def test_a_list_that_changes_amid_a_call_is_filled_all_the_same(two: Ranks, obj: bytes) -> None:
    def body(group: Any) -> Any:
        made_twice(group)
        places: list[Any] = [None] * SIZE
        mine = Counted(lambda: places.append(7)) if group.rank == 0 else obj
        dist.all_gather_object(places, mine, group)
        return len(places), places[1], message(group, "after", [])

    assert two.run(body) == [(SIZE, obj, ["after"]), (SIZE, obj, [None])]


def test_a_list_to_scatter_that_changes_amid_the_call_is_refused_and_nothing_sent(
    two: Ranks,
) -> None:
    def body(group: Any) -> Any:
        made_twice(group)
        if group.rank == 1:
            values = list[Any]()
            for change in (partial(values.append, 7), values.clear):
                values[:] = Counted(change), 2
                with pytest.raises(ValueError, match="scatter_object_input_list"):
                    dist.scatter_object_list([None], values, 1, group)
        return scatter(group, "after", [])

    assert two.run(body) == [["after"], ["for rank 1"]]


def test_calls_keep_nothing_of_what_they_carry(two: Ranks) -> None:
    shared = object.__new__(Broken), "a text of its own" * 3

    def body(group: Any) -> tuple[int, int]:
        def once() -> None:
            for call in CALLS:
                call(group, [shared[1], {"a": 1.5}, bytes(2000)], [])
                with pytest.raises(CodecError):
                    call(group, shared[0], [])
            if group.rank == 1:
                group.send(forged(b"\x80\x05]\x8c\x02\xff\xfea."), 0)
            else:
                with pytest.raises(CodecError):
                    dist.recv_object_list([None], 1, group)

        def kept() -> tuple[int, int]:
            group.barrier()
            gc.collect()
            found = sys.getallocatedblocks(), sys.getrefcount(shared[1])
            group.barrier()
            return found

        for _ in range(20):
            once()
        before = kept()
        for _ in range(100):
            once()
        after = kept()
        return after[0] - before[0], after[1] - before[1]

    for blocks, references in two.run(body):
        assert references == 0
        assert blocks < 300, "1,100 calls a rank have left more than 300 blocks"


class Alarm(Exception):
    """What the handler of a signal raises."""


class Ringing:
    """A small array whose encoding or decoding a signal interrupts."""

    nbytes = 16
    sends = takes = False


def ring(now: bool, result: Any) -> Any:
    """Return a result, after a signal has come if it shall come `now`."""
    if now:
        signal.raise_signal(signal.SIGUSR1)
    return result


def interrupted(group: Any) -> list[str]:
    """Interrupt calls of this rank 0 in their hooks; both ranks go on."""

    def on_alarm(*_: object) -> None:
        raise Alarm

    signal.signal(signal.SIGUSR1, on_alarm)
    dist.register_type(
        Ringing,
        lambda _: ring(Ringing.sends, np.zeros(2)),
        lambda _: ring(Ringing.takes, Ringing()),
        "ringing",
        move=lambda value, _: value,
    )
    made_twice(group)
    found = []
    if group.rank == 0:
        Ringing.sends = True
        with pytest.raises(Alarm):
            dist.all_gather_object([None, None], Ringing(), group)
        Ringing.sends = False
    found += [type(each).__name__ for each in all_gather(group, Ringing(), [])]
    if group.rank == 0:
        Ringing.takes = True
        with pytest.raises(Alarm):
            dist.recv_object_list([None], 1, group)
        Ringing.takes = False
    else:
        dist.send_object_list([Ringing()], 0, group)
    return found + [type(each).__name__ for each in message(group, Ringing(), [])]


def test_the_error_of_a_signals_handler_comes_out_of_a_hook() -> None:
    names = ["Ringing", "Ringing"]
    assert run_ranks(interrupted, 2, "processes") == [[*names, "Ringing"], [*names, "NoneType"]]


def late(group: Any) -> list[Any]:
    """Let rank 1 come late: the hooks of rank 0 stop, and Python waits as for any other call."""
    made_twice(group)
    found = []
    for call in CALLS:
        if group.rank == 1:
            # Longer than a slice of the engine; an earlier return would have the same results.
            threading.Event().wait(0.2)
        found.append(call(group, group.rank, []))
    return found


def test_a_rank_that_comes_late_is_waited_for(two: Ranks) -> None:
    assert two.run(late) == [
        [[1], [0, 1], None, [1], [1]],
        [[1], [0, 1], [0, 1], ["for rank 1"], [None]],
    ]
