"""Everything that groups take is given back, however they end; and nothing outlives a process."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import weakref
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from at_once import at_once
from clocks import soon
from interrupts import call_at, raise_at
from jobs import Job

import nc10d as dist
from nc10d.backend.cpu.context import Context
from nc10d.backend.cpu.control.router import Router
from nc10d.backend.cpu.engine.channel import SCANNED_PER_CALL
from nc10d.backend.cpu.membership.group import GroupExit
from nc10d.backend.cpu.native.offsets import RING_SLOTS
from nc10d.base.deadline import Deadline
from nc10d.errors import RendezvousError
from nc10d.group.process_group import prefix_store
from nc10d.group.world import current_world, own_world
from nc10d.init_methods.meeting import meet
from nc10d.store import HashStore
from nc10d.testing import Ranks, run_ranks

MIB = 1 << 20
TIMEOUT = 20.0
"""Seconds: of the calls that are in flight when a process of a test exits."""


def holdings() -> dict[str, int]:
    """Count the threads of nc10d, descriptors and mappings of arenas in this process."""
    gc.collect()
    with open("/proc/self/maps") as maps:
        mapped = sum("memfd:nc10d" in line for line in maps)
    return {"threads": len(ours()), "fds": len(os.listdir("/proc/self/fd")), "mapped": mapped}


def resident() -> int:
    """Return this process's resident memory, in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def ours() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("nc10d")}


def end_of_threads(kept: Collection[threading.Thread]) -> None:
    """Wait for the end of nc10d's threads but `kept`; one that stays is an error."""
    gc.collect()
    for thread in ours().difference(kept):
        thread.join(60.0)
    assert not ours().difference(kept)


@pytest.fixture
def balanced() -> Iterator[None]:
    before, threads = holdings(), ours()
    yield
    end_of_threads(threads)
    assert holdings() == before


def enter(store: Any, rank: int, size: int = 2) -> Any:
    dist.init_process_group("cpu", store=store, rank=rank, world_size=size, timeout=20.0)
    return dist.GroupMember.WORLD


def use(group: Any) -> None:
    """Use a group in all ways that start something: worker, notifier, links, sub-groups."""
    x = np.ones(70_000)
    called = threading.Event()
    work = group.all_reduce(x, async_op=True)
    work.add_done_callback(lambda _: called.set())
    peer = 1 - group.rank
    sent, got = np.full(9000, group.rank), np.zeros(9000, np.int64)
    works = [group.isend(sent, peer), group.irecv(got, peer)]
    for one in (work, *works):
        one.wait()
    assert called.wait(10.0)
    assert (x == 2).all()
    assert (got == peer).all()
    dist.new_group().barrier()


@pytest.mark.usefixtures("balanced")
@pytest.mark.parametrize("count", [25, pytest.param(500, marks=pytest.mark.long)])
def test_groups_one_after_the_other_leave_nothing(count: int) -> None:
    def live(store: HashStore, rank: int) -> None:
        with own_world():
            for _ in range(count):
                use(enter(store, rank))
                dist.destroy_process_group()

    def cycles() -> int:
        store = HashStore()
        at_once(lambda: live(store, 0), lambda: live(store, 1))
        gc.collect()
        return resident()

    before = cycles()
    assert cycles() - before < 8 * MIB


@pytest.mark.usefixtures("balanced")
def test_groups_that_are_dropped_give_everything_back() -> None:
    store = HashStore()

    def live(rank: int) -> None:
        with own_world():
            group = enter(store, rank)
            use(group)
            if rank == 0:  # something that can not end is in flight, too
                group.all_reduce(np.ones(4), async_op=True)
                group.irecv(np.ones(4), 1)

    at_once(lambda: live(0), lambda: live(1))


