"""A caller's mistake on a real group: ValueError or TypeError, nothing sent, and the group goes on.

A rank of two makes the mistake and catches it; its peer is not involved. Then both ranks make calls
that would fail, or hang, if the mistaken call had sent anything.
"""

import datetime
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import nc10d as dist
from nc10d import ops as O
from nc10d.group.process_group import ProcessGroup

N = 6
Call = Callable[..., Any]
How = dict[str, Any]


on_two = pytest.mark.ranks(2, strict=False)


def piece() -> Any:
    return np.ones(N)


def whole() -> Any:
    return np.ones(2 * N)


def pieces() -> list[Any]:
    return [piece(), piece()]


def frozen(x: Any) -> Any:
    x.flags.writeable = False
    return x


def spread_out() -> Any:
    """Return a view whose elements all share the same memory."""
    return np.lib.stride_tricks.as_strided(np.ones(1), (N,), (0,))


def reducing(x: Any, op: Any = O.SUM) -> Call:
    return lambda g, **how: g.all_reduce(x() if callable(x) else x, op, **how)


# A name, the call as f(group, **how), the exception, and a pattern that its message matches.
Mistake = tuple[str, Call, type[Exception], str]
NOT_ARRAYS: list[Mistake] = [
    ("a list", reducing([1.0, 2.0]), TypeError, "pass np.array"),
    ("a number", reducing(3.0), TypeError, r"np\.array\(\[3\.0\]\)"),
    ("a NumPy scalar", reducing(np.float64(3)), TypeError, "0-d array"),
    ("nothing", reducing(None), TypeError, "NoneType"),
    ("text", reducing("x"), TypeError, "expected an array"),
    ("a masked array", reducing(lambda: np.ma.ones(N)), TypeError, "mask"),
]
DTYPES: list[Mistake] = [
    ("long double", reducing(lambda: np.ones(N, np.longdouble)), TypeError, "float64"),
    ("complex long double", reducing(lambda: np.ones(N, "G")), TypeError, "complex128"),
    ("objects", reducing(lambda: np.ones(N, object)), TypeError, "object"),
    ("strings", reducing(lambda: np.array(["a", "b"])), TypeError, "text"),
    ("dates", reducing(lambda: np.zeros(N, "M8[s]")), TypeError, "int64"),
    ("a structure", reducing(lambda: np.zeros(N, "i4,f4")), TypeError, "structured"),
    ("foreign byte order", reducing(lambda: np.zeros(N, ">f8")), TypeError, "byte order"),
    ("int4", reducing(lambda: np.zeros(N, ml_dtypes.int4)), TypeError, "no such element"),
]
REDUCTIONS: list[Mistake] = [
    ("op by name", reducing(piece, "sum"), TypeError, "ReduceOp"),
    ("op by number", reducing(piece, 0), TypeError, "ReduceOp"),
    ("no op", reducing(piece, None), TypeError, "ReduceOp"),
    ("an array for an op", reducing(piece, np.ones(N)), TypeError, "is passed as out="),
    ("a list for an op", reducing(piece, [1]), TypeError, "ReduceOp"),
    ("a kind for an op", reducing(piece, O.SUM.kind), TypeError, "ReduceOp"),
    ("bits of floats", reducing(piece, O.BAND), TypeError, "bitwise"),
    ("order of complex", reducing(lambda: np.ones(N, complex), O.MAX), TypeError, "order"),
    ("mean of bools", reducing(lambda: np.ones(N, bool), O.AVG), TypeError, "average"),
    ("half an int", reducing(lambda: np.ones(N, int), O.premul_sum(0.5)), TypeError, "whole"),
    (
        "scaled bools",
        reducing(lambda: np.ones(N, bool), O.premul_sum(1.0)),
        TypeError,
        "can't be scaled",
    ),
    ("reduce", lambda g, **h: g.reduce(piece(), 0, "sum", **h), TypeError, "ReduceOp"),
    ("reduce", lambda g, **h: g.reduce(piece(), 0, piece(), **h), TypeError, "passed as out="),
    (
        "an array to reduce by",
        lambda g, **h: g.reduce_scatter_tensor(piece(), whole(), whole(), **h),
        TypeError,
        "the result replaces output",
    ),
    (
        "reduce_scatter",
        lambda g, **h: g.reduce_scatter_tensor(piece(), whole(), O.BOR, **h),
        TypeError,
        "bitwise",
    ),
]
RANKS: list[Mistake] = [
    ("too large", lambda g, **h: g.broadcast(piece(), 2, **h), ValueError, "0 to 1, got 2"),
    ("negative", lambda g, **h: g.broadcast(piece(), -1, **h), ValueError, "got -1"),
    ("a fraction", lambda g, **h: g.broadcast(piece(), 0.5, **h), TypeError, "integer"),
    ("a whole float", lambda g, **h: g.broadcast(piece(), 1.0, **h), TypeError, "integer"),
    ("text", lambda g, **h: g.reduce(piece(), "0", **h), TypeError, "integer"),
    ("none", lambda g, **h: g.reduce(piece(), None, **h), TypeError, "integer"),
    ("of gather", lambda g, **h: g.gather(piece(), None, 9, **h), ValueError, "got 9"),
    ("of scatter", lambda g, **h: g.scatter(piece(), None, 9, **h), ValueError, "got 9"),
]
WRITTEN: list[Mistake] = [
    ("read-only", reducing(lambda: frozen(piece())), ValueError, "read-only"),
    ("one element", reducing(spread_out), ValueError, "share memory"),
    (
        "read-only output",
        lambda g, **h: g.all_gather_into_tensor(frozen(whole()), piece(), **h),
        ValueError,
        "output_tensor.*read-only",
    ),
    (
        "read-only in a list",
        lambda g, **h: g.all_gather([piece(), frozen(piece())], piece(), **h),
        ValueError,
        r"tensor_list\[1\].*read-only",
    ),
    (
        "read-only where it is received",
        lambda g, **h: g.broadcast(frozen(piece()), 1 - g.rank, **h),
        ValueError,
        "read-only",
    ),
    (
        "read-only root",
        lambda g, **h: g.reduce(frozen(piece()), g.rank, **h),
        ValueError,
        "read-only",
    ),
]


