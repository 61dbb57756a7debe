"""The object calls: objects arrive, and the group stays in step after any error."""

import dataclasses
import resource
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from entered_functions import python_frames
from hypothesis import given, settings
from hypothesis import strategies as st

import nc10d as dist
from nc10d import CodecError
from nc10d.codec.messages import OPENING, PIECE, MessageKind
from nc10d.testing import Ranks, run_local, run_ranks

SIZE = 3
Call = Callable[..., Any]


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with Ranks(SIZE, timeout=20) as ranks:
        yield ranks


@dist.register_dataclass
@dataclasses.dataclass
class Metrics:
    step: int
    losses: Any


class Stranger:
    """An object that the codec does not carry; each unpickling is counted."""

    unpickled = 0

    def __reduce__(self) -> Any:
        return _count, ()


class Broken:
    """An object that can't be pickled either."""

    def __reduce__(self) -> Any:
        raise LookupError("it won't be pickled")


def _count() -> str:
    Stranger.unpickled += 1
    return "a stranger"


# Each call moves an object from rank 1 (or from every rank); it returns the received object.


def broadcast(group: Any, obj: Any, **how: Any) -> Any:
    places = [obj if group.rank == 1 else None]
    dist.broadcast_object_list(places, 1, group, **how)
    return places[0]


def all_gather(group: Any, obj: Any, **how: Any) -> Any:
    places: list[Any] = [None] * group.size
    dist.all_gather_object(places, obj if group.rank == 1 else group.rank, group, **how)
    assert [places[0], places[2]] == [0, 2]
    return places[1]


def gather(group: Any, obj: Any, **how: Any) -> Any:
    places: list[Any] | None = [None] * group.size if group.rank == 0 else None
    dist.gather_object(obj if group.rank == 1 else group.rank, places, 0, group, **how)
    return places[1] if places else None


def scatter(group: Any, obj: Any, **how: Any) -> Any:
    out: list[Any] = [None]
    given = [obj, obj, obj] if group.rank == 1 else None
    dist.scatter_object_list(out, given, 1, group, **how)
    return out[0]


def message(group: Any, obj: Any, **how: Any) -> Any:
    """Send from rank 1 to rank 0; rank 2 does nothing."""
    places: list[Any] = [None]
    if group.rank == 1:
        dist.send_object_list([obj], 0, group, **how)
    elif group.rank == 0:
        assert dist.recv_object_list(places, 1, group, **how) == 1
    return places[0]


CALLS: list[Call] = [broadcast, all_gather, gather, scatter, message]
RECEIVERS = {
    broadcast: {0, 2},
    all_gather: {0, 1, 2},
    gather: {0},
    scatter: {0, 1, 2},
    message: {0},
}
"""The ranks that decode an object of rank 1."""


def outcome(group: Any, call: Call, *args: Any, **how: Any) -> Any:
    """Make a call, then an all_reduce that fails if the ranks are out of step."""
    try:
        result = call(group, *args, **how)
    except CodecError as error:
        result = error
    total = np.ones(1)
    group.all_reduce(total)
    assert total[0] == group.size
    return result


