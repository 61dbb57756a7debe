"""Every wait of a rank ends in time: by Ctrl-C, a peer's death, or a peer's silence."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import pytest
from at_once import at_once
from clocks import soon
from jobs import Job, Rank, all_say
from on_ranks import on_ranks

import nc10d as dist
from nc10d.backend.cpu.native import entry_points
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native.prepared_calls import address
from nc10d.backend.cpu.native.tcp_streams import FUNCTIONS, MUCH
from nc10d.errors import Aborted, CollectiveTimeout, DistError
from nc10d.testing.ranks import Ranks

PROMPT = 0.5
"""Seconds after Ctrl-C by which a call must have ended; a wait's slice is a tenth of that.

Bounds of time are checked with `soon`, which may repeat an attempt that other work delays.
"""

INTERRUPTED = """
world = join()
peer = 1 - rank
x, known = np.ones(4), np.ones(4)


def coalesced(group, later):
    with dist.coalescing_manager(group, async_ops=later) as block:
        group.all_reduce(np.ones(4))
        group.broadcast(np.ones(4), 1)
    block.wait()


def sends(group):
    for _ in range(9):  # some may be on their way before anybody receives
        group.send(np.ones(100_000), peer)


def prepared_sends(group):
    while True:
        group.send(known, peer)


CALLS = {
    "all_reduce": lambda group: group.all_reduce(x),
    "large": lambda group: group.all_reduce(np.ones(500_000)),
    "new": lambda group: group.all_gather_into_tensor(np.ones(8), np.ones(4)),
    "barrier": lambda group: group.barrier(),
    "recv": lambda group: group.recv(np.ones(7), peer),
    "recv again": lambda group: group.recv(known, peer),
    "recv from anyone": lambda group: group.recv(x, None),
    "send": sends,
    "send again": prepared_sends,
    "coalesced": lambda group: coalesced(group, False),
    "wait": lambda group: group.all_reduce(x, async_op=True).wait(),
    "wait with a timeout": lambda group: group.all_reduce(x, async_op=True).wait(20.0),
    "future": lambda group: group.all_reduce(x, async_op=True).get_future().wait(),
    "irecv": lambda group: group.irecv(x, peer, tag=3).wait(),
    "coalesced later": lambda group: coalesced(group, True),
}


def warm(group):
    group.all_reduce(x)
    group.all_reduce(x, async_op=True).wait()  # the worker runs
    for source in (0, 1):
        for _ in range(2):
            if rank == source:
                group.send(known, peer)
            else:
                group.recv(known, peer)


def interrupted(group, call, delay):
    backend = group.backend("cpu")
    say("ready")
    try:
        if delay:  # in the middle of the first slice, and of the Python code around it
            threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)).start()
        call(group)
        time.sleep(10.0)
    except KeyboardInterrupt:
        ended = time.monotonic()
        held, failure = backend.group.channel.held(), backend.failure()
        group.abort("enough")
        begun = time.monotonic()
        dist.destroy_process_group(group)
        say(ended, round(time.monotonic() - begun, 3), held, failure)


while (order := hear()) != "end":
    name, _, delay = order.rpartition(" ")
    group = dist.new_group(timeout=20.0)
    warm(group)
    if rank == 0:
        interrupted(group, CALLS[name], float(delay))
    else:
        say("ready")
        hear()
        try:
            group.barrier()
            say("nothing")
        except dist.DistError as error:
            say(type(error).__name__, str(error).split(";")[0])
        dist.destroy_process_group(group)
