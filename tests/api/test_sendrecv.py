"""MPI's calls: sendrecv, sendrecv_replace, probe, iprobe, wait_any and wait_some."""

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nc10d as dist
from nc10d.errors import CollectiveTimeout, PeerLost
from nc10d.testing import Ranks, run_ranks

SIZES = [0, 1, 1000, 16_384, 16_385, 70_001]


@pytest.fixture(scope="module")
def three() -> Any:
    with Ranks(3) as ranks:
        yield ranks


def payload(rank: int, number: int, count: int) -> Any:
    return np.arange(count) + 1000 * rank + 100_000 * number


def exchanges(
    group: Any, shifts: list[int], counts: list[int], tags: list[tuple[int, int]]
) -> None:
    """Send count[r] elements of rank r by a shift around the ring, under different tags."""
    rank, size = group.rank, group.size
    for number, (shift, (mine, theirs)) in enumerate(zip(shifts, tags, strict=True)):
        to, of = (rank + shift) % size, (rank - shift) % size
        # Tags alternate by the sender's number.
        tag, take = (mine, theirs)[rank % 2], (mine, theirs)[of % 2]
        count = [counts[(r + number) % len(counts)] for r in range(size)]
        x, y = payload(rank, number, count[rank]), np.full(count[of], -1)
        assert dist.sendrecv(x, to, y, of, tag=tag, recv_tag=take) == of
        assert np.array_equal(y, payload(of, number, count[of]))


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_exchanges_of_any_sizes_around_a_ring_end(three: Any, data: Any) -> None:
    rounds = data.draw(st.integers(1, 6))
    shifts = data.draw(st.lists(st.sampled_from([1, 2]), min_size=rounds, max_size=rounds))
    counts = data.draw(st.lists(st.sampled_from(SIZES), min_size=3, max_size=5))
    tag = st.sampled_from([0, 5, 2**62])
    tags = data.draw(st.lists(st.tuples(tag, tag), min_size=rounds, max_size=rounds))
    three.run(exchanges, *([[value] * 3 for value in (shifts, counts, tags)]))


@pytest.mark.ranks(2, strict=False)
def test_a_sendrecv_meets_a_send_and_a_receive(world: Any) -> None:
    """Meet a sendrecv by a send and a receive, and exchange beside messages in flight."""
    peer, x, y = 1 - world.rank, np.full(5, world.rank + 1.0), np.zeros(5)
    for _ in range(3):
        early = world.irecv(z := np.zeros(1), peer, tag=9)
        if world.rank == 0:
            assert world.sendrecv(x, peer, y, peer) == peer
        else:
            world.send(x, peer)
            world.recv(y, peer)
        assert (y == peer + 1).all()
        world.send(np.full(1, 8.0), peer, tag=9)
        early.wait()
        assert z[0] == 8
        y[:] = 0


def of_any_source(group: Any) -> None:
    x, y = np.full(3, group.rank), np.zeros(3, int)
    if group.rank == 0:
        assert group.sendrecv(x, 1, y, None, tag=4) == 2
        assert (y == 2).all()
    if group.rank == 1:
        group.recv(y, 0, tag=4)
    if group.rank == 2:
        group.send(x, 0, tag=4)


def test_a_sendrecv_takes_from_any_source(three: Any) -> None:
    three.run(of_any_source)


def with_itself(group: Any) -> None:
    rank = group.rank
    x, y = np.arange(6.0) + rank, np.zeros((2, 3))
    assert dist.sendrecv(x, rank, y, rank) == rank
    assert np.array_equal(y.ravel(), x)
    dist.sendrecv_replace(x, rank, rank)
    assert np.array_equal(y.ravel(), x)


def test_a_rank_may_exchange_with_itself(three: Any) -> None:
    three.run(with_itself)
    run_ranks(with_itself, 1)


@pytest.mark.ranks(2, strict=False)
def test_arrays_of_all_kinds_are_exchanged(world: Any) -> None:
    peer = 1 - world.rank
    for _ in range(2):
        got = bytearray(4)
        dist.sendrecv(bytearray([world.rank] * 4), peer, got, peer)
        assert got == bytearray([peer] * 4)
        wide = np.zeros((4, 6))
        dist.sendrecv(np.full((4, 3), world.rank + 1.0)[:, ::2], peer, wide[:, 1:5:2], peer)
        assert wide.sum() == 8 * (peer + 1) == wide[:, 1:5:2].sum()
        x = np.full((5, 4), world.rank, np.float32)
        dist.sendrecv_replace(x[:, 1], peer, peer)
        assert (x[:, 1] == peer).all()
        assert (x[:, 0] == world.rank).all()


