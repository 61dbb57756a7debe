"""Wait notices: the versions of a wait, and the threads that may end a wait."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from nc10d.backend.cpu.deadlock import detector
from nc10d.backend.cpu.deadlock.detector import DeadlockDetector, frames_of_threads, idles
from nc10d.backend.cpu.deadlock.notices import NoticeSlot
from nc10d.backend.cpu.deadlock.wait_graph import Need, ProgressState, WaitNotice
from nc10d.backend.cpu.memory.arena import Arena
from nc10d.backend.cpu.native import offsets as at
from nc10d.testing.rank_workers import ThreadWorker


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(1 << 30)
    made.allocate(at.FIRST_PAGES)
    yield made
    made.close()


def notice(*needed: int) -> WaitNotice:
    needs = tuple(Need(1, 7, -1, rank, 1) for rank in needed)
    return WaitNotice("rank 0 waits", needs, (ProgressState(1, 7, True),))


def test_all_versions_of_a_wait_hold_until_its_end(arena: Arena) -> None:
    slot = NoticeSlot(arena.mapping)
    slot.publish(notice(1, 2))
    first = slot.version()
    slot.publish(notice(1))  # rank 2 has come meanwhile
    assert slot.holds(first)
    assert slot.holds(slot.version())
    slot.publish(None)
    assert not slot.holds(first)
    slot.publish(notice(1))
    assert not slot.holds(first)
    assert slot.holds(slot.version())


def test_a_notice_is_read_although_the_last_change_was_interrupted(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, theirs = NoticeSlot(arena.mapping), NoticeSlot(arena.mapping)

    def interrupted(raw: bytes) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(mine, "_write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            mine.publish(notice(1))
    assert theirs.read() == (0, None)
    mine.publish(notice(2))
    assert theirs.read() == (mine.version(), notice(2))


class Context(SimpleNamespace):
    """The parts of a context that a detector needs."""


def test_a_rank_passes_the_report_of_a_cycle_on_once_and_before_it_fails(arena: Arena) -> None:
    """So no rank of the cycle sees this one leave before it knows why."""
    done: list[Any] = []
    control = SimpleNamespace(
        connections=[0, 2, 3], send=lambda to, message: done.append((to, message))
    )
    context = Context(
        peers=[SimpleNamespace(number=1, mapping=arena.mapping)],
        number=1,
        router=SimpleNamespace(control=control),
    )
    found = DeadlockDetector(context)  # type: ignore[arg-type]
    slot = NoticeSlot(arena.mapping)
    found._slot = slot
    health = SimpleNamespace(abort=done.append, deadlock_error=lambda channel, text: text)
    found._waits_in = health, None  # type: ignore[assignment]
    report = {"kind": "deadlock", "text": "a cycle", "group": "", "versions": {"0": 5, "2": 9}}
    for version in (None, "x", 99):
        found.on_message(report | {"versions": report["versions"] | {"1": version}})  # type: ignore
    assert not done  # it tells of no wait of this rank
    slot.publish(notice(2))
    report["versions"] |= {"1": slot.version()}  # type: ignore[operator]
    found.on_message(report)
    found.on_message(report)
    assert done == [([0, 2], report), "a cycle", "a cycle"]


def test_an_executor_thread_that_has_been_given_work_is_not_idle() -> None:
    interval = sys.getswitchinterval()
    with ThreadPoolExecutor(1) as pool:
        ident = pool.submit(threading.get_ident).result()
        while not idles(frames_of_threads()[ident]):
            pass
        sys.setswitchinterval(60.0)  # it has no turn while this thread looks
        try:
            ran: list[int] = []
            pool.submit(ran.append, 1)
            idle = idles(frames_of_threads()[ident])
            assert not idle or ran
        finally:
            sys.setswitchinterval(interval)


def test_a_thread_that_waits_for_a_rank_is_idle() -> None:
    worker = ThreadWorker(lambda: None)
    assert worker.result(60.0) is not None  # the rank has joined
    owner = threading.Thread(target=worker.result, args=(60.0,), daemon=True)
    owner.start()
    try:
        while not idles(frames_of_threads()[owner.ident or 0]):
            pass
        assert not idles(frames_of_threads()[threading.get_ident()])
    finally:
        worker.submit((len, ()))  # it fails without a group, and that is an outcome
        owner.join()
        worker.end()


# Threads ask for frames while garbage is collected whose finalizers hand over the GIL. A process
# that stands still does so with the GIL held: only another process can notice.
ASKING = """
import gc, threading, time
from nc10d.backend.cpu.deadlock.detector import frames_of_threads

class Cycle:
    def __init__(self): self.me = self
    def __del__(self): time.sleep(1e-5)

def look():
    Cycle(), Cycle()
    frames_of_threads()

def ask():
    for _ in range(2000): look()

gc.set_threshold(5)
asking = [threading.Thread(target=ask) for _ in range(4)]
for thread in asking: thread.start()
for thread in asking: thread.join()
assert gc.isenabled()
"""


def test_threads_that_ask_for_frames_while_garbage_is_collected_go_on() -> None:
    subprocess.run([sys.executable, "-c", ASKING], check=True, timeout=200)


class Held:
    """An object that a user's function holds."""


def test_a_look_at_all_threads_keeps_no_callers_locals_alive() -> None:
    context = SimpleNamespace(notifies=lambda: False)
    looking: Any = SimpleNamespace(_context=context, _owner=0)

    def caller() -> weakref.ref[Held]:
        held = Held()
        DeadlockDetector.alone(looking)
        return weakref.ref(held)

    gc.disable()
    try:
        assert caller()() is None
    finally:
        gc.enable()


GREENLETS = """
import _thread, threading
from types import SimpleNamespace
threading.get_ident = lambda: _thread.get_ident() + 8
from nc10d.backend.cpu.deadlock.detector import DeadlockDetector
from nc10d.base.signal_errors import Thread
context = SimpleNamespace(notifies=lambda: False)
print(DeadlockDetector.alone(SimpleNamespace(_context=context, _owner=0)))
try: Thread(target=print).start()
except BaseException as error: print(type(error).__name__, "patch_all(thread=False)" in str(error))
threading.get_ident = _thread.get_ident
"""


def test_where_greenlets_replace_threads_a_rank_waits_and_starts_none() -> None:
    """gevent gives each greenlet an ident that Python's table of frames does not have."""
    command = [sys.executable, "-c", GREENLETS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.stdout.split() == ["True", "UnsupportedPlatform", "True"], done.stderr


def test_a_thread_with_the_ident_of_one_that_has_ended_is_no_bystander(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    thread = threading.current_thread()
    assert thread.ident is not None
    monkeypatch.setitem(detector.bystanders, thread.ident, threading.Thread())
    assert thread.ident not in detector.present_bystanders([thread])
    monkeypatch.setitem(detector.bystanders, thread.ident, thread)
    assert thread.ident in detector.present_bystanders([thread])