def overlapping_gather(g: Any, **how: Any) -> Any:
    x = whole()
    return g.all_gather_into_tensor(x, x[1 : 1 + N], **how)


def others_chunk(g: Any, **how: Any) -> Any:
    x, other = whole(), 1 - g.rank
    return g.all_gather_into_tensor(x, x[other * N : (other + 1) * N], **how)


def overlapping_scatter(g: Any, **how: Any) -> Any:
    x = whole()
    return g.reduce_scatter_tensor(x[3 : 3 + N], x, **how)


def overlapping_lists(g: Any, **how: Any) -> Any:
    x = np.ones(3 * N)
    return g.all_gather([x[:N], x[N - 1 : 2 * N - 1]], piece(), **how)


def overlapping_strides(g: Any, **how: Any) -> Any:
    x = whole()
    return g.all_gather([x[::2], x[:N]], piece(), **how)


def in_place_exchange(g: Any, **how: Any) -> Any:
    x = whole()
    return g.all_to_all_single(x, x, **how)


OVERLAPS: list[Mistake] = [
    (call.__name__, call, ValueError, "must not share memory")
    for call in (
        overlapping_gather,
        others_chunk,
        overlapping_scatter,
        overlapping_lists,
        overlapping_strides,
        in_place_exchange,
    )
]
SIZES: list[Mistake] = [
    (
        "output too small",
        lambda g, **h: g.all_gather_into_tensor(np.ones(2 * N - 1), piece(), **h),
        ValueError,
        "12 elements",
    ),
    (
        "input not a multiple",
        lambda g, **h: g.reduce_scatter_tensor(piece(), np.ones(2 * N + 1), **h),
        ValueError,
        "12 elements",
    ),
    (
        "another dtype",
        lambda g, **h: g.all_gather_into_tensor(whole().astype("f4"), piece(), **h),
        TypeError,
        "float64, got float32",
    ),
    (
        "another dtype to scatter",
        lambda g, **h: g.reduce_scatter_tensor(piece(), whole().astype("i8"), **h),
        TypeError,
        "dtype",
    ),
    ("short list", lambda g, **h: g.all_gather([piece()], piece(), **h), ValueError, "got 1"),
    ("empty list", lambda g, **h: g.all_gather([], piece(), **h), ValueError, "got 0"),
    (
        "long list",
        lambda g, **h: g.reduce_scatter(piece(), [piece()] * 3, **h),
        ValueError,
        "got 3",
    ),
    (
        "my own slot",
        lambda g, **h: g.all_gather([np.ones(N + 1), np.ones(N + 1)], piece(), **h),
        ValueError,
        "6 elements",
    ),
    (
        "dtypes in a list",
        lambda g, **h: g.all_gather([piece(), np.ones(N, "f4")], piece(), **h),
        TypeError,
        r"tensor_list\[1\]",
    ),
    (
        "no array in a list",
        lambda g, **h: g.all_gather([piece(), None], piece(), **h),
        TypeError,
        r"tensor_list\[1\]",
    ),
    ("list and array", lambda g, **h: g.all_to_all(pieces(), whole(), **h), TypeError, "both"),
    (
        "uneven exchange",
        lambda g, **h: g.all_to_all([np.ones(1), np.ones(1)], pieces(), **h),
        ValueError,
        "elements",
    ),
    (
        "where the root has no list",
        lambda g, **h: g.gather(piece(), None, g.rank, **h),
        ValueError,
        "must be given",
    ),
    (
        "where another has a list",
        lambda g, **h: g.gather(piece(), pieces(), 1 - g.rank, **h),
        ValueError,
        "must be None",
    ),
    (
        "nothing to scatter",
        lambda g, **h: g.scatter(piece(), None, g.rank, **h),
        ValueError,
        "must be given",
    ),
    (
        "too much to scatter",
        lambda g, **h: g.scatter(piece(), [piece()] * 3, g.rank, **h),
        ValueError,
        "got 3",
    ),
]