def in_a_group(group: Any) -> None:
    """Exchange in a subgroup whose ranks are in another order; non-members do nothing."""
    sub = dist.new_group([2, 0], use_local_synchronization=False)
    if group.rank == 1:
        with pytest.warns(RuntimeWarning, match="sendrecv: this rank is not in the group"):
            assert dist.sendrecv(np.ones(1), 2, np.ones(1), 2, group=sub) == -1
        with pytest.warns(RuntimeWarning, match="probe"):
            assert dist.probe(group=sub) is None
        return
    peer = 2 - group.rank
    x, y = np.full(2, group.rank), np.zeros(2, int)
    assert dist.sendrecv(x, peer, y, peer, group=sub) == peer
    assert (y == peer).all()
    assert dist.sendrecv(x, None, y, None, group=sub, group_dst=1 - sub.rank()) == peer
    dist.send(x, peer, group=sub, tag=6)
    assert dist.probe(group=sub) == (peer, 6, 16)
    assert dist.probe(peer, group=sub) == (peer, 6, 16)
    dist.recv(y, peer, group=sub, tag=6)


def test_ranks_are_those_of_the_job_and_methods_take_those_of_the_group(three: Any) -> None:
    three.run(in_a_group)


@pytest.mark.ranks(2, strict=False)
def test_a_block_takes_both_messages_of_a_sendrecv(world: Any) -> None:
    peer, x, y = 1 - world.rank, np.full(3, world.rank), np.full(3, 9)
    with dist.coalescing_manager():
        assert dist.sendrecv(x, peer, y, peer) == -1
        assert (y == 9).all()
        with pytest.raises(ValueError, match="a probe is not possible inside a coalescing block"):
            dist.iprobe()
        # Both would copy an array now that an earlier call of the block may change.
        with pytest.raises(ValueError, match="sendrecv_replace is not possible inside"):
            dist.sendrecv_replace(x, peer, peer)
        with pytest.raises(ValueError, match="sendrecv with this rank itself is not possible"):
            dist.sendrecv(x, world.rank, np.zeros(3, x.dtype), world.rank)
    assert (y == peer).all()


@pytest.mark.ranks(2, strict=False)
def test_mistakes_are_refused_before_anything_is_sent(world: Any) -> None:
    peer, x = 1 - world.rank, np.zeros(8)
    for _ in range(2):  # the second time, messages of these kinds are prepared
        for args, words in (
            ((x, peer, x, peer), "tensor and output must not share memory"),
            ((x[:5], peer, x[4:], peer), "must not share memory"),
            ((x, world.rank, np.zeros(8), peer), "dst must be another rank"),
            ((x, 7, np.zeros(8), peer), "dst must be a rank of the group"),
            ((x, peer, np.zeros(8), peer, -1), "tag must be 0 or more"),
            ((x, peer, np.zeros(8), peer, 0, -1), "recv_tag must be 0 or more"),
            ((x, world.rank, np.zeros(7), world.rank), "output must have 8 elements"),
            ((x, world.rank, np.zeros(8), world.rank, 1, 2), "gives one tag"),
        ):
            with pytest.raises(ValueError, match=words):
                world.sendrecv(*args)
        with pytest.raises(TypeError, match="sendrecv: output"):
            world.sendrecv(x, peer, "no array", peer)
        with pytest.raises(TypeError, match="sendrecv: tensor"):
            world.sendrecv(None, peer, np.zeros(8), peer)
        with pytest.raises(ValueError, match="probe: src must be another rank"):
            world.probe(world.rank)
        with pytest.raises(ValueError, match="probe: tag must be 0 or more"):
            world.iprobe(tag=-1)
        assert world.iprobe() is None, "nothing was sent"
        world.barrier()
        world.sendrecv(np.zeros(8), peer, np.zeros(8), peer)
        world.barrier()


def probing(group: Any) -> None:
    if group.rank == 0:
        group.store.wait(["go"])
        group.send(np.zeros(3), 1, tag=5)
        dist.destroy_process_group()
        return
    waiting = group.irecv(np.zeros(1), 0, tag=1)
    assert group.iprobe(tag=1) is None
    with pytest.raises(CollectiveTimeout, match="probe: no such message has come to rank 1"):
        group.probe(0, timeout=0.05)
    group.store.set("go", "1")
    for _ in range(2):
        assert group.probe() == (0, 5, 24)
    group.recv(np.zeros(3), 0, tag=5)
    assert not waiting.is_completed()
    with pytest.raises(PeerLost, match="rank 0"):
        group.probe(0)