"""

SYNC = ["all_reduce", "large", "new", "barrier", "recv", "recv again", "recv from anyone"]
SYNC += ["send", "send again", "coalesced"]
LATER = ["wait", "wait with a timeout", "future", "irecv", "coalesced later"]


@pytest.fixture(scope="module")
def jobs() -> Iterator[list[Job]]:
    """The job that tests share; after a failure, the next test makes a new one."""
    shared: list[Job] = []
    yield shared
    for job in shared:
        for rank in job.ranks:
            rank.tell("end")
        assert [rank.ended() for rank in job.ranks] == [0, 0]
        assert [rank.errors for rank in job.ranks] == [[], []]
        job.close()


@pytest.fixture
def pair(jobs: list[Job]) -> Iterator[list[Rank]]:
    job = jobs.pop() if jobs else Job(INTERRUPTED)
    with job.guarded():
        yield job.ranks
    jobs.append(job)


def begin(pair: list[Rank], name: str, delay: float) -> None:
    for rank in pair:
        rank.tell(f"{name} {delay}")
    all_say(pair, "ready")


def peer_says(pair: list[Rank]) -> str:
    pair[1].tell("go on")
    return pair[1].line()


def interrupted_asleep(pair: list[Rank], name: str) -> tuple[float, str]:
    """Interrupt rank 0 in a call; return how long its end or its closing took, and the failure."""
    begin(pair, name, 0)
    assert pair[0].asleep("futex" if name == "future" else "shared futex")
    sent = time.monotonic()
    pair[0].kill(signal.SIGINT)
    ended, closing, _, failure = pair[0].line().split(" ", 3)
    return max(float(ended) - sent, float(closing)), failure


@pytest.mark.parametrize("name", SYNC)
def test_ctrl_c_ends_a_blocking_call_and_the_group(pair: list[Rank], name: str) -> None:
    def attempt() -> float:
        seconds, failure = interrupted_asleep(pair, name)
        assert "rank 0 was interrupted in" in failure
        assert "Aborted rank 0 was interrupted in" in peer_says(pair)
        return seconds

    assert soon(PROMPT, attempt)


@pytest.mark.parametrize("name", LATER)
def test_ctrl_c_ends_a_wait_and_the_operation_goes_on(pair: list[Rank], name: str) -> None:
    def attempt() -> float:
        seconds, failure = interrupted_asleep(pair, name)
        assert failure == "None"
        assert "enough" in peer_says(pair)
        return seconds

    assert soon(PROMPT, attempt)


@pytest.mark.parametrize("delay", [0.001, 0.004, 0.02])
@pytest.mark.parametrize("name", [*SYNC, *LATER])
def test_ctrl_c_at_any_point_leaves_no_lock_and_no_wait_behind(
    pair: list[Rank], name: str, delay: float
) -> None:
    def attempt() -> float:
        begin(pair, name, delay)
        _, closing, held, _ = pair[0].line().split(" ", 3)
        assert held == "False"
        assert "Aborted" in peer_says(pair)
        return float(closing)

    assert soon(PROMPT, attempt)


ALONE = """
import nc10d.backend.cpu.backend

say("ready")
try:
    join()
except KeyboardInterrupt:
    say(time.monotonic())
gc.collect()
left = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
        if os.path.exists(f"/proc/self/fd/{fd}")]
say([name for name in left if "memfd" in name or "event" in name or "pidfd" in name])
try:
    dist.init_process_group("cpu", store=dist.HashStore(), rank=0, world_size=1)
    group, entered, leave = dist.GroupMember.WORLD, threading.Event(), threading.Event()
    work = group.all_reduce(np.ones(4), async_op=True)
    work.add_done_callback(lambda _: (entered.set(), leave.wait()))
    entered.wait()
    say("ready")
    dist.destroy_process_group()
except KeyboardInterrupt:
    say(time.monotonic())
    leave.set()
"""


def test_ctrl_c_ends_waiting_for_others_and_waiting_for_a_callback() -> None:
    def attempt() -> float:
        with Job(ALONE, 2) as (alone, absent):
            absent.kill(signal.SIGSTOP)
            assert alone.line() == "ready"
            sent = interrupt(alone, "poll")
            for_others = float(alone.line()) - sent
            assert alone.line() == "[]"
            assert alone.line() == "ready"
            sent = interrupt(alone, "futex")
            for_a_callback = float(alone.line()) - sent
            assert alone.ended() == 0
            assert alone.errors == []
            return max(for_others, for_a_callback)

    assert soon(PROMPT, attempt)


def interrupt(rank: Rank, wchan: str) -> float:
    assert rank.asleep(wchan)
    sent = time.monotonic()
    rank.kill(signal.SIGINT)
    return sent


LOST = """
from nc10d.backend.cpu.engine.cpu_policy import WaitPolicy

