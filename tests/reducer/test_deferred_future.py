"""The waiting thread completes a DeferredFuture: derived Futures, short waits, refused uses."""

import asyncio
from datetime import timedelta

import pytest

from nc10d.errors import CollectiveTimeout
from nc10d.reducer.hooks.deferred_future import OrderedFuture
from nc10d.work import Future, Work, collect_all

MOMENT = 0.01


def doubled(outcome, steps=None):
    """Return the OrderedFuture of twice the value of an outcome; `steps` collects its results."""

    def double(value):
        found = 2 * value()
        if steps is not None:
            steps.append(found)
        return found

    return OrderedFuture(outcome, double)


def ended(value):
    future = Future()
    future.set_result(value)
    return future


@pytest.mark.parametrize("timeout", [0, MOMENT, timedelta(seconds=MOMENT)])
@pytest.mark.parametrize("work", [False, True], ids=["future", "work"])
@pytest.mark.parametrize("then", [False, True], ids=["itself", "then"])
def test_a_wait_that_times_out_affects_its_caller_only(timeout, work, then):
    future, steps = Future(), []
    deferred = doubled(Work.from_future(future) if work else future, steps)
    waiting = deferred.then(lambda done: done.value() + 1) if then else deferred
    for _ in range(2):
        with pytest.raises(CollectiveTimeout, match="goes on"):
            waiting.wait(timeout)
    future.set_result(21)
    assert waiting.wait(timeout) == 42 + then
    assert steps == [42]


def test_a_wait_that_is_interrupted_can_be_repeated():
    class Interrupted(Future):
        def wait(self, timeout=None):
            if not self.done():
                self.set_result(4)
                raise KeyboardInterrupt
            return super().wait(timeout)

    deferred = doubled(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        deferred.wait()
    assert deferred.wait() == 8


def test_the_step_receives_a_timeout_of_the_outcome_itself():
    future = Future()
    future.set_exception(CollectiveTimeout("the group's"))
    deferred = doubled(future)
    for _ in range(2):
        with pytest.raises(CollectiveTimeout, match="the group's"):
            deferred.wait(3)


def test_collect_all_ends_inside_a_wait_for_it():
    parts = [
        ended(1),
        doubled(ended(2)),
        doubled(ended("no").then(lambda _: 1 / 0)),
        doubled(ended(3)),
    ]
    found = collect_all(parts).wait(3)
    assert found == parts
    assert [part.value() for part in (*found[:2], found[3])] == [1, 4, 6]
    with pytest.raises(ZeroDivisionError):
        found[2].value()


def test_a_future_behind_collect_all_ends_too():
    deferred = collect_all([doubled(ended(2)), doubled(ended(3))])
    assert deferred.then(lambda done: sum(part.value() for part in done.value())).wait(3) == 10


async def awaiting(future):
    return await future


@pytest.mark.parametrize(
    "make",
    [doubled, lambda end: doubled(end).then(lambda _: 2), lambda end: collect_all([doubled(end)])],
    ids=["itself", "then", "collect_all"],
)
@pytest.mark.parametrize(
    "use",
    [
        lambda deferred: Work.from_future(deferred).result(),
        lambda deferred: asyncio.run(awaiting(deferred)),
    ],
    ids=["from_future", "await"],
)
def test_a_use_that_would_block_forever_is_refused(use, make):
    deferred = make(ended(1))
    with pytest.raises(RuntimeError, match="nobody would"):
        use(deferred)
    assert deferred.wait() == use(deferred)  # it has ended: no wait is needed


def test_a_callback_of_another_future_cannot_return_a_deferred_future():
    child = ended(1).then(lambda _: doubled(ended(2)))
    with pytest.raises(RuntimeError, match="nobody would"):
        child.wait(3)


def test_a_callback_of_a_deferred_future_can_return_another():
    child = doubled(ended(1)).then(lambda _: doubled(ended(2)))
    assert child.wait(3) == 4
