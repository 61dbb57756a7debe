"""What ends in the thread that waits: what can be made of it, and waits that are too short."""

import asyncio
from datetime import timedelta

import pytest

from nc10d.errors import CollectiveTimeout
from nc10d.reducer.hooks.deferred_future import OrderedFuture
from nc10d.work import Future, Work, collect_all

MOMENT = 0.01


def behind(outcome, steps=None):
    """Return the Lazy of twice the value of an outcome; `steps` are those that have been taken."""

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
def test_a_wait_that_is_too_short_is_its_callers_alone(timeout, work, then):
    future, steps = Future(), []
    lazy = behind(Work.from_future(future) if work else future, steps)
    waiting = lazy.then(lambda done: done.value() + 1) if then else lazy
    for _ in range(2):
        with pytest.raises(CollectiveTimeout, match="it goes on"):
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

    lazy = behind(Interrupted())
    with pytest.raises(KeyboardInterrupt):
        lazy.wait()
    assert lazy.wait() == 8


def test_a_timeout_of_the_outcome_itself_is_the_steps():
    future = Future()
    future.set_exception(CollectiveTimeout("the group's"))
    lazy = behind(future)
    for _ in range(2):
        with pytest.raises(CollectiveTimeout, match="the group's"):
            lazy.wait(3)


def test_collect_all_ends_when_somebody_waits_for_it():
    parts = [
        ended(1),
        behind(ended(2)),
        behind(ended("no").then(lambda _: 1 / 0)),
        behind(ended(3)),
    ]
    found = collect_all(parts).wait(3)
    assert found == parts
    assert [part.value() for part in (*found[:2], found[3])] == [1, 4, 6]
    with pytest.raises(ZeroDivisionError):
        found[2].value()


def test_what_follows_collect_all_ends_too():
    lazy = collect_all([behind(ended(2)), behind(ended(3))])
    assert lazy.then(lambda done: sum(part.value() for part in done.value())).wait(3) == 10


async def awaiting(future):
    return await future


@pytest.mark.parametrize(
    "make",
    [behind, lambda end: behind(end).then(lambda _: 2), lambda end: collect_all([behind(end)])],
    ids=["itself", "then", "collect_all"],
)
@pytest.mark.parametrize(
    "use",
    [lambda lazy: Work.from_future(lazy).result(), lambda lazy: asyncio.run(awaiting(lazy))],
    ids=["from_future", "await"],
)
def test_what_would_wait_for_ever_is_refused(use, make):
    lazy = make(ended(1))
    with pytest.raises(RuntimeError, match="nobody would"):
        use(lazy)
    assert lazy.wait() == use(lazy)  # it has ended: nothing to wait for


def test_a_callback_of_another_future_cannot_end_with_one():
    child = ended(1).then(lambda _: behind(ended(2)))
    with pytest.raises(RuntimeError, match="nobody would"):
        child.wait(3)


def test_a_callback_of_its_own_kind_can():
    child = behind(ended(1)).then(lambda _: behind(ended(2)))
    assert child.wait(3) == 4
