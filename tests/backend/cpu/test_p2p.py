"""Messages: any order of tags, any source, both directions at once, early and late receivers."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from on_ranks import on_ranks

import nc10d as dist
from nc10d.backend.cpu.native.offsets import RING_SLOTS
from nc10d.errors import CollectiveTimeout
from nc10d.group.coalescing import BatchedWork
from nc10d.testing import Ranks, run_ranks


@pytest.fixture(scope="module")
def three() -> Any:
    with Ranks(3) as ranks:
        yield ranks


def payload(src: int, dst: int, number: int, count: int) -> Any:
    return (np.arange(count) * 7 + src * 1000 + dst * 100 + number) % 30011


Plan = list[tuple[int, int, int, int]]  # source, destination, tag, count


def every_rank_sends(group: Any, plan: Plan, send_order: list[int], recv_order: list[int]) -> None:
    """Post all sends and receives in the given orders, then wait for all of them."""
    works, expected = [], []
    for kind, index in [("s", i) for i in send_order] + [("r", i) for i in recv_order]:
        src, dst, tag, count = plan[index]
        if kind == "s" and src == group.rank:
            works.append(group.isend(payload(src, dst, index, count), dst, tag=tag))
        if kind == "r" and dst == group.rank:
            x = np.full(count, -1)
            works.append(group.irecv(x, src, tag=tag))
            expected.append((x, payload(src, dst, index, count)))
    for work in works:
        work.wait()
    for got, want in expected:
        assert np.array_equal(got, want)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_messages_with_tags_of_their_own_may_be_awaited_in_any_order(three: Any, data: Any) -> None:
    pair = st.sampled_from([(s, d) for s in range(3) for d in range(3) if s != d])
    pairs = data.draw(st.lists(pair, min_size=1, max_size=12))
    sizes = st.sampled_from([0, 1, 5, 8191, 8193, 40_000])
    plan = [(s, d, tag, data.draw(sizes)) for tag, (s, d) in enumerate(pairs)]
    numbers = list(range(len(plan)))
    orders = [data.draw(st.permutations(numbers)) for _ in range(6)]
    three.run(every_rank_sends, [plan] * 3, orders[:3], orders[3:])


def taken_at_once(group: Any, turn: int) -> None:
    """Take a message at once that the link has seen before; its tag comes again, longer."""
    if group.rank == 1:
        group.send(np.full(1, 1), 0)
        group.send(np.full(1, 2), 0, tag=9)
        group.store.set(f"sent {turn}", "1")
        group.store.wait([f"posted {turn}"])
        group.send(np.full(2, 3), 0, tag=9)
        group.send(np.full(1, 4), 0, tag=5)
    if group.rank == 0:
        x, y, z = np.zeros(1, int), np.zeros(2, int), np.zeros(1, int)
        group.store.wait([f"sent {turn}"])
        group.irecv(x, 1).wait()  # then the link sees the next message, which is unexpected
        assert x[0] == 1
        group.irecv(x, 1, tag=9).wait()
        late = group.irecv(z, 1, tag=5)
        assert not late.is_completed()
        group.store.set(f"posted {turn}", "1")
        group.recv(y, 1, tag=9)
        late.wait()
        assert (x[0], y[0], z[0]) == (2, 3, 4)


def test_a_received_message_is_not_kept_as_unexpected(three: Any) -> None:
    for turn in range(2):  # the second time, the messages are prepared
        three.run(taken_at_once, [turn] * 3)


def batch(group: Any, *messages: tuple[Any, Any]) -> list[Any]:
    """Launch (isend or irecv, array) with the other rank of two as a batch."""
    peer = 1 - group.rank
    return group.batch_isend_irecv([dist.P2POp(*one, peer, group) for one in messages])  # type: ignore[no-any-return]


def swaps(group: Any, count: int, together: int) -> None:
    """Swap so many arrays in a batch, repeatedly: from the second time on the batch is prepared."""
    xs, ys = np.zeros((together, count)), np.zeros((together, count))
    for turn in range(20):
        xs[:] = np.arange(together)[:, None] + 1000 * turn + group.rank / 2
        ys[:] = -1
        # The message that is sent first arrives first, whichever array it is received into.
        into = ys[::-1] if turn % 2 else ys
        sends, recvs = [(dist.isend, x) for x in xs], [(dist.irecv, y) for y in into]
        works = batch(group, *recvs, *sends) if turn % 3 else batch(group, *sends, *recvs)
        for work in works[::-1] if turn % 5 else works:
            work.wait()
        assert np.array_equal(into, xs + (0.5 - group.rank))
        assert turn == 0 or not any(isinstance(work, BatchedWork) for work in works)
        assert [work.result() == 1 - group.rank for work in works].count(True) == together


@pytest.mark.parametrize("kind", ["threads", pytest.param("processes", marks=pytest.mark.long)])
@pytest.mark.parametrize(("count", "together"), [(1, 1), (3, 700), (100_000, 3)])
def test_a_batch_of_prepared_messages_keeps_their_order(
    kind: Any, count: int, together: int
) -> None:
    run_ranks(swaps, 2, kind, [count] * 2, [together] * 2)


def all_before_any(group: Any, sends_first: bool) -> None:
    """Launch more messages than a ring holds at first, and only then the messages they wait for."""
    peer, many = 1 - group.rank, 3 * RING_SLOTS
    xs, ys = np.arange(4.0 * many).reshape(many, 4) + group.rank / 2, np.zeros((many, 4))
    for turn in range(2):
        sends, recvs = [(group.isend, x) for x in xs], [(group.irecv, y) for y in ys]
        order = sends + recvs if sends_first else recvs + sends
        works = [start(array, peer, tag=turn) for start, array in order]
        for work in works:
            work.wait()
        assert np.array_equal(ys, xs + (0.5 - group.rank))


@pytest.mark.parametrize("sends_first", [True, False])
def test_no_number_of_messages_is_too_large_to_be_launched(pair: Any, sends_first: bool) -> None:
    pair.run(all_before_any, [sends_first] * 2)


@on_ranks(3, kind="processes")
def test_one_array_goes_to_several_ranks_at_once(world: Any) -> None:
    """Send an array to both peers, and receive from both, in batches that count once each."""
    peers = [(world.rank + way) % 3 for way in (1, 2)]
    x, ys = np.full(5, float(world.rank)), np.zeros((2, 5))
    sends = [dist.P2POp(dist.isend, x, peer, world) for peer in peers]
    recvs = [dist.P2POp(dist.irecv, y, peer, world) for y, peer in zip(ys, peers, strict=True)]
    for turn in range(20):
        x += 3.0
        before = world.seq
        works = world.batch_isend_irecv(recvs + sends)
        assert world.seq == before + 1
        for work in works:
            work.wait()
        assert turn == 0 or not any(isinstance(work, BatchedWork) for work in works)
        assert [work.result() for work in works[:2]] == peers
        assert np.array_equal(ys, np.transpose([[p + 3.0 * (turn + 1) for p in peers]] * 5))


@on_ranks(2)
def test_a_batch_of_tensors_returns_the_callers_own_tensors(world: Any) -> None:
    """Works of tensors are about the caller's own."""
    torch = pytest.importorskip("torch")
    import nc10d.torch  # noqa: F401

    x, y = torch.arange(4) + world.rank, torch.zeros(4, dtype=torch.int64)
    for _ in range(3):
        y.zero_()
        sent, came = batch(world, (dist.isend, x), (dist.irecv, y))
        assert came.wait()
        assert sent.wait()
        assert sent.ops[0].x is x
        assert came.ops[0].x is y
        assert torch.equal(y, torch.arange(4) + 1 - world.rank)


