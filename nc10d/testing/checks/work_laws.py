"""`check_work`: a Work's contract, for writers of backends.

def make():
    work = MyWork(...)              # pending
    return work, work.finish        # finish(None), or finish(error)

check_work(make)
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from nc10d.errors import CollectiveTimeout, PeerLost
from nc10d.testing.checks.collected import check_all, must_raise
from nc10d.work import Work

End = Callable[[BaseException | None], object]
Make = Callable[[], tuple[Work, End]]
SHORT, LONG = 0.05, 10.0


def check_work(make: Make) -> int:
    """Check a kind of Work; return the number of checks. AssertionError names the failed ones.

    `make()` returns a new pending Work, and a function that ends the operation: with None, or
    with the error of a failure. The function may be called from any thread.
    """
    return check_all({law.__name__.replace("_", " "): _bound(law, make) for law in LAWS})


def _bound(law: Callable[[Work, End], None], make: Make) -> Callable[[], None]:
    return lambda: law(*make())


def a_pending_work_answers_without_blocking(work: Work, end: End) -> None:
    """is_completed and is_success are False, exception is None."""
    assert not work.is_completed()
    assert not work.is_success()
    assert work.exception() is None
    end(None)


def a_wait_with_a_timeout_fails_only_its_caller(work: Work, end: End) -> None:
    """The wait raises CollectiveTimeout, and the operation goes on."""
    must_raise(CollectiveTimeout, lambda: work.wait(SHORT))
    assert not work.is_completed(), "the time-out of a wait ended the operation"
    end(None)
    assert work.wait(LONG) is True


def a_work_is_done_once_and_for_all(work: Work, end: End) -> None:
    """Every wait returns True, and nothing changes the Work's state afterwards."""
    end(None)
    for _ in range(2):
        assert work.wait(LONG) is True, "wait returns True"
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
    assert work.duration is None or work.duration >= 0


def a_failed_work_raises_its_error_in_every_wait(work: Work, end: End) -> None:
    """wait, result and the Future raise the error; exception returns it."""
    end(PeerLost("rank 1 is lost", rank=1))
    future = work.get_future()
    for call in (work.wait, work.wait, work.result, lambda: future.wait(LONG)):
        error = must_raise(PeerLost, call)
        assert "rank 1 is lost" in str(error), f"another error: {error}"
        assert isinstance(error, PeerLost)
        assert error.rank == 1, "the attributes of the error are lost"
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), PeerLost)


def a_callback_runs_once(work: Work, end: End) -> None:
    """Attached before or after the end, a callback gets the Work."""
    seen: list[Work] = []
    work.add_done_callback(seen.append)
    assert not seen, "the callback ran before the end"
    future = work.get_future()
    end(None)
    future.wait(LONG)
    work.wait(LONG)
    work.add_done_callback(seen.append)
    deadline = work.get_future()
    deadline.wait(LONG)
    assert seen == [work, work], f"callbacks got {seen}"


def a_future_has_ended_once_its_work_has(work: Work, end: End) -> None:
    """`value()` needs no wait of its own after `work.wait()`."""
    future = work.get_future()
    assert not future.done(), "the Future ended before the Work"
    end(None)
    work.wait(LONG)
    assert future.done(), "the Work has ended, its Future has not"
    future.value()


def threads_that_wait_are_all_woken(work: Work, end: End) -> None:
    """Any number of threads may wait for a Work."""
    with ThreadPoolExecutor(4) as pool:
        waits = [pool.submit(work.wait, LONG) for _ in range(4)]
        end(None)
        assert [wait.result(LONG) for wait in waits] == [True] * 4


def a_work_can_be_awaited(work: Work, end: End) -> None:
    """`await work` suspends the task, not the event loop."""

    async def main() -> bool:
        async def wait() -> bool:
            return await work

        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        assert not task.done(), "await returned before the end"
        end(None)
        return await asyncio.wait_for(task, LONG)

    assert asyncio.run(main()) is True


LAWS: tuple[Callable[[Work, End], None], ...] = (
    a_pending_work_answers_without_blocking,
    a_wait_with_a_timeout_fails_only_its_caller,
    a_work_is_done_once_and_for_all,
    a_failed_work_raises_its_error_in_every_wait,
    a_callback_runs_once,
    a_future_has_ended_once_its_work_has,
    threads_that_wait_are_all_woken,
    a_work_can_be_awaited,
)
