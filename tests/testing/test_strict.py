"""Strict mode: Works without a wait, and arrays that are used before it, are named."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import nc10d as dist
from nc10d.base.debug_level import get_debug_level
from nc10d.errors import CollectiveMismatch
from nc10d.group.dispatch import Dispatcher
from nc10d.testing import run_ranks
from nc10d.testing.outcomes import REMARKS
from nc10d.testing.plugin.items import call_body
from nc10d.testing.plugin.strict import NotWaitedFor, poison, watching


def strictly(body: Callable[..., None], size: int = 2) -> None:
    """Run a body on ranks as the plugin does."""
    run_ranks(call_body, size, "threads", [body] * size, [{"world": None}] * size, [True] * size)


def dropped(world: Any) -> None:
    dist.all_reduce(np.ones(3), async_op=True)
    dist.barrier()


kept: list[Any] = []


def kept_by_a_list(world: Any) -> None:
    kept.append(world.isend(np.ones(3), 1 - world.rank))
    world.recv(np.ones(3), 1 - world.rank)


@pytest.mark.parametrize(("body", "call"), [(dropped, "all_reduce"), (kept_by_a_list, "send")])
def test_a_work_without_a_wait_is_named(body: Any, call: str) -> None:
    with pytest.raises(NotWaitedFor, match=rf"{call} at .*test_strict.py:\d+ was never waited for"):
        strictly(body)
    kept.clear()


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.complex64])
def test_a_result_read_before_its_wait_is_poison(dtype: Any) -> None:
    def body(world: Any) -> None:
        x = np.ones(3, dtype)
        work = dist.all_reduce(x, async_op=True)
        early = x.copy()
        work.wait()
        assert (x == 2).all(), "the wait brings the result"
        assert early[0] == 2

    with pytest.raises(AssertionError) as caught:
        strictly(body)
    (remark,) = getattr(caught.value, REMARKS, ("",))
    assert remark.count("test_strict.py:") == 2, remark


def test_a_write_in_flight_is_an_error_at_its_line() -> None:
    def body(world: Any) -> None:
        x = np.ones(3)
        work = dist.all_reduce(x, async_op=True)
        x += 1
        work.wait()

    with pytest.raises(ValueError, match="read-only") as caught:
        strictly(body)
    assert "had not been waited for" in getattr(caught.value, REMARKS)[0]


def test_a_failed_operation_leaves_the_array_as_it_was() -> None:
    arrays = [np.arange(3.0), np.arange(4.0)]

    def body(world: Any) -> None:
        dist.all_reduce(arrays[world.rank], async_op=True).wait()

    with pytest.raises(CollectiveMismatch):
        strictly(body)
    assert [x.tolist() for x in arrays] == [[0, 1, 2], [0, 1, 2, 3]]


def test_every_way_to_wait_counts() -> None:
    def body(world: Any) -> None:
        other, x, y = 1 - world.rank, np.ones(3), np.zeros(3)
        first, second = dist.all_reduce(x, async_op=True), dist.broadcast(x, 0, async_op=True)
        first.wait()
        second.wait()
        with dist.coalescing_manager(async_ops=True) as block:
            dist.all_reduce(x)
            dist.all_reduce(y)
        block.wait()
        seen: list[float] = []
        future = dist.all_reduce(x, async_op=True).get_future()
        future.then(lambda _: seen.append(x[0])).wait()
        assert seen == [8.0], "a callback sees the result"
        sent, came = dist.isend(x, other), dist.irecv(y, other)
        while dist.wait_any([sent]) is None:
            raise AssertionError("it has ended")
        assert came.result() == other
        assert (y == 8).all()
        work = dist.barrier(async_op=True)
        while not work.is_completed():
            pass
        for message in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, y, other)]
        ):
            message.wait()
        lists: list[Any] = [None, None]
        dist.all_gather_object(lists, world.rank)
        world.sendrecv(x, other, y, other)

    strictly(body)


def test_the_debug_level_is_as_before() -> None:
    before = get_debug_level()
    strictly(lambda world: dist.barrier())
    assert get_debug_level() is before


def test_bools_are_not_poisoned() -> None:
    x = np.array([True, False])
    poison(x)
    assert x.tolist() == [True, False]


def send_first(group: Any) -> None:
    x = np.ones(3)
    group.send(x, 1 - group.rank)
    group.recv(x, 1 - group.rank)


def both_at_once(group: Any) -> None:
    x, y = np.full(3, group.rank), np.zeros(3, int)
    work = group.isend(x, 1 - group.rank)
    group.recv(y, 1 - group.rank)
    work.wait()
    group.sendrecv(x, 1 - group.rank, y, 1 - group.rank)
    assert (y == 1 - group.rank).all()


def test_sends_wait_for_their_receivers_if_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    run_ranks(send_first, 2)
    monkeypatch.setenv("NC10D_SYNC_SENDS", "1")
    run_ranks(both_at_once, 2)
    with pytest.raises(CollectiveMismatch, match=r"in a circle.*waits in send #1"):
        run_ranks(send_first, 2)


def test_a_watched_block_leaves_the_groups_as_they_were() -> None:
    before = vars(Dispatcher)["watch_work"]
    with watching():
        assert vars(Dispatcher)["watch_work"] is not before
    assert vars(Dispatcher)["watch_work"] is before