group = join(20.0)
if rank == 2:  # this one burns its core for long before it sleeps
    backend = group.backend("cpu")
    backend.group.context.waiting = WaitPolicy(300_000, 3000)
    group = dist.new_group()
else:
    group = dist.new_group()
x = np.ones(300)
group.all_reduce(x)
work = group.irecv(np.ones(3), 1) if rank != 1 else None
say("ready")
if rank == 1:
    hear()
try:
    if rank == 3:
        work.wait()
    group.all_reduce(x)
except dist.PeerLost as error:
    say(time.monotonic(), error.rank, error.pid, str(error).split(";")[0])
"""


def test_survivors_asleep_and_spinning_learn_of_a_death() -> None:
    def attempt() -> float:
        with Job(LOST, 4) as ranks:
            all_say(ranks, "ready")
            assert ranks[0].asleep("shared futex")
            killed = last = time.monotonic()
            ranks[1].kill()
            ranks[1].ended()
            for survivor in (ranks[0], ranks[2], ranks[3]):
                when, lost, pid, text = survivor.line().split(" ", 3)
                assert (int(lost), int(pid)) == (1, ranks[1].pid)
                assert "signal 9" in text
                last = max(last, float(when))
            return last - killed

    assert soon(1.0, attempt)


HOLDING = """
import ctypes

group = join()
group.all_reduce(np.ones(300), async_op=True).wait()  # the worker runs
x = np.ones(400_000)
if rank == 1:
    works = [group.all_reduce(x, async_op=True), group.isend(x, 0)]
    say("holding")
    ctypes.PyDLL(None).usleep(700_000)  # nobody else in this process runs Python
else:
    hear()
    begun = time.monotonic()
    group.all_reduce(x)
    group.recv(x, 1)
    say(time.monotonic() - begun)
group.barrier()
"""


def test_a_peer_that_holds_the_gil_still_does_its_part() -> None:
    def attempt() -> float:
        with Job(HOLDING) as ranks:
            assert ranks[1].line() == "holding"
            ranks[0].tell("go")
            return float(ranks[0].line())

    assert soon(0.5, attempt)


HANDLED = """
group = join()
group.all_reduce(np.ones(4))


def end(*_):
    if rank == 0:
        group.abort("terminated")
    dist.destroy_process_group()


signal.signal(signal.SIGTERM, end)
say("ready")
if rank == 1:
    hear()
try:
    group.all_reduce(np.ones(4))
    group.barrier()  # rank 0 had done its part of what was before
except dist.DistError as error:
    say(type(error).__name__, str(error).split(";")[0])
"""


def test_a_signal_handler_may_abort_and_destroy_the_group_that_its_thread_waits_in() -> None:
    with Job(HANDLED) as ranks:
        all_say(ranks, "ready")
        assert ranks[0].asleep("shared futex")
        ranks[0].kill(signal.SIGTERM)
        assert "terminated" in ranks[0].line(10.0)
        ranks[1].tell("go")
        assert "terminated" in ranks[1].line(10.0)
        assert [rank.ended() for rank in ranks] == [0, 0]


TIRED = """
class Tired(Exception):
    pass


def end(*_):
    raise Tired


def interrupt(one, call):
    while True:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        try:
            call(one)
        except Tired:
            if one.backend("cpu").failure() is not None:
                raise
            # It came before the call, which has not begun: it is repeated.


group = join()
x, known = np.ones(4), np.ones(4)
for n in range(2):
    group.all_reduce(x)
    group.send(known, 1) if rank == 0 else group.recv(known, 0)