DROPPED = """
import weakref
from nc10d.group.world import own_world

gc.disable()


def early(group):  # messages come before they are asked for
    works = [group.isend(np.ones(3), 1 - rank, tag=tag) for tag in (1, 2)]
    for tag in (2, 1):
        group.recv(np.ones(3), 1 - rank, tag=tag)
    for work in works:
        work.wait()


def block(group):
    with dist.coalescing_manager(group):
        group.all_reduce(np.ones(3))
        group.all_reduce(np.ones(4))


def watched(group):  # the notifier calls back, and then holds the Work no longer
    called, work = threading.Event(), group.all_reduce(np.ones(3), async_op=True)
    work.add_done_callback(lambda _: called.set())
    work.wait()
    assert called.wait(10.0)


def failed(group):
    with contextlib.suppress(dist.DistError):
        group.all_reduce(np.ones(3 + rank))


def pending(group):  # a queue holds them, and they hold no group
    group.irecv(np.ones(3), None)
    return group.irecv(np.ones(3), 1 - rank).is_completed()


USES = {
    "all_reduce": lambda group: group.all_reduce(np.ones(3)),
    "later": lambda group: group.all_reduce(np.ones(300), async_op=True).wait(),
    "large": lambda group: group.all_reduce(np.ones(1_000_000)),
    "anyone": lambda group: group.send(np.ones(3), 0) if rank else group.recv(np.ones(3), None),
    "objects": lambda group: dist.all_gather_object([None] * 2, rank, group),
    "flying": lambda group: group.irecv(np.ones(3), 1 - rank),
    "gather": lambda group: group.gather(np.ones(3), None if rank else [np.ones(3), np.ones(3)]),
    "strided": lambda group: group.all_reduce(np.ones((6, 4))[:, 1:3]),
    "watched": watched,
    "early": early, "block": block, "failed": failed, "pending": pending,
}
for name, use in USES.items():
    with own_world():
        store = TCPStore("127.0.0.1", port, size, is_master=False, wait_for_workers=False)
        store = dist.PrefixStore(name, store)
        dist.init_process_group("cpu", store=store, rank=rank, world_size=size, timeout=30.0)
        use(dist.GroupMember.WORLD)
        kept = weakref.ref(dist.GroupMember.WORLD.backend("cpu").group)
    limit = time.monotonic() + 5.0
    while kept() is not None and time.monotonic() < limit:
        time.sleep(0.001)  # a helper thread may have it in hand
    say(name, kept() is None)
"""


def test_groups_that_are_dropped_end_without_a_garbage_collection() -> None:
    with Job(DROPPED) as ranks:
        for rank in ranks:
            said = [rank.line() for _ in range(13)]
            assert all(line.endswith("True") for line in said), said


def mapped_arenas() -> int:
    return Path("/proc/self/maps").read_text().count("/memfd:nc10d")


def test_ranks_that_have_left_unmap_their_memory_without_a_garbage_collection() -> None:
    """64 ranks as threads map 64 times 64 arenas: a second such job has no room beside them."""
    gc.collect()
    gc.disable()
    try:
        before = mapped_arenas()
        with Ranks(3) as ranks:
            ranks.run(lambda group: group.barrier())
            inside = mapped_arenas()
        after = mapped_arenas()
    finally:
        gc.enable()
    assert inside >= before + 9
    assert after <= before


@pytest.mark.usefixtures("balanced")
def test_a_dropped_group_ends_the_works_that_it_watches() -> None:
    store, heard = HashStore(), list[BaseException | None]()

    def live(rank: int) -> None:
        with own_world():
            work = enter(store, rank).irecv(np.ones(4), 1 - rank)
            work.add_done_callback(lambda work: heard.append(work.exception()))

    at_once(lambda: live(0), lambda: live(1))
    # The notifier may look at a Work just now, and so be the last that holds a group.
    deadline = Deadline.after(30.0)
    while len(heard) < 2 and not deadline.expired():
        gc.collect()
    assert [type(error) for error in heard] == [dist.GroupClosed] * 2


def strided_once(group: Any) -> bool:
    x = np.ones((6, 4))
    alive = weakref.ref(x)
    group.all_reduce(x[:, 1:3])
    del x
    return alive() is None


def test_a_program_that_runs_once_keeps_no_array_until_a_collection() -> None:
    gc.disable()
    try:
        assert run_ranks(strided_once, 2) == [True, True]
    finally:
        gc.enable()