def any_source_beside_a_rank(group: Any) -> None:
    """A thread receives from any source, another from a named rank, on the same link."""
    if group.rank == 0:
        for number in range(600):
            group.send(np.array([number]), 1, tag=number % 2)
        return

    def by_name() -> None:
        for number in range(1, 600, 2):
            mine = np.zeros(1, np.int64)
            group.irecv(mine, 0, tag=1).wait()
            named.append(int(mine[0]) == number)

    named: list[bool] = []
    thread = threading.Thread(target=by_name)
    thread.start()
    for number in range(0, 600, 2):
        x = np.zeros(1, np.int64)
        assert group.recv(x, None, tag=0) == 0
        assert x[0] == number
    thread.join()
    assert len(named) == 300
    assert all(named)


def test_a_receive_from_any_source_is_woken_beside_a_receive_from_a_rank(pair: Any) -> None:
    pair.run(any_source_beside_a_rank)


@on_ranks(2)
def test_a_prepared_message_overwrites_only_bytes_that_have_been_sent(world: Any) -> None:
    x = np.zeros(12)
    for turn in range(4):
        x[:] = 100 * turn + world.rank
        for work in batch(world, (dist.isend, x[:8]), (dist.irecv, x[4:])):
            work.wait()
        assert (x[:4] == 100 * turn + world.rank).all()
        assert (x[4:] == 100 * turn + 1 - world.rank).all()