def split(out: Any, inp: Any) -> Call:
    return lambda g, **how: g.all_to_all_single(np.ones((4, 3)), np.ones((4, 3)), out, inp, **how)


SPLITS: list[Mistake] = [
    ("too few", split([4], None), ValueError, r"got \[4\]"),
    ("too many", split([1, 1, 2], None), ValueError, r"got \[1, 1, 2\]"),
    ("wrong sum", split(None, [2, 3]), ValueError, "rows"),
    ("negative", split([5, -1], [5, -1]), ValueError, "0 or more"),
    ("fractions", split([2.0, 2.0], None), TypeError, "integer"),
    (
        "odd rows",
        lambda g, **h: g.all_to_all_single(np.ones(5), np.ones(5), **h),
        ValueError,
        "2 equal parts",
    ),
    (
        "no rows",
        lambda g, **h: g.all_to_all_single(np.ones(()), np.ones(()), **h),
        ValueError,
        "0-d",
    ),
    (
        "myself",
        lambda g, **h: g.all_to_all_single(
            np.ones(4), np.ones(4), *([1, 3], [2, 2]) if g.rank == 0 else ([3, 1], [2, 2]), **h
        ),
        ValueError,
        "sends itself",
    ),
]


def sending(x: Call, peer: Any = None, tag: Any = 0) -> Call:
    def call(g: Any, async_op: bool = False) -> Any:
        dst = 1 - g.rank if peer is None else peer(g)
        return (g.isend if async_op else g.send)(x(), dst, tag)

    return call


def receiving(x: Call, peer: Any = None, tag: Any = 0) -> Call:
    def call(g: Any, async_op: bool = False) -> Any:
        src = 1 - g.rank if peer is None else peer(g)
        return (g.irecv if async_op else g.recv)(x(), src, tag)

    return call


MESSAGES: list[Mistake] = [
    ("negative tag", sending(piece, tag=-1), ValueError, "tag"),
    ("tag of text", receiving(piece, tag="a"), TypeError, "tag must be an integer"),
    ("half a tag", sending(piece, tag=1.5), TypeError, "tag must be an integer"),
    ("half a tag to receive", receiving(piece, tag=0.5), TypeError, "tag must be an integer"),
    ("no tag", sending(piece, tag=None), TypeError, "tag must be an integer"),
    ("huge tag", sending(piece, tag=2**63), ValueError, "tag must be"),
    ("huge tag to receive", receiving(piece, tag=2**80), ValueError, "tag must be"),
    ("to myself", sending(piece, lambda g: g.rank), ValueError, "another rank"),
    ("from myself", receiving(piece, lambda g: g.rank), ValueError, "another rank"),
    ("to nobody", sending(piece, lambda g: 2), ValueError, "got 2"),
    ("from nobody", receiving(piece, lambda g: -1), ValueError, "got -1"),
    ("no array", sending(lambda: 5), TypeError, "number"),
    ("objects", sending(lambda: np.ones(2, object)), TypeError, "object"),
    ("read-only", receiving(lambda: frozen(piece())), ValueError, "read-only"),
]
TABLES = {
    "no array": NOT_ARRAYS,
    "dtype": DTYPES,
    "reduction": REDUCTIONS,
    "rank": RANKS,
    "written": WRITTEN,
    "overlap": OVERLAPS,
    "size": SIZES,
    "split": SPLITS,
    "message": MESSAGES,
}


