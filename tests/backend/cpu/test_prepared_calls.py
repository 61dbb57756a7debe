"""Prepared calls: a repeated call skips the checks, and does exactly as the first call did."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from entered_functions import python_frames
from on_ranks import on_ranks

import nc10d as dist
from nc10d.backend.cpu.context import Context
from nc10d.backend.cpu.engine import call_sites
from nc10d.backend.cpu.native import offsets
from nc10d.backend.cpu.native.entry_points import load_word
from nc10d.backend.cpu.p2p.unexpected import receive_unexpected
from nc10d.errors import Aborted, CollectiveMismatch
from nc10d.ops import Recv, Send
from nc10d.testing import run_ranks

Call = Callable[..., Any]
PAIRS: dict[str, tuple[Call, int, int]] = {  # how it is called; elements of the first array, second
    "all_gather": (lambda g, out, inp, **how: g.all_gather_into_tensor(out, inp, **how), 8, 4),
    "reduce_scatter": (lambda g, out, inp, **how: g.reduce_scatter_tensor(out, inp, **how), 4, 8),
    "all_to_all": (lambda g, out, inp, **how: g.all_to_all_single(out, inp, **how), 8, 8),
}


def runs_prepared(group: Any, kind: type[Any], x: Any) -> bool:
    """Run the prepared message of this kind with rank 1; return whether anything has happened."""
    backend = group.backend("cpu")
    return bool(backend.launcher.run(backend.launcher.latest[kind][1], x, 0, group.timeout))


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("later", [False, True])
def test_an_array_given_twice_is_refused_although_the_call_is_prepared(
    name: str, later: bool
) -> None:
    call, *sizes = PAIRS[name]

    def again(group: Any) -> None:
        for _ in range(3):
            call(group, *(np.zeros(size) for size in sizes))
        for size in sizes:
            whole = np.arange(16.0)
            part = whole[4 : 4 + size]
            with pytest.raises(ValueError, match=r"memory|elements"):
                call(group, part, part, async_op=later)
            assert (whole == np.arange(16.0)).all()

    run_ranks(again, 2)


@on_ranks(2)
def test_prepared_calls_of_one_array_and_of_two_may_alternate(world: Any) -> None:
    for _ in range(3):
        x, out = np.ones(4), np.zeros(8)
        world.all_reduce(x)
        world.all_gather_into_tensor(out, x)
        assert (out == 2).all()


@pytest.mark.parametrize(
    "change", ["dtype", "size", "shape", "strides", "order", "read-only", "kind"]
)
def test_another_array_is_not_mistaken_for_the_prepared_array(change: str) -> None:
    class Sub(np.ndarray[Any, Any]):
        pass

    changes: dict[str, Callable[[], Any]] = {
        "dtype": lambda: np.ones(6, np.float32),
        "size": lambda: np.ones(7),
        "shape": lambda: np.ones((2, 3)),
        "strides": lambda: np.ones(12)[::2],
        "order": lambda: np.ones((2, 3), order="F"),
        "read-only": lambda: np.frombuffer(bytes(48)),
        "kind": lambda: np.ones(6).view(Sub),
    }

    def play(group: Any) -> None:
        for _ in range(3):
            group.all_reduce(np.ones(6))
        x = changes[change]()
        if change == "read-only":
            with pytest.raises(ValueError, match=r"read-only|writable"):
                group.all_reduce(x)
        else:
            group.all_reduce(x)
            assert (x == 2).all()

    run_ranks(play, 2)


def all_gather(g: Any, x: Any, xs: Any, **how: Any) -> Any:
    return g.all_gather(xs, x, **how)


def gather(g: Any, x: Any, xs: Any, **how: Any) -> Any:
    return g.gather(x, xs if g.rank == 0 else None, 0, **how)


def scatter(g: Any, x: Any, xs: Any, **how: Any) -> Any:
    return g.scatter(x, xs if g.rank == 1 else None, 1, **how)


def reduce_scatter(g: Any, x: Any, xs: Any, **how: Any) -> Any:
    return g.reduce_scatter(x, xs, **how)


def all_to_all(g: Any, x: Any, xs: Any, **how: Any) -> Any:
    return g.all_to_all(xs, [x, x], **how)


LIST_CALLS = [all_gather, gather, scatter, reduce_scatter, all_to_all]
ARRAYS: dict[str, Callable[[int], Any]] = {
    "plain": lambda i: np.full(3, float(i)),
    "uneven": lambda i: np.full(2 + i % 2, float(i)),
    "other dtype": lambda i: np.full(3, i, np.int16),
    "strided": lambda i: np.full(6, float(i))[::2],
    "two dimensions": lambda i: np.full((1, 3), float(i)),
    "empty": lambda i: np.full(0, float(i)),
}


def result_of(call: Call, group: Any, make: Callable[[int], Any], later: bool) -> list[Any]:
    """Return all arrays after a call; those of an uneven list are as long as their rank's."""
    own = 1 if call is all_to_all else group.rank
    xs = [make(own if call is all_to_all else rank) for rank in range(group.size)]
    for rank, x in enumerate(xs):
        x += 10 * group.rank + rank
    x = make(own) + 5
    work = call(group, x, xs, async_op=later)
    if later:
        work.wait()
    return [x.tolist(), *(y.tolist() for y in xs)]


