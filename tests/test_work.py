"""Work and Future: they end once, and every poll, wait, callback and await sees that end."""

import asyncio
import contextlib
import gc
import logging
import os
import threading
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nc10d.base.deadline import Deadline
from nc10d.errors import CollectiveTimeout, PeerLost
from nc10d.ops import AllGather, AllReduce, Barrier
from nc10d.work import Future, Work, collect_all, wait_all


class OpenWork(Work):
    """A Work that a test ends."""

    __slots__ = ()

    def end(self, *outcome: Any) -> bool:
        return self._finish(*outcome)


class EngineWork(Work):
    """A Work like a backend's: it ends when `event` is set; `_watch` starts a notifying thread."""

    __slots__ = ("event", "failure", "may_notify", "notifier", "watched")

    def __init__(self, failure: BaseException | None = None) -> None:
        super().__init__((Barrier(),))
        self.event = threading.Event()
        self.may_notify = threading.Event()
        self.may_notify.set()
        self.failure = failure
        self.watched = 0
        self.notifier: threading.Thread | None = None

    def _poll(self) -> None:
        if self.event.is_set():
            self._finish(self.failure)

    def _block(self, deadline: Deadline) -> None:
        self.event.wait(min(deadline.remaining(), 60))
        self._poll()

    def _watch(self) -> None:
        self.watched += 1
        self.notifier = threading.Thread(target=self._notify, daemon=True)
        self.notifier.start()

    def _notify(self) -> None:
        self.event.wait(60)
        self.may_notify.wait(60)
        self._finish(self.failure)


def test_a_work_ends_once_and_the_first_end_stays() -> None:
    work = OpenWork()
    assert not work.is_completed()
    assert work.end(None, 7)
    assert not work.end(PeerLost("late"))
    assert work.is_success()
    assert work.result() == 7
    assert work.exception() is None


@given(st.lists(st.booleans(), min_size=2, max_size=8))
def test_exactly_one_of_many_finishing_threads_is_first(failures: list[bool]) -> None:
    work = OpenWork()
    together = threading.Barrier(len(failures))
    firsts: list[bool] = []

    def finish(fail: bool) -> None:
        together.wait()
        firsts.append(work.end(PeerLost("x") if fail else None))

    threads = [threading.Thread(target=finish, args=(fail,)) for fail in failures]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert firsts.count(True) == 1


def test_a_failed_work_raises_afresh_on_every_wait_with_the_same_root_cause() -> None:
    root = PeerLost("rank 3 died", rank=3, group="world", op="all_reduce", seq=41)
    work = OpenWork()
    work.end(root)
    raised = []
    for _ in range(2):
        with pytest.raises(PeerLost, match="rank 3 died") as caught:
            work.wait()
        raised.append(caught.value)
    assert raised[0] is not raised[1]
    assert raised[0].__cause__ is raised[1].__cause__ is root
    assert (raised[0].rank, raised[0].seq) == (3, 41)
    assert root.__traceback__ is None
    assert work.exception() is root
    assert not work.is_success()


def test_a_wait_that_is_too_short_raises_in_its_caller_only() -> None:
    work = EngineWork()
    with pytest.raises(CollectiveTimeout, match="barrier"):
        work.wait(0.01)
    assert not work.is_completed()
    work.event.set()
    assert work.wait(5)
    assert work.is_success()


def test_a_wait_with_a_negative_timeout_is_the_callers_mistake() -> None:
    with pytest.raises(ValueError, match="timeout"):
        Work().wait(-1)


def test_without_a_callback_nothing_is_watched() -> None:
    work = EngineWork()
    work.event.set()
    assert work.wait()
    assert work.watched == 0


@pytest.mark.parametrize("look", [Work.wait, Work.is_completed, Work.is_success, Work.result])
def test_callbacks_run_on_the_notifier_in_order_though_others_know_before(look: Any) -> None:
    work = EngineWork()
    work.may_notify.clear()
    ran: list[tuple[int, int | None]] = []
    done = threading.Event()
    work.add_done_callback(lambda _: ran.append((1, threading.get_ident())))
    work.add_done_callback(lambda _: ran.append((2, threading.get_ident())))
    work.add_done_callback(lambda _: done.set())
    work.event.set()
    look(work)
    assert work.is_success()
    assert ran == []
    work.may_notify.set()
    assert done.wait(10)
    assert work.notifier is not None
    assert ran == [(1, work.notifier.ident), (2, work.notifier.ident)]
    assert work.watched == 1


