"""DETAIL: the program cannot write to an array in flight, or gets an error if it does."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from on_ranks import on_ranks

import nc10d as dist
from nc10d import DebugLevel
from nc10d.group import race_check
from nc10d.group.race_check import race_checked, wait_for_conflicts
from nc10d.ops import AllReduce, Broadcast, Op, Recv, Send
from nc10d.reducer.reducer import Reducer
from nc10d.testing import Ranks, run_ranks
from nc10d.work import Work


@pytest.fixture(autouse=True)
def in_detail() -> Iterator[None]:
    before = dist.get_debug_level()
    dist.set_debug_level(DebugLevel.DETAIL)
    yield
    dist.set_debug_level(before)


def plain(group: Any, values: Any) -> Any:
    return np.array(values)


def registered(group: Any, values: Any) -> Any:
    return dist.from_numpy(values, group)


def tensor(group: Any, values: Any) -> Any:
    torch = pytest.importorskip("torch")
    pytest.importorskip("nc10d.torch")
    return torch.tensor(values)


def column(group: Any, values: Any) -> Any:
    table = np.zeros((*np.shape(values), 3))
    table[..., 1] = values
    return table[..., 1]


of_every_kind = pytest.mark.parametrize("make", [plain, registered, tensor, column])


def started(group: Any, may_enter: threading.Event) -> tuple[Any, ...]:
    """Return an all_reduce of rank 0 that is in flight until rank 1 may enter it."""
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
        x[0] += 0  # the program may write again
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


def test_a_write_past_the_read_only_flag_is_an_error_that_names_the_operation() -> None:
    mine, theirs = run_ranks(writes_to_a_view, 2, "threads", [threading.Event()] * 2)
    assert (mine == [0, 1, 99, 3]).all()
    assert (theirs == 2 * np.arange(4.0)).all()


def launches_a_kept_block(group: Any, may_enter: threading.Event) -> list[float]:
    x, y = np.ones(3), np.ones((2, 2))
    with group.coalescing_manager() as block:
        group.all_reduce(x)
        group.all_reduce(y)
    plan = block.plan()
    if group.rank == 1:
        assert may_enter.wait(30)
        plan.launch()
        return [x[0], y[0, 0]]
    work = plan.launch(async_op=True)
    for array in (x, y):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 7
    may_enter.set()
    work.wait()
    return [x[0], y[0, 0]]


def test_the_arrays_of_a_kept_block_are_watched_at_each_launch() -> None:
    ended = run_ranks(launches_a_kept_block, 2, "threads", [threading.Event()] * 2)
    assert ended == [[4.0, 4.0]] * 2


def touches_an_input(group: Any, may_enter: threading.Event) -> None:
    x, out = np.arange(3.0), np.zeros(6)
    if group.rank == 1:
        assert may_enter.wait(30)
        group.all_gather_into_tensor(out, x)
        return
    work = group.all_gather_into_tensor(out, x, async_op=True)
    x.setflags(write=True)  # the program makes it writable
    x[0] = 5
    may_enter.set()
    with pytest.raises(ValueError, match="all_gather"):
        work.wait()


def test_writing_to_an_input_is_an_error_too() -> None:
    run_ranks(touches_an_input, 2, "threads", [threading.Event()] * 2)


def in_turn(group: Any, make: Any) -> Any:
    """Launch operations on the same array, and on parts of it, at the same time."""
    x = make(group, np.ones(6))
    middle, first = x[2:4], x[:1]
    works = [group.all_reduce(x, async_op=True), group.all_reduce(middle, async_op=True)]
    group.all_reduce(x)
    works.append(group.broadcast(x, 0, async_op=True))
    with dist.coalescing_manager(group, async_ops=True) as block:
        group.all_reduce(x)
        group.all_reduce(first)
    works += [block, group.all_reduce(x, async_op=True)]
    for work in works:
        work.wait()
    return np.asarray(x).tolist()


@of_every_kind
def test_operations_on_the_same_memory_keep_their_order(make: Any) -> None:
    for x in run_ranks(in_turn, 2, "threads", [make] * 2):
        assert x == [32, 16, 32, 32, 16, 16]


def dropped(group: Any) -> Any:
    x = np.ones(4)
    group.all_reduce(x, async_op=True)
    group.barrier()
    deadline = time.monotonic() + 30
    while not x.flags.writeable and time.monotonic() < deadline:
        threading.Event().wait(0.001)  # no thread here waits for its end
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


def test_callbacks_are_called_whichever_thread_finds_the_end() -> None:
    with Ranks(2) as ranks:
        for _ in range(20):
            assert ranks.run(calls_back) == [True, True]


def every_call(group: Any, make: Any) -> list[Any]:
    size, rank = group.size, group.rank
    outs: list[Any] = []

    def new(values: Any) -> Any:
        return make(group, values)

    def call(name: str, out: Any, *arguments: Any) -> None:
        getattr(group, name)(*arguments, async_op=True).wait()
        outs.append([x.tolist() for x in out])

    x = new(np.full((2, 3), rank + 1.0, order="F"))
    call("all_reduce", x, x)
    got = [new(np.zeros(2)) for _ in range(size)]
    call("all_gather", got, got, new(np.full(2, float(rank))))
    out = new(np.zeros(2))
    call("reduce_scatter_tensor", out, out, new(np.arange(2.0 * size)))
    call("all_to_all", got, got, [new(np.full(2, 10.0 * rank + r)) for r in range(size)])
    call("scatter", out, out, got if rank == 0 else None, 0)
    work = group.isend(out, 1) if rank == 0 else group.irecv(out, 0)
    work.wait()
    outs.append(out.tolist())
    for array in (x, out, *got):
        array[...] += 1  # the program may write again
    return [*outs, work.get_future().wait() is not None]


@of_every_kind
def test_results_are_the_same_without_the_check(make: Any) -> None:
    with Ranks(2) as ranks:
        watched = ranks.run(every_call, [make] * 2)
    dist.set_debug_level(DebugLevel.OFF)
    with Ranks(2) as ranks:
        assert watched == ranks.run(every_call, [make] * 2)


def averages(group: Any) -> Any:
    params = [np.zeros(3), np.zeros((2, 2), np.float32)]
    reducer = Reducer(params, group)
    for _ in range(2):
        reducer.begin()
        for i, gradient in enumerate(reducer.gradients):
            gradient[...] = group.rank + i
            reducer.grad_ready(i)
        reducer.finish()
    return [gradient.tolist() for gradient in reducer.gradients]


def test_a_reducers_buckets_may_be_watched() -> None:
    assert run_ranks(averages, 2) == [[[0.5] * 3, [[1.5] * 2] * 2]] * 2


class Flight(Work):
    """An operation that ends when a thread waits for it: then it calls `land` with its ops."""

    def __init__(self, ops: Sequence[Op], land: Callable[[Sequence[Op]], object]) -> None:
        super().__init__(ops)
        self.land = land

    def end(self) -> None:
        self._finish()

    def _block(self, deadline: Any) -> None:
        if self._state == 0:
            self.land(self.ops)
            self.end()


def fly(*ops: Op, land: Callable[[Any], object] = lambda _: None) -> tuple[Any, Flight]:
    flights: list[Flight] = []

    def launch(copies: Sequence[Op]) -> Work:
        flights.append(Flight(copies, land))
        return flights[0]

    return race_checked(ops, launch), flights[0]


def never(_: object) -> None:
    raise AssertionError("nothing had to wait for this")


@pytest.mark.parametrize("view_first", [True, False])
def test_a_view_and_its_base_come_back_in_whatever_order(view_first: bool) -> None:
    for ends_first in (0, 1):
        base = np.arange(8.0)
        view = base[:4]
        sent = [view, base] if view_first else [base, view]
        works, flights = zip(*(fly(Send(x, 1)) for x in sent), strict=True)
        assert not base.flags.writeable
        flights[ends_first].end()
        assert works[ends_first].is_completed()
        flights[1 - ends_first].end()
        assert base.flags.writeable
        assert view.flags.writeable
        for work in works:
            work.wait()


def test_arrays_that_numpy_would_keep_read_only_are_watched_by_checksums() -> None:
    class Bare:
        memory = np.zeros(2)
        __array_interface__ = memory.__array_interface__

    x = np.asarray(Bare())
    work, flight = fly(Send(x, 1))
    x[0] = 7
    flight.end()
    with pytest.raises(ValueError, match="send: an array of 2 float64 was written to"):
        work.wait()


def test_a_later_use_waits_whatever_the_user_sees_as_the_results() -> None:
    x = np.zeros(2)
    work, _ = fly(AllReduce(x), land=lambda ops: ops[0].x.fill(5))
    work.ops = (AllReduce(object()),)
    wait_for_conflicts([Send(x, 1)])
    assert x.tolist() == [5, 5]


def test_a_later_use_waits_for_a_block_whose_arrays_overlap() -> None:
    x = np.zeros(3)
    fly(AllReduce(x), AllReduce(x[:1]), land=lambda ops: x.fill(5))
    later, _ = fly(AllReduce(x), land=lambda ops: ops[0].x.__iadd__(1))
    later.wait()
    assert x.tolist() == [6, 6, 6]


def test_columns_of_the_same_array_do_not_wait_for_each_other() -> None:
    x = np.zeros((4, 4))
    received, flight = fly(Recv(x[:, 0], 1), land=never)
    wait_for_conflicts([Send(x[:, 3], 1)])
    both, _ = fly(Recv(x[:, 1], 1), Send(x[:, 2], 1), land=lambda ops: ops[0].x.fill(2))
    both.wait()
    flight.ops[0].x.fill(1)
    flight.end()
    received.wait()
    assert x.tolist() == [[1, 2, 0, 0]] * 4


def test_a_broadcasts_root_may_be_read_only() -> None:
    x = np.arange(3.0)
    x.flags.writeable = False
    work, flight = fly(Broadcast(x, 0))
    flight.end()
    assert work.wait()
    assert not x.flags.writeable


def test_making_an_array_read_only_in_flight_is_an_error() -> None:
    base = np.zeros(4)
    view = base[:2]
    work, flight = fly(Recv(view, 1))
    base.flags.writeable = False
    flight.end()
    with pytest.raises(ValueError, match="read-only"):
        work.wait()


def test_a_callback_may_wait_for_a_thread_that_waits() -> None:
    inside, go = threading.Event(), threading.Event()

    class Slow(Flight):
        def _block(self, deadline: Any) -> None:
            inside.set()
            assert go.wait(30)

    flight = Slow([], never)
    work = race_checked([Send(np.ones(2), 1)], lambda _: flight)
    assert work is not None
    waiter = threading.Thread(target=work.wait)
    met = []

    def meet(_: object) -> None:
        go.set()
        waiter.join(30)
        met.append(not waiter.is_alive())

    work.add_done_callback(meet)
    waiter.start()
    assert inside.wait(30)
    flight.end()
    waiter.join(30)
    assert met == [True]


def test_a_launching_thread_runs_no_callbacks() -> None:
    x, threads = np.zeros(2), []
    work, flight = fly(AllReduce(x))
    work.add_done_callback(lambda _: threads.append(threading.get_ident()))
    wait_for_conflicts([Send(x, 1)])
    assert work._state
    assert not threads
    maker = threading.Thread(target=flight.end)
    maker.start()
    maker.join()
    assert threads == [maker.ident]


def test_a_forked_child_has_its_arrays_back() -> None:
    base = np.zeros(4)
    view = base[:2]
    flights = [fly(Send(x, 1)) for x in (view, base)]
    locked, release = threading.Event(), threading.Event()

    def hold() -> None:
        with race_check._lock:
            locked.set()
            release.wait(30)

    holder = threading.Thread(target=hold)
    holder.start()
    locked.wait(30)
    pid = os.fork()
    if pid == 0:
        wait_for_conflicts([AllReduce(base)])
        os._exit(0 if base.flags.writeable and view.flags.writeable else 1)
    release.set()
    holder.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not base.flags.writeable
    for work, _ in flights:
        work.wait()
    assert base.flags.writeable


def writes_to_a_new_view(group: Any, async_op: bool) -> list[float]:
    x = np.ones(1000)
    table = x.reshape(2, 500)
    first = group.all_reduce(x, async_op=True)
    second = group.broadcast(table[0, :10], 0, async_op=async_op)  # made while x is read-only
    first.wait()
    if second is not None:
        second.wait()
    return sorted(set(x.tolist()))


@pytest.mark.parametrize("async_op", [False, True])
def test_a_view_made_of_an_array_in_flight_can_be_used_at_once(async_op: bool) -> None:
    assert run_ranks(writes_to_a_new_view, 2, "threads", [async_op] * 2) == [[2.0]] * 2


@on_ranks(2)
def test_an_array_that_the_program_made_read_only_stays_so(world: Any) -> None:
    x = np.ones(10)
    x.flags.writeable = False
    world.all_reduce(np.ones(10), async_op=True).wait()
    work = world.isend(x, 1 - world.rank)
    with pytest.raises(ValueError, match="read-only"):
        world.broadcast(x, 1 - world.rank, async_op=True)
    world.recv(np.ones(10), 1 - world.rank)
    work.wait()
    assert not x.flags.writeable