@pytest.mark.parametrize("call", LIST_CALLS, ids=lambda call: call.__name__)
@pytest.mark.parametrize("later", [False, True], ids=["blocking", "asynchronous"])
@on_ranks(2)
def test_a_call_on_lists_is_the_same_however_often_it_was_made(
    world: Any, call: Call, later: bool
) -> None:
    first = {name: result_of(call, world, make, later) for name, make in ARRAYS.items()}
    for _ in range(3):
        for name in ("plain", *ARRAYS, "plain", "plain"):
            assert result_of(call, world, ARRAYS[name], later) == first[name], name


@pytest.mark.parametrize("call", LIST_CALLS, ids=lambda call: call.__name__)
@on_ranks(2)
def test_a_wrong_list_is_refused_although_the_call_is_prepared(world: Any, call: Call) -> None:
    uses_list = call not in (gather, scatter) or world.rank == (call is scatter)
    wrong: list[Callable[[], Any]] = [
        lambda: [np.zeros(3)],
        lambda: [np.zeros(3), np.zeros(3), np.zeros(3)],
        lambda: [np.zeros(3), np.zeros(3, np.float32)],
        lambda: [np.zeros(3), None],
        lambda: [np.zeros(3), [0.0, 0.0, 0.0]],
    ]
    for _ in range(3):
        call(world, np.zeros(3), [np.zeros(3), np.zeros(3)])
    for make in wrong if uses_list else ():
        with pytest.raises((TypeError, ValueError)):
            call(world, np.zeros(3), make())
    if call not in (scatter, reduce_scatter) and uses_list:
        twice = np.arange(3.0)
        with pytest.raises(ValueError, match="memory"):
            call(world, np.zeros(3), [twice, twice])
        assert (twice == np.arange(3.0)).all()
    world.barrier()


@on_ranks(2)
def test_split_sizes_that_are_no_ints_are_refused_although_the_call_is_prepared(world: Any) -> None:
    x, y = np.ones(2), np.zeros(2)
    for _ in range(3):
        world.all_to_all_single(y, x, [1, 1], [1, 1])
    world.all_to_all_single(y, x, np.array([1, 1]), [np.int64(1), np.int64(1)])
    for wrong in ([1.0, 1.0], ["1", "1"]):
        with pytest.raises(TypeError, match="split_sizes"):
            world.all_to_all_single(y, x, wrong, [1, 1])


def frames_of_list_calls(group: Any) -> dict[str, int]:
    x, xs = np.ones(3), [np.ones(3), np.ones(3)]
    fewest = {}
    for call in LIST_CALLS:
        for _ in range(3):
            call(group, x, xs)
        fewest[call.__name__] = min(python_frames(partial(call, group, x, xs)) for _ in range(20))
    return fewest


def test_a_prepared_call_on_lists_takes_few_python_frames() -> None:
    # The functions above are a frame of their own; a gather's and a scatter's `_given` is another.
    for found in run_ranks(frames_of_list_calls, 2, "processes"):
        assert max(found.values()) <= 5, found


