"""Every rank raises the same cause of a failure, typed, with names and numbers."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from failing_calls import caught, stand_aside

import nc10d as dist
from nc10d.backend.cpu.engine.channel import Submission, deadline_ns
from nc10d.backend.cpu.lowering.prepared import PreparedProgram
from nc10d.backend.cpu.lowering.strided import operands
from nc10d.backend.cpu.native import entry_points
from nc10d.backend.cpu.native.offsets import ABORTED, BLOCKED, C_OPS, CLOSED, MISMATCH
from nc10d.base.deadline import Deadline
from nc10d.errors import (
    Aborted,
    CollectiveMismatch,
    CollectiveTimeout,
    DistError,
    GroupClosed,
    PeerLost,
)
from nc10d.ops import AllReduce, Recv, Send
from nc10d.testing import Ranks, run_ranks


def every_rank(call: Any, size: int, **options: Any) -> list[DistError]:
    return run_ranks(lambda group: caught(group, call), size, **options)


@pytest.mark.parametrize("size", [2, 3])
def test_a_timeout_names_the_missing_rank_on_every_rank(size: int) -> None:
    start = time.monotonic()

    def call(group: Any) -> DistError:
        group.timeout = 1.0  # of calls: formation may take longer
        if group.rank == 1:
            return stand_aside(group)
        return caught(group, lambda g: g.all_reduce(np.ones(4)))

    errors = run_ranks(call, size)
    assert 1.0 <= time.monotonic() - start < 60
    for error in errors:
        assert isinstance(error, CollectiveTimeout), error
        assert error.rank == 1
        assert error.op == "all_reduce"
        assert error.seq == 1
        assert error.waited >= 0.9, "since this rank began the call"
        assert error.last == {rank: int(rank != 1) for rank in range(size)}
        assert "waiting for rank 1" in str(error)
    assert len({str(error) for error in errors}) == 1, "one root cause everywhere"


def crossed(group: Any, over: threading.Event) -> DistError:
    other = dist.new_group()
    threading.Thread(target=over.wait).start()  # it could make a call, so no cycle is certain
    for one in (group, other):
        one.barrier()
        one.timeout = 1.0
    first, second = (group, other) if group.rank == 0 else (other, group)

    def both(_: Any) -> None:
        first.all_reduce(np.ones(4))
        second.all_reduce(np.ones(4))

    return caught(group, both)


def test_groups_that_are_used_in_crossing_orders_are_both_named() -> None:
    over = threading.Event()
    errors = run_ranks(crossed, 2, "threads", [over] * 2)
    over.set()
    for error in errors:
        assert isinstance(error, CollectiveTimeout)
        assert "group 'world'" in str(error)
        assert "group 'world/1'" in str(error)
        assert "use groups in the same order on all ranks" in str(error)


def late_alone(group: Any) -> DistError:
    other = dist.new_group()
    other.barrier()
    group.timeout = 0.5
    if group.rank == 1:
        return stand_aside(group)
    return caught(group, lambda g: g.barrier())


def test_a_late_rank_is_not_reported_as_waiting_elsewhere() -> None:
    for error in run_ranks(late_alone, 2):
        assert "meanwhile" not in str(error)


def too_late(group: Any, call: Callable[[Any], Any], over: Sequence[threading.Event]) -> DistError:
    call(group)  # prepared from here on: it would take the fast path
    group.timeout = 0.3
    if group.rank == 2:
        assert all(event.wait(30) for event in over)
        return caught(group, call)
    error = caught(group, call)
    over[group.rank].set()
    return error


@pytest.mark.parametrize(
    "call",
    [
        lambda g: g.barrier(),
        lambda g: g.all_reduce(np.ones(4)),
        lambda g: g.all_reduce(np.ones(4), async_op=True).wait(),
    ],
)
def test_a_rank_that_arrives_after_the_others_timed_out_gets_their_error(call: Any) -> None:
    over = [threading.Event(), threading.Event()]
    errors = run_ranks(lambda group: too_late(group, call, over), 3)
    assert len({str(error) for error in errors}) == 1, "one root cause everywhere"
    assert all(isinstance(error, CollectiveTimeout) for error in errors)


def third_message(group: Any, late: str) -> DistError:
    x = np.ones(70_000)
    group.timeout = 1.0
    for _ in range(2):
        if group.rank == 0:
            group.send(x, 1)
        else:
            group.recv(x, 0)
    if (group.rank == 0) != (late == "send"):
        return stand_aside(group)
    return caught(group, lambda g: g.send(x, 1) if late == "send" else g.recv(x, 0))


@pytest.mark.parametrize("late", ["send", "recv"])
def test_a_timeout_of_a_message_names_the_message(late: str) -> None:
    errors = run_ranks(lambda group: third_message(group, late), 2)
    for error in errors:
        assert isinstance(error, CollectiveTimeout), error
        assert error.seq == 3
        assert error.op.startswith(f"{late}(")
        assert error.waited is None, "no collective is under way"
        assert f"{error.op} #3" in str(error)
    assert len({str(error) for error in errors}) == 1, "one root cause everywhere"


def test_uneven_sizes_that_do_not_fit_are_an_error_on_every_rank() -> None:
    def call(group: Any) -> None:
        mine = [np.ones(2 if rank == group.rank else 3) for rank in range(2)]
        theirs = [np.ones(2) for _ in range(2)]
        group.all_to_all(theirs, mine)
        group.barrier()

    errors = every_rank(call, 2)
    assert all(isinstance(error, CollectiveMismatch) for error in errors), errors
    assert "all_to_all" in str(errors[0])
    assert "sends 24 bytes" in str(errors[0])
    assert "awaits 16" in str(errors[0])


def start(group: Any, kind: str, x: Any) -> dist.Work:
    """Start a call of this kind; rank 0 sends what rank 1 receives."""
    if group.rank == 0 and kind.startswith("receive"):
        return group.isend(x, 1)
    calls: dict[str, Callable[[], dist.Work]] = {
        "all_reduce": lambda: group.all_reduce(x, async_op=True),
        "broadcast": lambda: group.broadcast(x, 0, async_op=True),
        "receive": lambda: group.irecv(x, 0),
        "receive from any": lambda: group.irecv(x, None),
    }
    return calls[kind]()


@pytest.mark.parametrize("count", [1, 10_000])
@pytest.mark.parametrize("kind", ["all_reduce", "broadcast", "receive", "receive from any"])
def test_a_call_that_the_aborting_rank_has_completed_completes(kind: str, count: int) -> None:
    begun, aborted = threading.Event(), threading.Event()

    def call(group: Any) -> None:
        group.barrier()
        x = np.full(count, 1.0 - group.rank)
        if group.rank == 0:
            assert begun.wait(60)
            start(group, kind, x).wait()
            group.abort("a new group follows")
            aborted.set()
            return
        work = start(group, kind, x)
        begun.set()
        assert aborted.wait(60)
        assert work.is_completed()
        work.wait()
        assert (x == 1.0).all()
        assert isinstance(caught(group, lambda g: g.barrier()), Aborted)

    run_ranks(call, 2)


def test_a_blocking_call_that_the_aborting_rank_has_completed_completes() -> None:
    begun, aborted = threading.Event(), threading.Event()

    def call(group: Any) -> None:
        group.barrier()
        x = np.ones(3)
        if group.rank == 0:
            assert begun.wait(60)
            group.all_reduce(x)
            group.abort("a new group follows")
            aborted.set()
            return
        # A blocking call in two halves: after the first slice of its wait, and the rest.
        launcher, ops = group.backend("cpu").launcher, [AllReduce(x)]
        lowered = launcher._lower(ops)
        linked, resolved = launcher.programs.linked(lowered), operands(lowered)
        addresses = np.array(resolved.addresses, np.int64)
        program = PreparedProgram(launcher._channel, linked, addresses, resolved.keep)
        answer = program.run(None, ops, None)
        assert answer == BLOCKED
        begun.set()
        assert aborted.wait(60)
        assert launcher.finish(program, answer, ops, None, 30.0)
        assert (x == 2.0).all()

    run_ranks(call, 2)


FIRST_MESSAGES: dict[str, Callable[[int], Any]] = {
    "send": lambda peer: Send(np.ones(2), peer, 0),
    "recv": lambda peer: Recv(np.ones(2), peer, 0),
    "recv from any": lambda _: Recv(np.ones(2), None, 0),
}


@pytest.mark.parametrize("kind", FIRST_MESSAGES)
@pytest.mark.parametrize("ends", ["lost", "closed"])
def test_a_first_message_learns_why_it_has_no_link(kind: str, ends: str) -> None:
    """The group may end between the check of a first message and the making of its link."""

    def call(group: Any) -> DistError:
        backend = group.backend("cpu")
        group.barrier()
        if ends == "closed":
            backend.close()
        elif group.rank == 0:
            backend.abort(PeerLost("rank 2 is lost: killed by signal 9", rank=2))
        else:
            caught(group, lambda g: g.barrier())
        op = FIRST_MESSAGES[kind]((group.rank + 1) % group.size)
        deadline = Deadline.after(20.0)
        return caught(group, lambda _: backend.launcher.mailbox.launch(op, deadline).wait())

    for error in run_ranks(call, 3):
        if ends == "closed":
            assert type(error) is GroupClosed
            assert "has been closed on rank" in str(error)
        else:
            assert (type(error), error.rank) == (PeerLost, 2), error
            assert "killed by signal 9" in str(error)


def test_works_in_flight_fail_when_their_group_is_closed() -> None:
    def call(group: Any) -> Any:
        if group.rank == 0:
            work = group.all_reduce(np.ones(500_000), async_op=True)
            dist.destroy_process_group()
            return work.exception()
        while group.backend("cpu").group.memory.state(0) != CLOSED:
            pass
        return caught(group, lambda g: g.all_reduce(np.ones(500_000)))

    def run() -> list[Any]:
        with Ranks(2) as ranks:
            return ranks.run(call)

    closed, left = run()
    assert isinstance(closed, GroupClosed)
    assert isinstance(left, (PeerLost, GroupClosed)), left


def receive(group: Any, x: Any) -> None:
    group.recv(x, None)


def be_called_back(group: Any, x: Any) -> None:
    """Receive without waiting: another thread completes the Work."""
    ended: queue.Queue[dist.Work] = queue.Queue()
    group.irecv(x, None).add_done_callback(ended.put)
    ended.get(timeout=30).wait()


@pytest.mark.parametrize("take", [receive, be_called_back])
def test_a_receive_from_any_source_fails_once_all_peers_have_left(take: Any) -> None:
    def call(group: Any) -> Any:
        x = np.zeros(3)
        if group.rank:
            group.send(np.full(3, float(group.rank)), 0)
            dist.destroy_process_group()
            return None
        for _ in range(2):  # the messages that they sent before they left have arrived
            take(group, x)
        return caught(group, lambda g: take(g, x))

    with Ranks(3) as ranks:
        error = ranks.run(call)[0]
    assert isinstance(error, PeerLost), error
    assert "has left" in str(error)


@pytest.mark.parametrize("count", [3, 100_000])
def test_messages_that_a_rank_sent_before_it_left_arrive(count: int) -> None:
    def call(group: Any) -> Any:
        if group.rank == 1:
            group.barrier()
            works = [group.isend(np.full(count, tag), 0, tag=tag) for tag in range(4)]
            for work in works:
                work.wait()
            dist.destroy_process_group()
            return None
        backend = group.backend("cpu")
        xs = {tag: np.zeros(count, np.int64) for tag in (1, 0, 3, 2)}
        works = [group.irecv(xs[tag], 1, tag=tag) for tag in (1, 0)]
        group.barrier()
        works += [group.irecv(xs[tag], 1, tag=tag) for tag in (3, 2)]
        for work in works:
            work.wait()
        assert all((x == tag).all() for tag, x in xs.items())
        while not backend.group.health.peers.has_closed(1):
            pass
        # A thread that looks again, because it has missed its own message, gets no error.
        channel = backend.group.links.inbox(1).channel
        return backend.group.health.check_wait((), channel, Deadline.after(9.0))

    with Ranks(2) as ranks:
        assert ranks.run(call)[0] is None


def aborted_later(group: Any) -> list[str]:
    def call(group: Any) -> None:
        group.all_reduce(np.ones(4 + group.rank))

    first = caught(group, call)
    group.abort("out of here")
    return [str(first), str(caught(group, call)), str(caught(group, lambda g: g.barrier()))]


def test_an_abort_of_a_failed_group_keeps_the_first_error_text() -> None:
    (message,) = {message for words in run_ranks(aborted_later, 2) for message in words}
    assert "disagree on operation #1" in message


def begun_again(group: Any) -> tuple[list[int], int]:
    """Wait for calls that disagree, as several threads do before a thread has raised the cause."""
    group.barrier()
    backend = group.backend("cpu")
    request = backend.launcher._lower([AllReduce(np.ones(4 + group.rank))])
    linked, resolved = backend.launcher.programs.linked(request), operands(request)
    channel = backend.group.channel
    limit = deadline_ns(Deadline.after(30.0))
    submission = Submission(linked, resolved.addresses, resolved.keep, limit)
    channel.submit(submission)
    answers = [0]
    while answers[-1] == 0:
        answers = [entry_points.wait(channel.address, submission.address, 10**9) for _ in range(3)]
    return answers, channel.get(C_OPS)


def test_calls_that_disagree_keep_their_number_however_many_threads_wait() -> None:
    for answers, number in run_ranks(begun_again, 2):
        assert answers == [MISMATCH, ABORTED, ABORTED]
        assert number == 2