VALUES = st.recursive(
    st.none() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


SIZES = [*range(960, 1040, 3), *range(1990, 2060, 3), *range(3030, 3090, 3), *range(4000, 4100, 3)]
KINDS = {
    "plain": lambda n: b"x" * n,
    "walked": lambda n: [1j, "x" * n],
    "with a larger array": lambda n: {"x" * n: np.arange(600.0), 1: 1j},
    "with a long array": lambda n: [1j, "x" * n, np.zeros(1 << 20, np.uint8)],
}


def by_pieces(group: Any, kind: str, sizes: list[int]) -> None:
    for n in sizes:
        places = [None]
        if group.rank == 0:
            dist.send_object_list([KINDS[kind](n)], 1)
        elif group.rank == 1:
            source = (0, None)[n % 2]
            assert dist.recv_object_list(places, source) == 0
            assert repr(places[0]) == repr(KINDS[kind](n))


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_has_as_many_pieces_as_its_object_needs(three: Ranks, kind: str) -> None:
    sizes = SIZES if kind != "with a long array" else SIZES[::9]
    three.run(by_pieces, [kind] * SIZE, [sizes] * SIZE)


def no_message(group: Any, words: list[tuple[int, int, int]]) -> None:
    """Rank 0 sends openings that no sender would send."""
    for each in words:
        if group.rank == 0:
            group.send(opening(*each)[:PIECE], 1)
        elif group.rank == 1:
            with pytest.raises(CodecError):
                dist.recv_object_list([None], 0)


def test_a_forged_opening_of_a_message_is_an_error(three: Ranks) -> None:
    kind, most = int(MessageKind.PLAIN), 2**63 - 1
    words = [
        (99, 0, 0),
        (-1, 10, 0),
        (kind, -5, 0),
        (kind, 9, -1),
        (kind, most, 0),
        (kind, most, most),
    ]
    words += [(kind - 256, 1, 1), (kind + 256 * most // 256, 1, 0), (kind + 256 * 255, 1, 0)]
    three.run(no_message, [words] * SIZE)


@settings(deadline=None, max_examples=25)
@given(objects=st.lists(VALUES, min_size=SIZE, max_size=SIZE), root=st.integers(0, SIZE - 1))
def test_collectives_of_different_objects(three: Ranks, objects: list[Any], root: int) -> None:
    def all_of_them(group: Any) -> Any:
        spread, gathered, scattered = list(objects), [None] * SIZE, [None]
        if group.rank != root:
            spread = [None] * SIZE
        dist.broadcast_object_list(spread, root)
        places = gathered if group.rank == root else None
        dist.gather_object(objects[group.rank], places, group_dst=root)
        dist.scatter_object_list(scattered, objects if group.rank == root else None, root)
        everyones: list[Any] = [None] * SIZE
        dist.all_gather_object(everyones, objects[group.rank])
        return spread, gathered, scattered[0], everyones

    for rank, (spread, gathered, scattered, everyones) in enumerate(three.run(all_of_them)):
        assert spread == everyones == objects
        assert scattered == objects[rank]
        assert gathered == (objects if rank == root else [None] * SIZE)


def test_dataclasses_with_large_arrays(three: Ranks) -> None:
    x = np.arange(300_000.0)
    for call in CALLS:
        got = three.run(lambda group, call=call: outcome(group, call, Metrics(3, {"x": x})))
        for rank in RECEIVERS[call]:
            assert got[rank].step == 3
            assert np.array_equal(got[rank].losses["x"], x)
            assert not np.shares_memory(got[rank].losses["x"], x)


@pytest.mark.parametrize("call", CALLS)
def test_if_a_rank_cannot_encode_its_object_all_ranks_raise(three: Ranks, call: Call) -> None:
    got = three.run(lambda group: outcome(group, call, Stranger()))
    concerned = {1, *RECEIVERS[call]} | ({2} if call is gather else set())
    for rank, result in enumerate(got):
        assert isinstance(result, CodecError) == (rank in concerned)
    assert "allow_pickle=True" in str(got[1])
    assert got[1].rank is None
    assert got[0].rank == 1
    assert "test_objects.Stranger" in str(got[0])


def test_a_rank_that_fails_in_the_programs_code_raises_that_error(three: Ranks) -> None:
    def try_it(group: Any) -> str:
        try:
            all_gather(group, Broken(), allow_pickle=True)
        except (LookupError, CodecError) as error:
            return type(error).__name__ + str(error)
        return ""

    got = three.run(try_it)
    assert got[1] == "LookupErrorit won't be pickled"
    assert all("CodecError" in got[r] and "LookupError: it won't be" in got[r] for r in (0, 2))
    assert three.run(lambda group: all_gather(group, 5)) == [5] * SIZE


class Wordless(Exception):
    """An error without text."""

    def __str__(self) -> str:
        raise LookupError("no words")


class Unexplained:
    """An object that can't be encoded, for a reason without text."""

    def __reduce__(self) -> Any:
        raise Wordless


@pytest.mark.parametrize("call", CALLS)
def test_a_reason_without_text_is_an_error_too(three: Ranks, call: Call) -> None:
    def try_it(group: Any) -> str:
        try:
            call(group, Unexplained(), allow_pickle=True)
        except CodecError as error:
            return str(error)
        except Wordless:
            return "mine"
        return ""

    got = three.run(try_it)
    assert got[1] == "mine"
    concerned = {*RECEIVERS[call]} | ({2} if call is gather else set())
    assert all("encode" in got[rank] or "Wordless" in got[rank] for rank in concerned - {1})
    assert three.run(lambda group: all_gather(group, 5)) == [5] * SIZE


@pytest.mark.parametrize("pieces", [1, 9])
def test_an_object_larger_than_any_message_is_an_error_for_all(three: Ranks, pieces: int) -> None:
    # Views of a single byte: their sizes together are more than 64 bits hold.
    huge = [np.broadcast_to(np.zeros(1, np.uint8), (1 << 60,)) for _ in range(pieces)]
    got = three.run(lambda group: outcome(group, broadcast, huge))
    assert all(isinstance(result, CodecError) for result in got), got
    assert "at most" in str(got[1])
    assert three.run(lambda group: all_gather(group, 5)) == [5] * SIZE


@pytest.mark.parametrize("call", CALLS)
def test_a_pickle_runs_no_code_without_allow_pickle(three: Ranks, call: Call) -> None:
    Stranger.unpickled = 0
    got = three.run(lambda group: outcome(group, call, Stranger(), allow_pickle=group.rank == 1))
    may = RECEIVERS[call] & {1}
    assert Stranger.unpickled == len(may)
    for rank in RECEIVERS[call] - may:
        assert isinstance(got[rank], CodecError)
        assert got[rank].rank == 1
        assert "allow_pickle" in str(got[rank])


@pytest.mark.parametrize("call", CALLS)
def test_a_pickle_arrives_if_both_ranks_allow_it(three: Ranks, call: Call) -> None:
    got = three.run(lambda group: outcome(group, call, Stranger(), allow_pickle=True))
    assert all(got[rank] == "a stranger" for rank in RECEIVERS[call])


def test_lists_are_unchanged_after_an_error(three: Ranks) -> None:
    def fail(group: Any) -> list[Any]:
        places = [Stranger()] if group.rank == 1 else ["mine"]
        with pytest.raises(CodecError):
            dist.broadcast_object_list(places, 1)
        return places

    got = three.run(fail)
    assert got[0] == got[2] == ["mine"]


def test_lists_of_different_lengths_are_an_error_and_no_more(three: Ranks) -> None:
    def run(group: Any) -> Any:
        places = [1, 2] if group.rank == 1 else [None]
        return outcome(group, lambda _: dist.broadcast_object_list(places, 1))

    got = three.run(run)
    assert got[1] is None
    assert "has sent 2 objects, and the list here has 1" in str(got[0])


def test_map_location_is_called_with_each_received_array(three: Ranks) -> None:
    def located(group: Any) -> Any:
        return all_gather(group, {"x": np.ones(2)}, map_location=lambda x: x.tolist())

    assert three.run(located) == [{"x": [1.0, 1.0]}] * SIZE


class Grid:
    """An array of a user's own library."""

    def __init__(self, values: Any, device: Any = "host") -> None:
        self.values, self.device = values, device


def test_arrays_of_registered_types_are_moved_as_a_whole(three: Ranks) -> None:
    dist.register_type(Grid, lambda g: g.values, Grid, "grid", lambda g, at: Grid(g.values, at))

    def located(group: Any) -> Any:
        return all_gather(group, [Grid(np.ones(2)), np.zeros(1)], map_location=type)

    assert three.run(located) == [[Grid, np.ndarray]] * SIZE


def test_ranks_of_sub_groups_and_of_the_world(three: Ranks) -> None:
    def among_two(group: Any) -> Any:
        two = dist.new_group([1, 2])
        places = [group.rank]
        if group.rank == 0:
            with pytest.warns(RuntimeWarning, match="not in the group"):
                dist.broadcast_object_list(places, 2, two)
            with pytest.warns(RuntimeWarning, match="not in the group"):
                assert dist.recv_object_list(places, 2, two) == -1
            return places
        dist.broadcast_object_list(places, 2, two)
        again = [group.rank]
        dist.broadcast_object_list(again, group=two, group_src=0)
        return places + again

    assert three.run(among_two) == [[0], [2, 1], [2, 1]]


def test_errors_of_a_sub_group_name_its_ranks_and_the_group(three: Ranks) -> None:
    def among_two(group: Any) -> Any:
        two = dist.new_group([1, 2])
        if group.rank == 0:
            return
        places = [object()] if group.rank == 1 else [None]
        words = "objects of type" if group.rank == 1 else "from rank 0 of group 'world/"
        with pytest.raises(CodecError, match=words):
            dist.broadcast_object_list(places, 1, two)
        if group.rank == 1:
            dist.broadcast_object_list([1], 1, two)
            return
        with pytest.raises(CodecError, match=r"rank 0 of group 'world/.* has sent 1") as found:
            dist.broadcast_object_list([1, 2], 1, two)
        assert (found.value.rank, found.value.group) == (0, two.name)
        assert found.value.op == "broadcast_object_list"

    three.run(among_two)


def test_lists_are_lists(three: Ranks) -> None:
    def mistakes(group: Any) -> None:
        if group.rank == 0:
            with pytest.raises(TypeError, match="object_gather_list must be a list, got tuple"):
                dist.gather_object(1, (0, 0, 0))
            for given in (iter([1, 2, 3]), {1, 2, 3}, "abc"):
                with pytest.raises(
                    TypeError, match="scatter_object_input_list must be a list or tuple"
                ):
                    dist.scatter_object_list([None], given)
        group.barrier()

    three.run(mistakes)


def test_mistakes_are_found_before_anything_is_sent(three: Ranks) -> None:
    def err(group: Any) -> None:
        size, cases = group.size, []
        cases.append(lambda: dist.all_gather_object([], 1))
        cases.append(lambda: dist.gather_object(1, [0] * size if group.rank else None, 0))
        cases.append(lambda: dist.scatter_object_list([], [0] * size, group.rank))
        cases.append(lambda: dist.scatter_object_list([0], None, group.rank))
        cases.append(lambda: dist.scatter_object_list([0], [1], group.rank))
        cases.append(lambda: dist.broadcast_object_list([1], 99))
        cases.append(lambda: dist.broadcast_object_list([1], 0, group_src=0))
        cases.append(lambda: dist.send_object_list([1], group.rank))
        cases.append(lambda: dist.broadcast_object_list([1], map_location="cuda:99"))
        cases.append(lambda: dist.broadcast_object_list([1], map_location="disc"))
        cases.append(lambda: dist.broadcast_object_list([1], map_location=[0]))
        cases.append(lambda: dist.broadcast_object_list([1], device="disc"))
        cases.append(lambda: dist.send_object_list([1], 0, device="disc:0"))
        for case in cases:
            with pytest.raises(ValueError):
                case()
        for wrong in ({}, (1, 2)):
            with pytest.raises(
                TypeError, match="broadcast_object_list: object_list must be a list"
            ):
                dist.broadcast_object_list(wrong, 0)  # type: ignore[arg-type]
        with dist.coalescing_manager(), pytest.raises(ValueError, match="coalescing block"):
            dist.all_gather_object([None] * size, 1)

    three.run(err)
    assert three.run(lambda group: all_gather(group, 5)) == [5] * SIZE


def opening(*words: int) -> Any:
    """Return the opening of a message with this kind and these sizes."""
    return np.resize(np.array(words), OPENING // 8).view(np.uint8)


def test_a_forged_envelope_is_an_error_for_all(three: Ranks) -> None:
    def forge(group: Any) -> str:
        places = [None]
        if group.rank == 1:
            group.broadcast(opening(1, 2**62, -5), 1)
            return ""
        with pytest.raises(CodecError, match="no message has") as caught:
            dist.broadcast_object_list(places, 1)
        return str(caught.value.rank)

    assert three.run(forge) == ["1", "", "1"]
    assert three.run(lambda group: all_gather(group, 5)) == [5] * SIZE


def test_a_rank_without_memory_for_a_message_fails_the_group() -> None:
    with Ranks(2, "processes", timeout=20) as ranks:
        first, second = ranks.run(_no_memory)
    assert "no memory for" in first
    assert first == second


def _no_memory(group: Any) -> str:
    """Announce half a terabyte to a rank that may allocate less than that."""
    if group.rank == 1:
        group.broadcast(opening(1, 2**39, 0), 1)
        with pytest.raises(dist.Aborted) as aborted:
            group.barrier()
        return str(aborted.value)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (2**38, hard))
    with pytest.raises(MemoryError) as caught:
        dist.broadcast_object_list([None], 1)
    return str(caught.value)


def test_the_calls_work_on_a_backend_that_only_assigns() -> None:
    assert run_local(lambda group: all_gather(group, ["x"]), SIZE) == [["x"]] * SIZE


REFUSED = {"allow_pickle": False}
WEIGHTS = {"weights_only": True, "allow_pickle": True}


@pytest.mark.parametrize(
    ("setting", "given", "allowed"),
    [
        ("", {}, False),
        ("0", {}, False),
        ("1", {}, True),
        ("1", REFUSED, False),
        ("", WEIGHTS, False),
    ],
)
def test_a_program_can_allow_pickles_as_a_whole(
    setting: str, given: dict[str, Any], allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def body(group: dist.ProcessGroup) -> bool:
        places = [Decimal("0.3") if group.rank == 0 else None]
        try:
            dist.broadcast_object_list(places, **given)
        except dist.CodecError as error:
            return "NC10D_ALLOW_PICKLE" not in str(error)
        return places == [Decimal("0.3")]

    monkeypatch.setenv("NC10D_ALLOW_PICKLE", setting)
    assert run_local(body, 2) == [allowed] * 2


def test_a_setting_that_is_no_answer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NC10D_ALLOW_PICKLE", "yes")

    def body(_: dist.ProcessGroup) -> None:
        with pytest.raises(ValueError, match="NC10D_ALLOW_PICKLE"):
            dist.broadcast_object_list([1])

    run_local(body, 2)


def test_the_program_s_answer_about_pickles_is_that_of_a_group_s_first_object_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def body(group: dist.ProcessGroup) -> list[bool | None]:
        found = [group.allow_pickle]
        places = [group.rank]
        dist.broadcast_object_list(places)
        group.barrier()
        monkeypatch.setenv("NC10D_ALLOW_PICKLE", "1")
        dist.broadcast_object_list(places)
        return [*found, group.allow_pickle]

    monkeypatch.setenv("NC10D_ALLOW_PICKLE", "0")
    assert run_local(body, 2) == [[None, False]] * 2


def test_calls_of_small_objects_take_few_python_frames() -> None:
    def body(group: dist.ProcessGroup) -> list[int]:
        places, value = [None], {"a": 1}
        calls: list[Callable[[], object]] = [
            lambda: dist.all_gather_object(places, value, group=group),
            lambda: dist.gather_object(value, places, group=group),
            lambda: dist.broadcast_object_list([value], group=group),
            lambda: dist.scatter_object_list(places, [value], group=group),
        ]
        return [min(python_frames(call) for _ in range(5)) for call in calls]

    (counts,) = run_ranks(body, 1)
    assert max(counts) <= 24


@pytest.mark.ranks(2, strict=False)
def test_many_small_objects_can_be_sent_before_any_is_received(world: Any) -> None:
    peer = 1 - world.rank
    for turn in range(40):
        dist.send_object_list([{"turn": turn}], peer)
    dist.barrier()
    found: list[Any] = []
    for _ in range(40):
        place = [None]
        dist.recv_object_list(place, peer)
        found += place
    assert found == [{"turn": turn} for turn in range(40)]