def right_calls(group: ProcessGroup) -> None:
    """Make correct calls; they hang or fail if a mistaken call was partly sent."""
    peer = 1 - group.rank
    x, all_of_it, part = np.full(N, group.rank + 1.0), np.zeros(2 * N), np.zeros(N)
    group.all_gather_into_tensor(all_of_it, x)
    assert all_of_it.tolist() == [1.0] * N + [2.0] * N
    group.reduce_scatter_tensor(part, all_of_it)
    assert (part == 2 * (group.rank + 1)).all()
    sent = group.isend(x, peer)
    assert group.recv(part, peer) == peer
    assert (part == peer + 1).all()
    assert sent is not None
    sent.wait()
    group.broadcast(part, 1)
    assert (part == 1).all()
    group.all_reduce(x)
    assert (x == 3).all()
    group.reduce(x, 1)
    assert (x == 3 * (1 + group.rank)).all()


def err(group: ProcessGroup, mistake: Mistake, how: str) -> None:
    """Make the mistake in one of three ways; calls before it in its block are not launched."""
    _, call, kind, words = mistake
    launches = group.seq
    if how != "coalesced":
        with pytest.raises(kind, match=words) as caught:
            call(group, **({"async_op": True} if how == "async" else {}))
    else:
        before = np.ones(3)
        with pytest.raises(kind, match=words) as caught:
            coalesce(group, before, call)
        assert (before == 1).all()
    assert not isinstance(caught.value, dist.DistError)
    assert group.seq - launches in (0, 1)


def coalesce(group: ProcessGroup, before: Any, call: Call) -> None:
    with dist.coalescing_manager(group):
        group.all_reduce(before)
        call(group)


PLACES = [(table, place) for table, rows in TABLES.items() for place in range(len(rows))]


@on_two
@pytest.mark.parametrize("offender", [0, 1])
@pytest.mark.parametrize(
    ("table", "place"), PLACES, ids=[f"{t}: {TABLES[t][p][0]}" for t, p in PLACES]
)
def test_a_mistake_raises_in_its_rank_and_the_group_goes_on(
    world: ProcessGroup, table: str, place: int, offender: int
) -> None:
    right_calls(world)
    for how in ("sync", "async", "coalesced"):
        if world.rank == offender:
            err(world, TABLES[table][place], how)
        right_calls(world)


# A call with the same arrays as before is checked again


@on_two
def test_an_array_that_has_become_read_only_is_refused(world: ProcessGroup) -> None:
    x, y = piece(), piece()
    for turn in range(3):
        with dist.coalescing_manager(world):
            world.all_reduce(x)
            world.all_reduce(y)
        world.all_reduce(x)
        assert (y == 2 ** (turn + 1)).all()
    if world.rank == 0:
        x.flags.writeable = False
        with pytest.raises(ValueError, match="read-only"):
            world.all_reduce(x)
        with pytest.raises(ValueError, match="read-only"):
            coalesce(world, y, lambda g: g.all_reduce(x))
        assert (y == 8).all()
    right_calls(world)


# Blocks, groups, works and timeouts


def nested(group: ProcessGroup) -> None:
    with dist.coalescing_manager(group):
        coalesce(group, piece(), lambda g: None)


def new_group_inside(group: ProcessGroup) -> None:
    with dist.coalescing_manager(group):
        dist.new_group([0])


def split_inside(group: ProcessGroup) -> None:
    with dist.coalescing_manager(group):
        dist.split_group(group, [[0, 1]])


def waits_inside(group: ProcessGroup) -> None:
    with dist.coalescing_manager(group):
        work = group.all_reduce(piece(), async_op=True)
        assert work is not None
        work.wait()


def mixed_batch(group: ProcessGroup) -> None:
    pair = dist.new_group([group.rank], use_local_synchronization=True)
    ops = [dist.P2POp(dist.isend, piece(), 1 - group.rank), dist.P2POp(dist.isend, piece(), 0)]
    ops[1].group = pair  # type: ignore[assignment]
    dist.batch_isend_irecv(ops)