@pytest.mark.parametrize("failure", [None, PeerLost("rank 1 is lost")])
def test_a_future_has_ended_for_all_who_know_that_its_work_has(failure: Any) -> None:
    work, ran = EngineWork(failure), list[Any]()
    work.may_notify.clear()
    future = work.get_future()
    future.add_done_callback(ran.append)
    work.event.set()
    assert work.is_completed()
    assert future.done()
    with pytest.raises(PeerLost) if failure else contextlib.nullcontext():
        future.value()
    assert ran == []
    work.may_notify.set()
    assert work.notifier is not None
    work.notifier.join()
    assert ran == [future]


def test_a_future_waits_in_a_callback_of_its_ended_work_and_lets_go_of_it() -> None:
    work, seen = OpenWork(), list[Any]()
    work.add_done_callback(lambda _: seen.append(future.wait(10)))
    future = work.get_future()
    work.end()
    assert seen == [[]]
    gone = weakref.ref(work)
    del work
    assert gone() is None


def test_a_thread_that_looks_at_one_work_while_it_waits_for_another_runs_no_callback() -> None:
    other = Work()

    class Curious(EngineWork):
        __slots__ = ()

        def _block(self, deadline: Deadline) -> None:
            other.is_completed()
            super()._block(deadline)

    work, ran = Curious(), []
    work.may_notify.clear()
    work.add_done_callback(ran.append)
    work.event.set()
    assert work.wait()
    assert ran == []
    work.may_notify.set()
    assert work.notifier is not None
    work.notifier.join()
    assert ran == [work]


def test_a_callback_on_an_ended_work_runs_at_once_in_its_thread() -> None:
    work = OpenWork()
    work.end()
    ran = []
    work.add_done_callback(lambda w: ran.append((w, threading.get_ident())))
    assert ran == [(work, threading.get_ident())]


def test_a_callback_that_raises_is_logged_and_the_next_one_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    work = OpenWork()
    ran = []
    work.add_done_callback(lambda _: 1 / 0)
    work.add_done_callback(lambda _: ran.append(True))
    with caplog.at_level(logging.ERROR, "nc10d"):
        work.end()
    assert ran == [True]
    assert "ZeroDivisionError" in caplog.text
    assert work.wait()


def test_the_result_of_a_collective_is_the_list_of_its_outputs() -> None:
    x, outs = np.zeros(2), [np.zeros(1), np.zeros(3)]
    work = OpenWork((AllReduce(x), AllGather(outs, x)))
    work.end()
    assert [id(array) for array in work.result()] == [id(x), *map(id, outs)]
    assert work.get_future().value()[0] is x


def test_the_duration_is_there_after_the_end_and_not_before() -> None:
    work = OpenWork()
    assert work.duration is None
    work.end()
    assert work.duration is not None
    assert 0 <= work.duration < 60


def test_a_work_can_be_awaited_and_its_failure_raises_there() -> None:
    async def both() -> tuple[bool, str]:
        good, bad = EngineWork(), EngineWork(PeerLost("gone"))
        for work in (good, bad):
            asyncio.get_running_loop().call_later(0.01, work.event.set)
        first = await good
        with pytest.raises(PeerLost) as caught:
            await bad
        return first, str(caught.value)

    assert asyncio.run(both()) == (True, "gone")


def test_an_await_that_is_cancelled_leaves_the_work_going() -> None:
    async def cancel() -> bool:
        work = EngineWork()
        task = asyncio.ensure_future(_await(work))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        work.event.set()
        return await work

    assert asyncio.run(cancel())


async def _await(work: Work) -> bool:
    return await work


def test_a_work_whose_loop_is_closed_ends_without_output(caplog: pytest.LogCaptureFixture) -> None:
    work = OpenWork()

    async def give_up() -> None:
        task = asyncio.ensure_future(_await(work))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(give_up())
    work.end()
    assert not caplog.records