def test_a_mismatch_of_a_prepared_call_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # The worker may be at the channel too, and enter the call again before it is stopped.
    monkeypatch.setattr(Context, "need_worker", lambda _: None)

    def differ(group: Any) -> int:
        x = np.ones(4)
        for _ in range(2):
            group.all_reduce(x)
            group.broadcast(x, 0)
        with pytest.raises(CollectiveMismatch) as caught:
            part_ways(group, x)
        assert areas_of(group).progress() == {0: 5, 1: 5}
        return int(caught.value.seq or 0)

    assert run_ranks(differ, 2) == [5, 5]


def part_ways(group: Any, x: Any) -> None:
    if group.rank == 0:
        group.broadcast(x, 0)
    while areas_of(group).progress()[0] < 5:  # rank 0 is there: my call goes through in one piece
        pass
    group.all_reduce(x, async_op=True).wait()


def areas_of(group: Any) -> Any:
    return group.backend("cpu").group.memory


def first_runs(group: Any) -> int:
    for count in range(1, 100):
        x = np.zeros(count)
        for _ in range(3):
            group.all_reduce(x)
            group.send(x, 1 - group.rank) if group.rank else group.recv(x, 1 - group.rank)
    return int(load_word(call_sites.SITES.address + offsets.SITE_FULL))


def test_first_runs_of_operations_leave_the_table_of_lines_open() -> None:
    assert run_ranks(first_runs, 2, "processes") == [0, 0]


def test_a_message_with_a_separate_dtype_object_leaves_the_message_cache_usable() -> None:
    def exchange(group: Any) -> bool:
        strange = pickle.loads(pickle.dumps(np.ones(5)))
        for x in (strange, np.ones(5), np.ones(5)):
            if group.rank == 0:
                group.send(x, 1)
            else:
                group.recv(x, 0)
        if group.rank == 1:
            group.recv(np.ones(5), 0)
            return True
        return runs_prepared(group, Send, np.ones(5))

    assert run_ranks(exchange, 2)[0]


