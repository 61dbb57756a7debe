"""What a rank shows of its wait: which versions are of it, and which threads may end it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from nc10d.backend.cpu.deadlock.detector import idles
from nc10d.backend.cpu.deadlock.notices import NoticeSlot
from nc10d.backend.cpu.deadlock.wait_graph import Need, ProgressState, WaitNotice
from nc10d.backend.cpu.memory.arena import Arena
from nc10d.backend.cpu.native import offsets as at


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena()
    made.allocate(at.FIRST_PAGES)
    yield made
    made.close()


def standing(*needed: int) -> WaitNotice:
    needs = tuple(Need(1, 7, -1, rank, 1) for rank in needed)
    return WaitNotice("rank 0 waits", needs, (ProgressState(1, 7, True),))


def test_all_versions_of_one_wait_hold_until_it_is_over(arena: Arena) -> None:
    board = NoticeSlot(arena.mapping)
    board.show(standing(1, 2))
    first = board.version()
    board.show(standing(1))  # rank 2 has come meanwhile
    assert board.holds(first)
    assert board.holds(board.version())
    board.show(None)
    assert not board.holds(first)
    board.show(standing(1))
    assert not board.holds(first)
    assert board.holds(board.version())


def test_a_notice_is_read_though_an_interrupt_has_ended_the_change_before(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs = NoticeSlot(arena.mapping), NoticeSlot(arena.mapping)

    def interrupted(raw: bytes) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(mine, "_write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            mine.show(standing(1))
    assert theirs.read() == (0, None)
    mine.show(standing(2))
    assert theirs.read() == (mine.version(), standing(2))


def test_a_pools_thread_that_has_been_given_work_is_not_idle() -> None:
    interval = sys.getswitchinterval()
    with ThreadPoolExecutor(1) as pool:
        ident = pool.submit(sys._getframe).result() and next(iter(pool._threads)).ident
        assert ident is not None
        while not idles(sys._current_frames()[ident]):
            pass
        sys.setswitchinterval(60.0)  # it has no turn while this one looks
        try:
            ran: list[int] = []
            pool.submit(ran.append, 1)
            idle = idles(sys._current_frames()[ident])
            assert not idle or ran
        finally:
            sys.setswitchinterval(interval)
