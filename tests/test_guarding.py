"""DETAIL: an array in flight can't be written to, and who does so all the same is told."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import nc10d as dist
from nc10d import DebugLevel
from nc10d.testing.ranks import Ranks, run_ranks


@pytest.fixture(autouse=True)
def in_detail() -> Iterator[None]:
    before = dist.get_debug_level()
    dist.set_debug_level(DebugLevel.DETAIL)
    yield
    dist.set_debug_level(before)


def started(group: Any, may_enter: threading.Event) -> tuple[Any, ...]:
    """An all_reduce of rank 0 that is in flight until rank 1 may enter it."""
    x = np.arange(4.0)
    if group.rank == 1:
        assert may_enter.wait(30)
        group.all_reduce(x)
        return (x,)
    view = x[:]  # made before: it stays writable
    work = group.all_reduce(x, async_op=True)
    return x, view, work


def writes_to_the_array(group: Any, may_enter: threading.Event) -> Any:
    x, *flight = started(group, may_enter)
    if flight:
        with pytest.raises(ValueError, match="read-only"):
            x[0] = 7
        may_enter.set()
        flight[1].wait()
        x[0] += 0  # it is the program's again
    return x


def test_an_array_in_flight_is_read_only_until_its_operation_has_ended() -> None:
    for x in run_ranks(writes_to_the_array, 2, "threads", [threading.Event()] * 2):
        assert (x == 2 * np.arange(4.0)).all()


def writes_to_a_view(group: Any, may_enter: threading.Event) -> Any:
    x, *flight = started(group, may_enter)
    if flight:
        view, work = flight
        view[2] = 99
        may_enter.set()
        with pytest.raises(ValueError, match=r"all_reduce: an array of 4 float64 was written to"):
            work.wait()
        assert x.flags.writeable
    return x


def test_a_write_past_that_is_an_error_that_names_the_operation() -> None:
    mine, theirs = run_ranks(writes_to_a_view, 2, "threads", [threading.Event()] * 2)
    assert (mine == [0, 1, 99, 3]).all()
    assert (theirs == 2 * np.arange(4.0)).all()


def touches_an_input(group: Any, may_enter: threading.Event) -> None:
    x, out = np.arange(3.0), np.zeros(6)
    if group.rank == 1:
        assert may_enter.wait(30)
        group.all_gather_into_tensor(out, x)
        return
    work = group.all_gather_into_tensor(out, x, async_op=True)
    x.setflags(write=True)  # somebody insists
    x[0] = 5
    may_enter.set()
    with pytest.raises(ValueError, match="all_gather"):
        work.wait()


def test_an_input_that_is_written_to_is_told_too() -> None:
    run_ranks(touches_an_input, 2, "threads", [threading.Event()] * 2)


def in_turn(group: Any) -> Any:
    """Operations on the same array, and on parts of it, in flight at once."""
    x = np.ones(6)
    middle, first = x[2:4], x[:1]
    works = [group.all_reduce(x, async_op=True), group.all_reduce(middle, async_op=True)]
    group.all_reduce(x)
    works.append(group.broadcast(x, 0, async_op=True))
    with dist.coalescing_manager(group, async_ops=True) as block:
        group.all_reduce(x)
        group.all_reduce(first)
    block.wait()
    for work in works:
        work.wait()
    return x


def test_operations_on_the_same_memory_keep_their_order() -> None:
    for x in run_ranks(in_turn, 2):
        assert (x == [16, 8, 16, 16, 8, 8]).all()


def dropped(group: Any) -> Any:
    x = np.ones(4)
    group.all_reduce(x, async_op=True)
    group.barrier()
    deadline = time.monotonic() + 30
    while not x.flags.writeable and time.monotonic() < deadline:
        threading.Event().wait(0.001)  # its end is nobody's here to wait for
    return x


def test_a_work_that_is_dropped_gives_its_arrays_back() -> None:
    for x in run_ranks(dropped, 2):
        assert x.flags.writeable
        assert (x == 2).all()


def calls_back(group: Any) -> bool:
    called = threading.Event()
    work = group.all_reduce(np.ones(4), async_op=True)
    work.add_done_callback(lambda _: called.set())
    work.wait()
    return called.wait(30)


def test_callbacks_are_called_whoever_finds_the_end() -> None:
    with Ranks(2) as ranks:
        for _ in range(20):
            assert ranks.run(calls_back) == [True, True]


def every_call(group: Any) -> list[Any]:
    size, rank = group.size, group.rank
    outs: list[Any] = []

    def call(name: str, out: Any, *arguments: Any) -> None:
        getattr(group, name)(*arguments, async_op=True).wait()
        outs.append(out)

    x = np.full((2, 3), rank + 1.0, order="F")
    call("all_reduce", x, x)
    got = [np.zeros(2) for _ in range(size)]
    call("all_gather", got, got, np.full(2, float(rank)))
    out = np.zeros(2)
    call("reduce_scatter_tensor", out, out, np.arange(2.0 * size))
    call("all_to_all", got, got, [np.full(2, 10.0 * rank + r) for r in range(size)])
    call("scatter", out, out, got if rank == 0 else None, 0)
    work = group.isend(out, 1) if rank == 0 else group.irecv(out, 0)
    work.wait()
    return [*outs, work.get_future().wait() is not None]


def test_results_are_the_same_as_without() -> None:
    with Ranks(2) as ranks:
        watched = ranks.run(every_call)
    dist.set_debug_level(DebugLevel.OFF)
    with Ranks(2) as ranks:
        plain = ranks.run(every_call)
    assert repr(watched) == repr(plain)