groups = [dist.new_group() for _ in range(3)]
calls = [
    lambda one: one.all_reduce(x),
    lambda one: one.recv(known, 1 - rank),
    lambda one: one.all_to_all([np.ones(3), np.ones(3)], [np.ones(3), np.ones(3)]),
]
signal.signal(signal.SIGALRM, end)
for one, call in zip(groups, calls):
    try:
        if rank == 0:
            interrupt(one, call)
        else:
            while one.backend("cpu").failure() is None:
                pass
            one.barrier()
    except Tired:
        say("Tired", one.backend("cpu").failure())
    except dist.DistError as error:
        say(type(error).__name__, error)
"""


def test_an_exception_of_a_signal_handler_ends_a_blocking_call_and_the_group() -> None:
    with Job(TIRED) as ranks:
        for _ in range(3):
            assert "Tired rank 0 was interrupted in" in ranks[0].line()
            assert "Aborted rank 0 was interrupted in" in ranks[1].line()
        assert [rank.ended() for rank in ranks] == [0, 0]


# -- ranks as threads: full rings, unexpected messages, callbacks, limits -------------------------


@pytest.fixture
def two() -> Iterator[Ranks]:
    with Ranks(2, timeout=20.0) as ranks:
        yield ranks


def ahead(group: Any, count: int, gate: threading.Event) -> None:
    """Rank 0 launches more than a ring holds at first before rank 1 launches anything."""
    xs = [np.full(3, i + group.rank) for i in range(count)]
    if group.rank == 1:
        gate.wait()
    works = [group.all_reduce(x, async_op=True) for x in xs]
    gate.set()
    for number, (work, x) in enumerate(zip(works, xs, strict=True)):
        work.wait()
        assert (x == 2 * number + 1).all()


def test_more_operations_than_a_ring_holds_may_be_in_flight(two: Ranks) -> None:
    two.run(ahead, [1300] * 2, [threading.Event()] * 2)


def backwards(group: Any, count: int) -> None:
    """Receives posted in the opposite order of the messages, more than a ring holds."""
    peer = 1 - group.rank
    if group.rank == 0:
        works = [group.isend(np.full(5, tag), peer, tag=tag) for tag in range(count)]
    else:
        got = [np.zeros(5, np.int64) for _ in range(count)]
        works = [group.irecv(got[tag], peer, tag=tag) for tag in reversed(range(count))]
    for work in works:
        work.wait()
    if group.rank == 1:
        assert all((x == tag).all() for tag, x in enumerate(got))


def test_more_receives_than_a_ring_holds_may_be_posted_in_any_order(two: Ranks) -> None:
    two.run(backwards, [1200] * 2)


@on_ranks(2, timeout=1.0)
def test_a_full_ring_does_not_outlast_the_timeout(world: Any) -> None:
    """Send more messages than a ring holds at first in a synchronous block; no rank receives."""
    if world.rank == 1:
        while world.backend("cpu").failure() is None:
            pass
        return
    begun = time.monotonic()
    with pytest.raises(CollectiveTimeout), dist.coalescing_manager(world):  # noqa: PT012
        for tag in range(700):
            world.isend(np.ones(3), 1, tag=tag)
    assert 0.9 < time.monotonic() - begun < 30.0  # each message alone could wait for its second


@on_ranks(2)
def test_a_receive_from_any_source_sees_past_posted_receives(world: Any) -> None:
    """A message for any receive arrives before the message that a posted receive waits for."""
    x, y = np.zeros(3), np.zeros(3)
    if world.rank == 1:
        world.send(np.full(3, 7.0), 0, tag=7)
        world.recv(x, 0)
        world.send(np.full(3, 5.0), 0, tag=5)
        return
    posted = world.irecv(x, 1, tag=5)
    assert world.recv(y, None, tag=7) == 1
    assert (y == 7).all()
    world.send(y, 1)
    posted.wait()
    assert (x == 5).all()


@pytest.mark.parametrize("source", [1, None])
@on_ranks(2)
def test_callbacks_of_receives_are_called_although_no_thread_waits(
    world: Any, source: int | None
) -> None:
    """Callbacks of receives run although no thread waits, and another message lies before."""
    if world.rank == 1:
        world.barrier()
        for tag in (1, 2):
            world.send(np.full(50_000, tag), 0, tag=tag)
        return
    x, called = np.zeros(50_000, np.int64), threading.Event()
    work = world.irecv(x, source, tag=2)
    work.add_done_callback(lambda _: called.set())
    world.barrier()
    assert called.wait(10.0)
    assert (x == 2).all()
    y = np.zeros(50_000, np.int64)
    world.recv(y, 1, tag=1)
    assert (y == 1).all()


def unexpected_message(group: Any, look: Callable[[Any], bool], gate: threading.Event) -> None:
    """A long unexpected message stops halfway; other receives go on."""
    count = 1 << 20
    if group.rank == 1:
        lock = group.backend("cpu").group.links.to(0).address + at.C_LOCK
        work = group.isend(np.arange(count), 0, tag=1)
        while entry_points.compare_and_swap(lock, 0, 7) != 0:
            pass  # now no thread advances the link
        gate.wait()
        entry_points.compare_and_swap(lock, 7, 0)
        group.send(np.ones(3), 0, tag=2)
        work.wait()
        return
    x, y = np.zeros(count, np.int64), np.zeros(3)
    second = group.irecv(y, 1, tag=2)
    for _ in range(20):
        assert not look(second)
    gate.set()
    second.wait()
    group.recv(x, 1, tag=1)
    assert (x == np.arange(count)).all()


def short_wait(work: Any) -> bool:
    with pytest.raises(CollectiveTimeout):
        work.wait(0.005)
    return False


@pytest.mark.parametrize("look", [lambda work: work.is_completed(), short_wait])
def test_a_look_for_a_message_never_fails_the_group_for_another_message(
    two: Ranks, look: Callable[[Any], bool]
) -> None:
    two.run(unexpected_message, [look] * 2, [threading.Event()] * 2)


@pytest.mark.parametrize("timeout", [timedelta.max, 1e300, None])
@on_ranks(2)
def test_timeouts_of_centuries_are_no_overflow(world: Any, timeout: Any) -> None:
    world.all_reduce(np.ones(3), async_op=True, timeout=timeout).wait(timeout)
    world.all_reduce(np.ones(70_001), timeout=timeout)
    world.barrier(timeout=timeout)


@pytest.mark.parametrize("reason", ["ü" * 3000, '\n"\\' * 2000, "\udcff" * 10, "", "日本" * 900])
def test_any_reason_for_an_abort_reaches_the_peers(two: Ranks, reason: str) -> None:
    def call(group: Any) -> str:
        if group.rank == 0:
            group.abort(reason)
        with pytest.raises(Aborted) as caught:
            group.all_reduce(np.ones(3))
        return str(caught.value)

    first, second = two.run(call)
    assert first.startswith("group 'world' was aborted by its rank 0: ")
    assert second.encode(errors="replace")[:300] == first.encode(errors="replace")[:300]


def blamed(group: Any) -> str:
    """Every rank reports a failure of its own from several threads at once."""

    def report(number: int) -> None:
        group.backend("cpu").abort(Aborted(f"rank {group.rank}, thread {number}" + "." * number))

    at_once(*(partial(report, number) for number in range(6)))
    with pytest.raises(DistError) as caught:
        group.barrier()
    return str(caught.value)


def test_many_ranks_that_report_at_once_agree_on_a_cause() -> None:
    for _ in range(10):
        with Ranks(3) as ranks:
            assert len(set(ranks.run(blamed))) == 1


@pytest.mark.parametrize(("coming", "looks_again"), [(0, 1), (MUCH, 1), (MUCH + 1, 0)])
def test_a_rank_sleeps_while_many_bytes_come_from_another_host(
    coming: int, looks_again: int
) -> None:
    streams = np.zeros(at.STREAMS_BYTES // 8, np.int64)
    channel = np.zeros(at.channel_bytes(1) // 8, np.int64)
    channel[at.C_STREAMS // 8] = address(streams)
    streams[at.S_LEFT // 8] = coming
    assert FUNCTIONS[at.S_LINGER].ctypes(address(channel)) == looks_again