def test_a_probe_waits_and_receives_nothing() -> None:
    run_ranks(probing, 2)


def works_in_turn(group: Any) -> None:
    if group.rank == 1:
        for tag in (2, 0, 1):
            group.store.wait([f"take {tag}"])
            group.send(np.full(1, tag), 0, tag=tag)
        return
    xs = [np.full(1, -1) for _ in range(3)]
    works = [group.irecv(x, 1, tag=tag) for tag, x in enumerate(xs)]
    with pytest.raises(CollectiveTimeout, match=r"wait_any of 3: none has ended within 0\.02 s"):
        dist.wait_any(works, timeout=0.02)
    for tag in (2, 0):
        threading.Timer(0.02, group.store.set, (f"take {tag}", "1")).start()
        assert dist.wait_any(works) == tag
        assert xs[tag][0] == tag
        works[tag] = None
    group.store.set("take 1", "1")
    assert dist.wait_some(works) == [1]
    works[1] = None
    assert dist.wait_any(works) is None
    assert dist.wait_some(works) == []
    with dist.coalescing_manager(group):
        inside = group.all_reduce(np.zeros(1), async_op=True)
        with pytest.raises(ValueError, match="its coalescing block has not ended"):
            dist.wait_any([inside])


@pytest.mark.ranks(2, strict=False)
def test_wait_any_returns_the_work_that_has_ended(world: Any) -> None:
    works_in_turn(world)
    if world.rank == 1:
        world.all_reduce(np.zeros(1))


def test_wait_some_returns_all_that_have_ended_and_raises_their_failure() -> None:
    done, failed, pending = dist.Future(), dist.Future(), dist.Future()
    done.set_result(1)
    assert dist.wait_some([pending, done, None, done]) == [1, 3]
    assert dist.wait_some(work for work in [pending, done]) == [1]
    with pytest.raises(CollectiveTimeout, match="wait_any of 1"):
        dist.wait_any(iter([pending]), timeout=0.01)
    for wait in (dist.wait_any, dist.wait_some):
        with pytest.raises(TypeError, match="expected Works, Futures and Nones, got int at 1"):
            wait([done, 3])  # type: ignore[list-item]
    failed.set_exception(PeerLost("gone"))
    assert dist.wait_any([pending, done, failed]) == 1
    with pytest.raises(PeerLost, match="gone"):
        dist.wait_some([pending, done, failed])


def test_waiting_again_and_again_piles_up_no_callbacks() -> None:
    last: dist.Future[int] = dist.Future()
    for _ in range(5):
        with pytest.raises(CollectiveTimeout):
            dist.wait_any([last], timeout=0.005)
    assert last._callbacks == []


def into_another_array(group: Any) -> None:
    rank, size = group.rank, group.size
    x, out = np.arange(4.0) + rank, np.full(4, -1.0)
    total = np.arange(4.0) * size + sum(range(size))
    for _ in range(2):
        dist.all_reduce(x, out=out)
        assert np.array_equal(out, total)
        out[:] = -1
        dist.all_reduce(x, dist.SUM, async_op=True, out=out).wait()
        assert np.array_equal(out, total)
        dist.reduce(x, 1, dist.MAX, out=out if rank == 1 else None)
        assert np.array_equal(out, np.arange(4.0) + size - 1 if rank == 1 else total)
        assert np.array_equal(x, np.arange(4.0) + rank), "the input is kept"
    wide = np.zeros((2, 8))
    dist.all_reduce(x[::2], out=wide[1, ::4])
    assert wide.sum() == total[::2].sum()
    kept = out.copy()
    for wrong, kind, words in (
        (x, ValueError, "tensor and out must not share memory"),
        (np.zeros(3), ValueError, "out must have the shape of tensor"),
        (np.zeros(4, np.float32), TypeError, "out must have the dtype of tensor"),
        ("no array", TypeError, "all_reduce: out"),
    ):
        with pytest.raises(kind, match=words):
            dist.all_reduce(x, out=wrong)
    with pytest.raises(TypeError, match="BAND"):
        dist.all_reduce(x, dist.BAND, out=out)
    with dist.coalescing_manager(), pytest.raises(ValueError, match="inside a coalescing block"):
        dist.all_reduce(x, out=out)
    assert np.array_equal(out, kept), "a mistake changes nothing"


def test_a_reduction_may_have_an_output_of_its_own(three: Any) -> None:
    three.run(into_another_array)