@pytest.mark.usefixtures("balanced")
def test_a_dropped_group_whose_end_was_interrupted_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error of a signal's handler comes out of `leave`, at its beginning."""

    def interrupted(_: GroupExit) -> None:
        raise KeyboardInterrupt

    before = ours()
    with own_world():
        group = enter(HashStore(), 0, 1)
        cut_off = group.backend("cpu").split([0], "cut off", HashStore(), Deadline.after(20.0))
        monkeypatch.setattr(GroupExit, "leave", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cut_off.close()
        monkeypatch.undo()
        del cut_off
        gc.collect()
        dist.destroy_process_group()
    end_of_threads(before)


@pytest.mark.usefixtures("balanced")
# Python drops what a handler raises amid a finalizer.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("how", ["destroyed", "dropped"])
def test_a_group_keeps_nothing_whatever_instruction_of_its_end_was_interrupted(how: str) -> None:
    end = {"destroyed": dist.destroy_process_group, "dropped": drop}[how]
    point, reached = 0, True
    while reached:
        with own_world():
            enter(HashStore(), 0, 1)
            reached = raise_at(point, KeyboardInterrupt(f"at point {point}"), end)
        point += 5
    assert point > 1000


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("balanced")
def test_all_groups_may_be_destroyed_amid_the_end_of_one_of_them() -> None:
    def destroy_all() -> None:
        if current_world().default is not None:
            dist.destroy_process_group()

    point, reached = 0, True
    while reached:
        with own_world():
            enter(HashStore(), 0, 1)
            one = dist.new_group([0])

            def destroy_one(one: Any = one) -> None:
                with contextlib.suppress(ValueError):  # it has been destroyed with the others
                    dist.destroy_process_group(one)

            reached = call_at(point, destroy_all, destroy_one)
            destroy_all()
        point += 7
    assert point > 500


@pytest.mark.usefixtures("balanced")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_in_the_control_thread_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    called = threading.Event()

    def overdue(_: Router) -> None:
        called.set()
        raise MemoryError

    with own_world():
        monkeypatch.setattr(Router, "overdue", overdue)
        group = enter(HashStore(), 0, 1)
        group.all_reduce(np.ones(3), async_op=True).add_done_callback(lambda _: None)
        assert called.wait(TIMEOUT)
        del group
        dist.destroy_process_group()


def drop() -> None:
    current_world().default = None


@pytest.mark.usefixtures("balanced")
def test_a_work_that_is_kept_keeps_the_memory_but_no_thread() -> None:
    before, store = ours(), HashStore()
    kept: list[Any] = []

    def live(rank: int) -> None:
        with own_world():
            group = enter(store, rank)
            work = group.all_reduce(np.ones(1000), async_op=True)
            work.wait()
            kept.append(work)
            group.barrier()
            dist.destroy_process_group()

    at_once(lambda: live(0), lambda: live(1))
    end_of_threads(before)
    assert all(work.is_success() for work in kept)
    kept.clear()


@pytest.mark.usefixtures("balanced")
def test_a_rank_that_dies_after_the_bootstrap_is_named_and_nothing_is_kept() -> None:
    store = HashStore()

    def stay() -> None:
        with own_world(), pytest.raises(RendezvousError, match="rank 1 did not join"):
            dist.init_process_group("cpu", store=store, rank=0, world_size=2, timeout=0.5)

    def go() -> None:
        number = meet(prefix_store("meeting/world", store), 1, 2, Deadline.after(5.0), 5.0)
        keys = prefix_store(f"world/{number}", store)
        Context(keys, 1, 2, Deadline.after(5.0)).close()

    at_once(stay, go)


def many_groups(group: Any, count: int) -> tuple[int, int, int]:
    """Make and use groups of two of three ranks; return descriptors, bytes, bytes at the end."""
    arena = group.backend("cpu").group.context.arena
    before = len(os.listdir("/proc/self/fd")), arena.used()
    made = [dist.new_group([number % 2, 2]) for number in range(count)]
    mine = [one for one in made if isinstance(one, dist.ProcessGroup)]
    for one in mine:
        one.barrier()
    grown = arena.used() - before[1]
    group.barrier()
    fds = len(os.listdir("/proc/self/fd")) - before[0]
    for one in mine:
        dist.destroy_process_group(one)
    group.barrier()
    # Memory that all members have left is taken back when memory is needed.
    last = dist.new_group([0, 1, 2])
    left = arena.used() - before[1]
    dist.destroy_process_group(last)
    return fds, grown, left


@pytest.mark.parametrize(
    ("count", "most"), [(150, 32), pytest.param(500, 64, marks=pytest.mark.long)]
)
def test_many_groups_cost_little_memory_and_no_descriptor(count: int, most: int) -> None:
    with Ranks(3, "processes") as ranks:
        for fds, grown, left in ranks.run(many_groups, [count] * 3):
            assert fds == 0
            assert grown <= most * MIB
            assert left <= 2 * MIB


def dropped(group: Any, gate: threading.Barrier) -> None:
    if group.rank == 1:
        gate.wait()
        x = np.full(50_000, 2.0)
        group.all_reduce(x)
        group.barrier()
        group.all_reduce(np.ones(1))
        return
    memory = bytearray(np.ones(50_000).data)
    x = np.frombuffer(memory)
    array = weakref.ref(x)
    group.all_reduce(x, async_op=True)
    del x
    gc.collect()
    assert array() is not None, "the operation is still to come"
    gate.wait()
    group.barrier()
    gc.collect()
    assert array() is None, "the operation is over, and nobody holds its Work"
    assert (np.frombuffer(memory) == 3).all()
    group.all_reduce(np.ones(1))


def test_a_dropped_work_keeps_its_array_until_the_operation_has_ended() -> None:
    with Ranks(2) as ranks:
        ranks.run(dropped, [threading.Barrier(2)] * 2)


CALLS = 3 * RING_SLOTS
A_HANDFUL = 8


def all_reduce_dropped(group: Any, x: Any) -> None:
    group.all_reduce(x, async_op=True)


def send_or_receive_dropped(group: Any, x: Any) -> None:
    (group.isend if group.rank == 0 else group.irecv)(x, 1 - group.rank)


def all_reduce(group: Any, x: Any) -> None:
    group.all_reduce(x)


def send_or_receive(group: Any, x: Any) -> None:
    (group.send if group.rank == 0 else group.recv)(x, 1 - group.rank)


def block(group: Any, x: Any) -> None:
    with dist.coalescing_manager(group):
        group.all_reduce(x)
        group.all_reduce(x)


def many_dropped(group: Any, drop: Any, wait: Any, count: int, every: int) -> int:
    """Drop many Works, waiting for a call now and then; return the Works alive then."""
    mine = np.ones(4)
    seen = []
    for number in range(1, CALLS + 1):
        x = np.ones(count)
        seen.append(weakref.ref(x))
        drop(group, x)
        del x
        if number % every == 0:
            wait(group, mine)
    gc.collect()
    return sum(array() is not None for array in seen)


@pytest.mark.parametrize("every", [CALLS // 12, CALLS])
@pytest.mark.parametrize("count", [4, 20_000], ids=["short", "long"])
@pytest.mark.parametrize(
    ("drop", "wait"),
    [
        (all_reduce_dropped, all_reduce),
        (all_reduce_dropped, block),
        (send_or_receive_dropped, send_or_receive),
    ],
)
def test_a_call_that_is_waited_for_lets_the_arrays_of_dropped_works_go(
    drop: Any, wait: Any, count: int, every: int
) -> None:
    with Ranks(2, timeout=150.0) as ranks:  # a call waits for hundreds of others before it
        alive = ranks.run(many_dropped, *([value] * 2 for value in (drop, wait, count, every)))
    assert max(alive) <= A_HANDFUL, alive


def beside_one_that_waits(group: Any) -> int:
    """Drop receives beside a receive whose message comes last; return the Works alive before it."""
    peer, more = 1 - group.rank, CALLS // SCANNED_PER_CALL + 1
    if group.rank == 0:
        for _ in range(CALLS + more):
            group.send(np.ones(4), peer)
        group.barrier()
        group.send(np.ones(4), peer, tag=1)
        return 0
    late = group.irecv(np.zeros(4), peer, tag=1)
    seen = []
    for _ in range(CALLS):
        x = np.zeros(4)
        seen.append(weakref.ref(x))
        group.irecv(x, peer)
        del x
    for _ in range(more):
        group.recv(np.zeros(4), peer)
    gc.collect()
    alive = sum(array() is not None for array in seen)
    group.barrier()
    late.wait()
    return alive


def test_the_arrays_of_dropped_receives_go_before_the_one_of_a_receive_that_waits() -> None:
    with Ranks(2, timeout=150.0) as ranks:  # thousands of messages, one after the other
        assert ranks.run(beside_one_that_waits)[1] <= A_HANDFUL


FORKED = """
import warnings

warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of a fork beside threads
group = join()
x = np.ones(4)
group.all_reduce(x)
other = dist.new_group()
pending = group.irecv(np.zeros(4), 1 - rank, tag=3)
any_source = group.irecv(np.zeros(4), None, tag=4)


def named(call):
    try:
        call()
    except BaseException as error:
        return type(error).__name__
    return "nothing"


def child(ending):
    calls = [
        lambda: group.all_reduce(np.ones(4)),
        lambda: other.barrier(),
        lambda: group.send(np.ones(4), 1 - rank),
        lambda: pending.wait(),
        lambda: any_source.wait(),
        lambda: dist.barrier(),
        lambda: group.all_reduce(np.ones(4), async_op=True),
        lambda: dist.new_group(),
    ]
    heard = {named(call) for call in calls}
    group.abort("from a child")  # must not reach anybody
    open_ones = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                 if os.path.exists(f"/proc/self/fd/{fd}")]
    fds = [name for name in open_ones if "pidfd" in name or "eventfd" in name]
    good = heard == {"ForkedGroupError"} and not fds
    if not good:
        say("child", heard, fds)
    if ending == "collect":
        for name in ("group", "other", "pending", "any_source", "calls"):
            globals().pop(name, None)
        gc.collect()
    if ending in ("at once", "collect"):
        os._exit(0 if good else 1)
    sys.exit(0 if good else 1)


for ending in ("at once", "normal", "collect"):
    if rank == 0:
        pid = os.fork()
        if pid == 0:
            child(ending)
        _, status = os.waitpid(pid, 0)
        say(ending, status)
    for _ in range(100):
        group.all_reduce(x)
    y = np.ones(80_000)
    group.all_reduce(y, async_op=True).wait()
    assert (y == 2).all()
group.send(np.full(4, 7.0), 1 - rank, tag=3)
pending.wait()
group.send(np.full(4, 8.0), 1 - rank, tag=4)
any_source.wait()
other.barrier()
say("over")
"""


def test_a_forked_child_gets_an_error_and_disturbs_no_rank() -> None:
    with Job(FORKED) as ranks:
        for ending in ("at once", "normal", "collect"):
            assert ranks[0].line() == f"{ending} 0"
        for rank in ranks:
            assert rank.line() == "over"
            assert rank.ended() == 0
            assert rank.errors == []


UNFINISHED = """
group = join()
group.barrier()
if rank == 1:
    hear()
    os._exit(0)


def receive():
    with contextlib.suppress(dist.GroupClosed):
        group.recv(np.ones(5), 1, tag=9)


works = [group.all_reduce(np.ones(300_000), async_op=True)]
works += [group.irecv(np.ones(5), 1), group.isend(np.ones(500_000), 1)]
works.append(group.irecv(np.ones(5), None, tag=8))
for work in works:
    work.add_done_callback(lambda _: None)
threading.Thread(target=receive, daemon=True).start()
group.all_reduce(np.ones(8), async_op=True)
say("leaving", time.monotonic())
sys.exit(7)
"""


def test_an_exit_with_operations_in_flight_takes_no_time_and_prints_nothing() -> None:
    def attempt() -> float:
        with Job(UNFINISHED) as ranks:
            _, left = ranks[0].line().split()
            assert ranks[0].ended() == 7
            took = time.monotonic() - float(left)
            assert ranks[0].errors == []
            ranks[1].tell("go")
            return took

    assert soon(TIMEOUT / 2, attempt)


UNFINISHED_THREADS = """
from nc10d.store import HashStore
from nc10d.group.world import own_world

store, begun, never = HashStore(), threading.Barrier(3), threading.Event()


def live(number):
    with own_world():
        dist.init_process_group("cpu", store=store, rank=number, world_size=2, timeout=20.0)
        group = dist.GroupMember.WORLD
        group.barrier()
        if number == 0:
            group.all_reduce(np.ones(300_000), async_op=True)
            group.irecv(np.ones(5), None).add_done_callback(lambda _: None)
        begun.wait()
        if number == 0:
            group.all_reduce(np.ones(4))
        never.wait()


for number in range(2):
    threading.Thread(target=live, args=(number,), daemon=True).start()
begun.wait()
say("leaving", time.monotonic())
sys.exit(3)
"""


def test_an_exit_while_ranks_are_threads_takes_no_time_and_prints_nothing() -> None:
    def attempt() -> float:
        with Job(UNFINISHED_THREADS, 1) as (only,):
            _, left = only.line().split()
            assert only.ended() == 3
            took = time.monotonic() - float(left)
            assert only.errors == []
            return took

    assert soon(TIMEOUT / 2, attempt)