@on_ranks(2)
def test_a_refused_batch_of_prepared_messages_sends_nothing(world: Any) -> None:
    """A batch with an array that can't be written sends nothing: the next batch is not confused."""
    x, y, still = np.full(4, float(world.rank)), np.zeros(4), np.zeros(4)
    still.flags.writeable = False
    for _ in range(3):
        for work in batch(world, (dist.isend, x), (dist.irecv, y)):
            work.wait()
    with pytest.raises(ValueError, match="read-only"):
        batch(world, (dist.isend, np.full(4, 77.0)), (dist.irecv, still))
    for work in batch(world, (dist.isend, x), (dist.irecv, y)):
        work.wait()
    assert (y == 1 - world.rank).all()


@on_ranks(2)
def test_a_synchronous_block_moves_all_of_its_parts(world: Any) -> None:
    peer = 1 - world.rank
    x, y, z = np.full(100_000, world.rank), np.zeros(100_000, np.int64), np.ones(300_000)
    with dist.coalescing_manager(world):
        world.send(x, peer)
        world.recv(y, peer)
        world.all_reduce(z)
    assert (y == peer).all()
    assert (z == 2).all()


@on_ranks(3)
def test_a_receive_from_any_source_is_not_bound_to_the_first_sender(world: Any) -> None:
    if world.rank:
        if world.rank == 2:
            world.recv(np.zeros(1), 0)  # rank 1 was heard first
        world.send(np.full(2, float(world.rank)), 0)
        return
    x = np.zeros(2)
    assert world.recv(x, None) == 1
    world.send(np.zeros(1), 2)
    with dist.coalescing_manager(world):
        world.recv(x, None)
    assert x[0] == 2


@on_ranks(2)
def test_an_early_message_reaches_a_foreign_array(world: Any) -> None:
    if world.rank == 0:
        world.send(np.arange(4.0), 1, tag=1)
        world.send(np.zeros(1), 1, tag=2)
        return
    world.recv(np.zeros(1), 0, tag=2)
    whole = np.zeros(8)
    world.recv(Exported(whole[::2]), 0, tag=1)
    assert np.array_equal(whole, [0, 0, 1, 0, 2, 0, 3, 0])


class Exported:
    """An array that is known by DLPack alone, as another framework's would be."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


def a_message_and_then_none(group: Any, passed: threading.Barrier) -> str:
    x = np.zeros(4)
    if group.rank == 0:
        group.send(x, 1)
    elif group.rank == 1:
        group.recv(x, 0)
    passed.wait()
    text = ""
    if group.rank == 0:
        with pytest.raises(CollectiveTimeout) as caught:
            group.recv(x, 1, timeout=0.1)
        text = str(caught.value)
    passed.wait()  # a rank that returns is none to wait for
    return text


def test_an_error_names_the_peers_of_a_rank_that_has_only_exchanged_messages() -> None:
    message, *_ = run_ranks(a_message_and_then_none, 3, "threads", [threading.Barrier(3)] * 3)
    last = "last operations: rank 0 a message (to rank 1), rank 1 a message (from rank 0), "
    assert f"{last}rank 2 nothing yet" in message