Lone = tuple[Callable[[ProcessGroup], Any], str]
OTHERS: dict[str, Lone] = {
    "a block in a block": (nested, "nested"),
    "new_group in a block": (new_group_inside, "inside a coalescing block"),
    "split_group in a block": (split_inside, "inside a coalescing block"),
    "a wait in its own block": (waits_inside, "has not ended"),
    "an empty batch of messages": (lambda g: dist.batch_isend_irecv([]), "empty"),
    "a batch of messages of two groups": (mixed_batch, "same group"),
    "a broadcast without a root": (lambda g: dist.broadcast(piece()), "src"),
    "a broadcast with two roots": (lambda g: dist.broadcast(piece(), 0, group_src=0), "src"),
    "a reduction to a stranger": (lambda g: dist.reduce(piece(), group_dst=7), "7"),
    "a P2POp without a peer": (lambda g: dist.P2POp(dist.isend, piece()), "either peer"),
    "a P2POp that is none": (lambda g: dist.P2POp(g.isend, piece(), 0), "isend or irecv"),
    "a group of nobody": (lambda g: dist.new_group([]), "at least one"),
    "a group with a double": (lambda g: dist.new_group([0, 0]), "duplicates"),
    "a group with a negative rank": (lambda g: dist.new_group([-1]), "-1"),
    "a group with a stranger": (lambda g: dist.new_group([0, 2]), "2"),
    "a group of an unknown backend": (lambda g: dist.new_group([0, 1], backend="no"), "no"),
    "a group with a negative timeout": (lambda g: dist.new_group([0, 1], timeout=-1), ">= 0"),
    "a split into nothing": (lambda g: dist.split_group(g, []), "not empty"),
    "a split with a stranger": (lambda g: dist.split_group(g, [[0], [5]]), "5"),
    "a split that overlaps": (lambda g: dist.split_group(g, [[0], [0, 1]]), "twice"),
    "a split with a negative timeout": (
        lambda g: dist.split_group(g, [[0, 1]], timeout=-1),
        ">= 0",
    ),
    "a split of an unknown backend": (lambda g: dist.split_group(g, [[0, 1]], backend="no"), "no"),
    "subgroups that don't divide": (lambda g: dist.new_subgroups(3), "divide"),
    "subgroups that overlap": (lambda g: dist.new_subgroups_by_enumeration([[0], [0]]), "twice"),
    "subgroups with a stranger": (
        lambda g: dist.new_subgroups_by_enumeration([[g.rank], [4]]),
        "4",
    ),
    "a negative timeout": (
        lambda g: g.all_reduce(piece(), timeout=datetime.timedelta(seconds=-1)),
        ">= 0",
    ),
    "a second world": (
        lambda g: dist.init_process_group("cpu", rank=0, world_size=1),
        "exists already",
    ),
}


@on_two
@pytest.mark.parametrize("offender", [0, 1])
@pytest.mark.parametrize("name", OTHERS)
def test_a_mistake_about_blocks_or_groups_raises_in_its_rank_too(
    world: ProcessGroup, name: str, offender: int
) -> None:
    call, words = OTHERS[name]
    if world.rank == offender:
        with pytest.raises(ValueError, match=words):
            call(world)
    right_calls(world)
    # A group's name contains the number of groups made before: ranks must still agree on it.
    again = dist.new_group([0, 1])
    assert isinstance(again, ProcessGroup)
    split = dist.split_group(world, [[1, 0]])
    assert isinstance(split, ProcessGroup)
    for made in (again, split):
        x = piece()
        made.all_reduce(x)
        assert (x == 2).all()
        dist.destroy_process_group(made)


@on_two
def test_a_wrong_timeout_of_wait_changes_nothing(world: ProcessGroup) -> None:
    x = piece()
    work = world.all_reduce(x, async_op=True)
    assert work is not None
    with pytest.raises(ValueError, match=">= 0"):
        work.wait(-1)
    for wrong in ("soon", "5", True):
        with pytest.raises(TypeError, match="timeout must be a number of seconds"):
            work.wait(wrong)  # type: ignore[arg-type]
    work.wait()
    assert (x == 2).all()


@on_two
def test_a_non_member_sends_nothing_to_a_group(world: ProcessGroup) -> None:
    other = dist.new_group([1])
    if world.rank == 0:
        assert other is dist.GroupMember.NON_GROUP_MEMBER
        for refused in (dist.get_process_group_ranks, dist.get_backend):
            with pytest.raises(ValueError, match="not in the group"):
                refused(other)
        with pytest.raises(ValueError, match="not in the group"):
            dist.P2POp(dist.isend, piece(), 1, other)
        x = piece()
        with pytest.warns(RuntimeWarning, match="not in the group"):
            assert dist.all_reduce(x, group=other) is None
        assert (x == 1).all()
    right_calls(world)