def test_a_work_from_a_future_ends_as_it_does() -> None:
    good: Future[int] = Future()
    bad: Future[int] = Future()
    works = [Work.from_future(good), Work.from_future(bad)]
    good.set_result(5)
    bad.set_exception(KeyError("k"))
    assert works[0].result() == 5
    with pytest.raises(KeyError):
        works[1].wait()


def test_a_future_is_set_once() -> None:
    future: Future[int] = Future()
    with pytest.raises(RuntimeError, match="no value yet"):
        future.value()
    future.set_result(1)
    for again in (lambda: future.set_result(2), lambda: future.set_exception(KeyError())):
        with pytest.raises(RuntimeError, match="already"):
            again()
    assert future.done()
    assert future.wait() == future.value() == 1


def test_a_future_takes_only_exceptions_as_exceptions() -> None:
    with pytest.raises(TypeError):
        Future[int]().set_exception("no")  # type: ignore[arg-type]


def test_then_passes_on_values_failures_and_futures() -> None:
    start: Future[int] = Future()
    inner: Future[str] = Future()
    doubled = start.then(lambda f: f.value() * 2)
    broken = start.then(lambda f: f.value() / 0)
    rescued = broken.then(lambda f: "rescued" if _fails(f) else "no")
    chained = start.then(lambda _: inner)
    start.set_result(21)
    assert doubled.wait() == 42
    assert rescued.wait() == "rescued"
    assert not chained.done()
    inner.set_result("inner")
    assert chained.value() == "inner"


def _fails(future: Future[float]) -> bool:
    try:
        future.value()
    except ZeroDivisionError:
        return True
    return False


def test_then_takes_a_work_and_waits_for_it() -> None:
    work = OpenWork()
    chained = Work.get_future(work).then(lambda _: Work.from_future(last))
    last: Future[int] = Future()
    work.end()
    assert not chained.done()
    last.set_result(3)
    assert chained.wait() == 3


@given(st.permutations(range(4)), st.integers(0, 3))
def test_collect_all_ends_with_the_last_in_any_order(order: list[int], bad: int) -> None:
    futures: list[Future[int]] = [Future() for _ in order]
    together = collect_all(futures)
    for n, index in enumerate(order):
        assert not together.done()
        if index == bad:
            futures[index].set_exception(KeyError(index))
        else:
            futures[index].set_result(n)
    assert together.value() == futures


def test_collect_all_of_nothing_has_ended() -> None:
    assert collect_all([]).value() == []


def test_wait_all_returns_values_in_order_or_raises() -> None:
    futures: list[Future[int]] = [Future(), Future()]
    futures[1].set_result(1)
    with pytest.raises(CollectiveTimeout):
        wait_all(futures, 0.01)
    futures[0].set_result(0)
    assert wait_all(futures) == [0, 1]


def test_a_future_can_be_awaited() -> None:
    async def value() -> int:
        future: Future[int] = Future()
        asyncio.get_running_loop().call_soon(future.set_result, 9)
        return await future

    assert asyncio.run(value()) == 9


def test_an_exception_with_a_constructor_of_its_own_still_arrives() -> None:
    class Odd(Exception):
        def __init__(self, *, code: int) -> None:
            super().__init__(f"code {code}")
            self.code = code

    future: Future[int] = Future()
    future.set_exception(Odd(code=4))
    with pytest.raises(Odd, match="code 4") as caught:
        future.wait()
    assert caught.value.code == 4


def test_a_work_keeps_its_arrays_until_it_is_dropped() -> None:
    class Array(np.ndarray):
        pass

    x = np.zeros(4).view(Array)
    reference = weakref.ref(x)
    work = Work((AllReduce(x),))
    del x
    gc.collect()
    assert reference() is not None
    del work
    gc.collect()
    assert reference() is None


def test_a_forked_child_can_finish_works_though_a_thread_held_the_lock() -> None:
    from nc10d.base import promise

    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with promise._transition:
            held.set()
            release.wait(10)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(10)
    pid = os.fork()
    if pid == 0:
        os._exit(0 if OpenWork().end() else 1)
    release.set()
    holder.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