def test_a_receive_from_any_source_leaves_other_threads_messages_alone() -> None:
    def receive(group: Any) -> int:
        x = np.full(3, float(group.rank))
        if group.rank != 0:
            group.send(x, 0)
            group.barrier()
            return -1
        group.recv(x, 1)
        links = group.backend("cpu").group.links
        inbox = links.inbox(2)
        inbox.channel.words[offsets.C_RECEIVING // 8] = 1  # as while a long message is on its way
        work = group.irecv(x, None)
        assert work is not None
        assert not work.is_completed()
        inbox.channel.words[offsets.C_RECEIVING // 8] = 0
        sender = work.result()
        group.barrier()
        return int(sender)

    assert run_ranks(receive, 3)[0] == 2


def test_no_thread_receives_past_the_ring_while_the_inbox_is_held_or_keeps_a_message() -> None:
    def receive(group: Any) -> list[bool]:
        x, long = np.full(3, float(group.rank)), np.zeros(1000)  # longer than a cell
        if group.rank == 1:
            messages = [(x, 0), (long, 1), (x, 0), (x, 0)]
            for work in [group.isend(each, 0, tag) for each, tag in messages]:
                work.wait()
            group.barrier()
            return []
        backend = group.backend("cpu")
        group.recv(x, 1)
        group.recv(x, 1)  # the message with the other tag is kept for later
        inbox = backend.group.links.inbox(1)
        found = [runs_prepared(group, Recv, x)]
        group.recv(long, 1, 1)
        group.barrier()
        with inbox.lock, inbox:
            found.append(runs_prepared(group, Recv, x))
        return [*found, runs_prepared(group, Recv, x)]

    assert run_ranks(receive, 2)[0] == [False, False, True]


def test_a_message_that_another_thread_is_about_to_take_stays_in_its_place() -> None:
    def receive(group: Any) -> int:
        x = np.zeros(3)
        if group.rank == 1:
            group.send(x, 0, 5)
            group.barrier()
            group.send(np.ones(2), 0, 5)
            return 0
        group.barrier()
        inbox = group.backend("cpu").group.links.inbox(1)
        words = inbox.channel.words
        first = offsets.C_MESSAGE_TAG // 8
        words[first : first + 3] = 5, x.nbytes, 8
        words[offsets.C_UNMATCHED // 8] = 1  # as a look at an empty ring leaves it
        words[offsets.C_RECEIVING // 8] = 1  # as a thread that was let in just before
        links = group.backend("cpu").group.links
        looking = threading.Thread(target=receive_unexpected, args=(links, inbox.channel))
        looking.start()
        looking.join(0.1)
        words[offsets.C_UNMATCHED // 8] = 0  # it begins to move the message
        looking.join()
        words[offsets.C_RECEIVING // 8] = 0
        kept = len(inbox.unexpected)
        group.recv(x, 1, 5)
        group.recv(np.zeros(2), 1, 5)
        return kept

    assert run_ranks(receive, 2)[0] == 0


@pytest.mark.parametrize("times", [0, 2], ids=["new", "known"])
def test_a_blocking_message_that_is_interrupted_as_it_is_submitted_fails_the_group(
    times: int,
) -> None:
    def interrupt(group: Any) -> str:
        x = np.zeros(1 << 18)  # the receiver has to come for it
        for _ in range(times):
            group.send(x, 0) if group.rank else group.recv(x, 1)
        group.barrier()
        if group.rank == 0:
            with pytest.raises(Aborted) as aborted:
                group.barrier()
            return str(aborted.value)
        prepared = group.backend("cpu").launcher.latest[Send].get(0)
        if prepared is not None:  # as if another thread were at it
            prepared.run = lambda *_: offsets.BUSY
        link = group.backend("cpu").group.links.to(0)
        of, way = (prepared, "_submit") if times else (link, "submit")
        submit = prepared.submit_entry() if times else link.submit

        def submitted(*arguments: Any) -> Any:
            submit(*arguments)
            raise KeyboardInterrupt

        setattr(of, way, submitted)
        with pytest.raises(KeyboardInterrupt):
            group.send(x, 0)
        return ""

    assert "rank 1 was interrupted in send" in run_ranks(interrupt, 2, timeout=5.0)[0]


@on_ranks(2)
def test_a_message_that_ends_at_once_has_a_work_like_any_other(world: Any) -> None:
    peer = 1 - world.rank
    for turn in range(20):
        x, y = np.full(4, 10.0 * turn + world.rank), np.zeros(4)
        sent = world.isend(x, peer)
        world.barrier()  # so that the message is there
        received = world.irecv(y, peer)
        assert sent is not None
        assert received is not None
        assert received.result() == peer
        assert (y == 10.0 * turn + peer).all()
        assert sent.wait()
        assert sent.is_success()
        assert received.duration is not None


def frames_of_asynchronous_calls(group: Any) -> set[int]:
    x, y = np.ones(8), np.ones(8 * group.size)
    calls: list[Call] = [
        lambda **how: group.all_reduce(x, **how),
        lambda **how: group.reduce(x, 0, **how),
        lambda **how: group.broadcast(x, 0, **how),
        lambda **how: group.all_gather_into_tensor(y, x, **how),
        lambda **how: group.reduce_scatter_tensor(x, y, **how),
        lambda **how: group.all_to_all_single(y, 2 * y, **how),
    ]
    fewest = set()
    for call in calls:
        call()
        frames = [python_frames(partial(call, async_op=True)) for _ in range(10)]
        fewest.add(min(frames))
    return fewest


def test_all_prepared_collectives_take_the_same_python_frames_when_asynchronous() -> None:
    # A rank alone: with peers, a call ends at once only if they come in time.
    (frames,) = run_ranks(frames_of_asynchronous_calls, 1)
    assert len(frames) == 1
    assert max(frames) <= 9


def frames_of_prepared_calls(group: Any) -> tuple[int, int]:
    x, peer = np.ones(8), 1 - group.rank
    message = (lambda: dist.send(x, peer)) if group.rank else (lambda: dist.recv(x, peer))
    for _ in range(5):
        dist.all_reduce(x)
        message()
    # A call whose peer comes late takes more frames: the fewest of several are its own.
    reduced = [python_frames(lambda: dist.all_reduce(x)) for _ in range(20)]
    moved = [python_frames(message) for _ in range(20)]
    return min(reduced), min(moved)


def test_a_prepared_all_reduce_takes_three_python_frames_and_a_message_two() -> None:
    # A lambda around the call is a frame of its own.
    assert run_ranks(frames_of_prepared_calls, 2, "processes") == [(3 + 1, 2 + 1)] * 2
