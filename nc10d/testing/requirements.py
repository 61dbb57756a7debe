"""Requirements on a backend beside its collectives: messages, barriers, groups, orderly failure.

Each function runs on every rank in a group, `requirement(group)`, and raises AssertionError where
the backend does not meet it. None needs more than NumPy and two seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nc10d.api.queries import coalescing_manager
from nc10d.base.deadline import monotonic
from nc10d.errors import Aborted, DistError
from nc10d.group.new_group import new_group
from nc10d.group.process_group import ProcessGroup
from nc10d.group.world import GroupMember, destroy_process_group
from nc10d.testing.layouts import LAYOUTS, intact, lay
from nc10d.testing.reference import same_bits
from nc10d.work import Work

Array = np.ndarray[Any, np.dtype[Any]]
REASON = "to see what happens"
LARGE = 70_001  # elements of 8 bytes: more than the CPU engine's staging buffers hold


def _others(group: ProcessGroup) -> list[int]:
    return [rank for rank in range(group.size) if rank != group.rank]


def neighbours(group: ProcessGroup) -> tuple[int, int]:
    """Return the next rank and the previous rank."""
    return (group.rank + 1) % group.size, (group.rank - 1) % group.size


def _message(src: int, dst: int, number: int, count: int = 3) -> Array:
    return np.arange(count) + 1000 * src + 100 * dst + 10_000 * number


def _wait_all(works: Sequence[Work | None]) -> None:
    for work in works:
        assert work is not None, "an async call must return a Work"
        work.wait()


def tags_are_matched_in_any_order(group: ProcessGroup) -> None:
    """Every rank sends to every other rank with three tags; receives reverse the order."""
    tags = (0, 7, 2**31 - 1)
    others = _others(group)
    sent = [
        group.isend(_message(group.rank, peer, index), peer, tag)
        for index, tag in enumerate(tags)
        for peer in others
    ]
    for index, tag in reversed(list(enumerate(tags))):
        for peer in reversed(others):
            got = np.zeros(3, np.int64)
            sender = group.recv(got, peer, tag)
            assert sender == peer, f"recv from {peer} reports the sender {sender}"
            want = _message(peer, group.rank, index)
            assert np.array_equal(got, want), f"tag {tag} from rank {peer}: {got}, not {want}"
    _wait_all(sent)


def one_tag_keeps_the_order(group: ProcessGroup) -> None:
    """Messages with the same sender and tag arrive in the order sent, small and large mixed."""
    counts = [1, LARGE, 0, 5, 4096, 1] * 3
    following, previous = neighbours(group)
    if group.size == 1:
        return
    works = [
        group.isend(_message(group.rank, following, number, count), following)
        for number, count in enumerate(counts)
    ]
    for number, count in enumerate(counts):
        got = np.zeros(count, np.int64)
        group.recv(got, previous)
        assert np.array_equal(got, _message(previous, group.rank, number, count)), f"no. {number}"
    _wait_all(works)


def any_source_takes_each_message_once(group: ProcessGroup) -> None:
    """Rank 0 receives from any source, and recv returns the sender."""
    rounds = 8
    if group.rank:
        for number in range(rounds):
            group.send(_message(group.rank, 0, number), 0, tag=3)
        return
    seen = []
    for _ in range(rounds * (group.size - 1)):
        got = np.zeros(3, np.int64)
        sender = group.recv(got, None, tag=3)
        assert sender in _others(group), f"recv from anyone reports the sender {sender}"
        assert got[0] % 10_000 == 1000 * sender, f"{got} is not {sender}'s"
        seen.append((sender, int(got[0]) // 10_000))
    assert sorted(seen) == [(s, n) for s in _others(group) for n in range(rounds)], seen
    for sender in _others(group):
        numbers = [number for other, number in seen if other == sender]
        assert numbers == sorted(numbers), f"messages of rank {sender} overtook: {numbers}"


def receives_take_messages_in_the_order_of_posting(group: ProcessGroup) -> None:
    """Among receives from any source or a rank, the first posted takes the first message."""
    if group.size == 1:
        return
    following, previous = neighbours(group)
    sources = (None, previous, None, None, previous)
    for turn in range(4):
        got = [np.zeros(3, np.int64) for _ in sources]
        receives = [group.irecv(x, src, 9) for x, src in zip(got, sources, strict=True)]
        sent = [
            group.isend(_message(group.rank, following, number), following, 9)
            for number in range(len(sources))
        ]
        # The order of waits must not matter. Later turns may run as prepared calls.
        _wait_all(receives[::-1] if turn % 2 else receives)
        for number, x in enumerate(got):
            want = _message(previous, group.rank, number)
            assert np.array_equal(x, want), f"receive {number} of {sources}: {x}, not {want}"
        _wait_all(sent)


def both_may_send_first(group: ProcessGroup) -> None:
    """Neighbours send large arrays with isend before either receives; also in a batch."""
    if group.size == 1:
        return
    following, previous = neighbours(group)
    sent = _message(group.rank, following, 1, LARGE)
    want = _message(previous, group.rank, 1, LARGE)
    got = np.zeros_like(sent)
    work = group.isend(sent, following)
    group.recv(got, previous)
    _wait_all([work])
    assert np.array_equal(got, want)
    got = np.zeros_like(sent)
    with coalescing_manager(group):
        group.isend(sent, following)
        group.irecv(got, previous)
    assert np.array_equal(got, want)


def an_exchange_goes_round_a_ring(group: ProcessGroup) -> None:
    """Every rank sends to the next and receives from the previous in a single call, of any size."""
    following, previous = neighbours(group)
    for number, count in enumerate((1, LARGE, 0, LARGE, 1, 5)):
        sent = _message(group.rank, following, number, count)
        # The next rank's array may have another length.
        got = np.zeros(count + previous, np.int64) if count == 5 else np.zeros(count, np.int64)
        if count == 5:
            sent = np.resize(sent, count + group.rank)
        sender = group.sendrecv(sent, following, got, previous, tag=number)
        assert sender == previous, f"sendrecv with {previous} reports the sender {sender}"
        want = np.resize(_message(previous, group.rank, number, count), got.size)
        assert np.array_equal(got, want), f"exchange {number}: {got}, not {want}"
    x = _message(group.rank, following, 7)
    group.sendrecv_replace(x, following, previous)
    assert np.array_equal(x, _message(previous, group.rank, 7)), f"replaced by {x}"


def a_probe_shows_the_next_message(group: ProcessGroup) -> None:
    """probe returns sender, tag and bytes of the message that recv takes, and receives nothing."""
    if group.size == 1 or not _sees_messages(group):
        return
    following, previous = neighbours(group)
    sent = [(3, 2), (2**40, 5), (3, 4)]  # tag, count
    works = [
        group.isend(_message(group.rank, following, count, count), following, tag)
        for tag, count in sent
    ]
    for tag, count in (sent[1], sent[0], sent[2]):
        for src in (previous, None):
            found = group.probe(src, tag)
            assert found == (previous, tag, 8 * count), f"tag {tag}: {found}"
        assert group.iprobe(previous, 5) is None, "no message has the tag 5"
        assert group.probe().src == previous, "only the previous rank sends"
        got = np.zeros(count, np.int64)
        group.recv(got, found.src, found.tag)
        assert np.array_equal(got, _message(previous, group.rank, count, count)), f"{tag}: {got}"
    _wait_all(works)


def _sees_messages(group: ProcessGroup) -> bool:
    """Return whether the backend can look at messages before they are received."""
    try:
        group.iprobe()
    except ValueError:
        return False
    return True


def messages_lie_in_any_way(group: ProcessGroup) -> None:
    """Rank 0's arrays of all shapes and layouts reach rank 1, and only its elements change."""
    if group.rank > 1 or group.size == 1:
        return
    for layout in LAYOUTS:
        for shape in ((), (0,), (1,), (3, 4), (LARGE,)):
            x = (np.arange(float(np.prod(shape))) + 0.5).reshape(shape)
            if group.rank == 0:
                group.send(lay(x, layout), 1)
                continue
            got = lay(np.zeros_like(x), layout)
            group.recv(got, 0)
            assert same_bits(got, x), f"{layout} array of shape {shape}: {got}, not {x}"
            assert intact(got), f"{layout} array of shape {shape}: wrote beside its elements"


def a_sent_array_may_be_changed(group: ProcessGroup) -> None:
    """After send has returned, the sender may change the array."""
    for count in (1, 5000, LARGE):
        x = np.full(count, 1.0)
        if group.rank == 0:
            for peer in _others(group):
                group.send(x, peer)
            x[...] = 2.0
        else:
            got = np.zeros(count)
            group.recv(got, 0)
            assert (got == 1.0).all(), f"{count} elements: the sender's later values arrived"


def messages_overtake_collectives(group: ProcessGroup) -> None:
    """Rank 0 enters a collective only after receiving messages sent behind it by the others."""
    x, got = np.ones(LARGE), np.zeros(3, np.int64)
    if group.rank == 0:
        for peer in _others(group):
            group.recv(got, peer)
            assert np.array_equal(got, _message(peer, 0, 0))
        group.all_reduce(x)
    else:
        work = group.all_reduce(x, async_op=True)
        group.send(_message(group.rank, 0, 0), 0)
        _wait_all([work])
    assert (x == group.size).all()


def nobody_leaves_a_barrier_early(group: ProcessGroup) -> None:
    """No rank leaves a barrier before all ranks have entered it."""
    for number in range(10):
        if number % group.size == group.rank:
            np.sort(np.random.default_rng(number).random(20_000))  # some time, and no sleep
        times = np.zeros((group.size, 2))
        come = monotonic()
        if number % 2:
            group.barrier()
        else:
            _wait_all([group.barrier(async_op=True)])
        # The system's clock is the same for all ranks of a host.
        group.all_gather_into_tensor(times, np.array([come, monotonic()]))
        assert times[:, 0].max() <= times[:, 1].min(), f"barrier {number}: {times}"


def groups_compute_among_their_members(group: ProcessGroup) -> None:
    """Disjoint and overlapping groups compute at the same time, in their own rank order."""
    size, rank = group.size, group.rank
    lists = [list(range(0, size, 2)), list(range(1, size, 2)), list(range(size))]
    if size > 2:
        lists += [[0, 1], [1, 2]]
    made = [new_group(ranks) for ranks in lists if ranks]
    works = []
    for ranks, sub in zip([ranks for ranks in lists if ranks], made, strict=True):
        if sub is GroupMember.NON_GROUP_MEMBER:
            assert rank not in ranks
            continue
        assert isinstance(sub, ProcessGroup)
        x = np.full(300, float(rank + 1))
        works.append((sub.all_reduce(x, async_op=True), x, sum(r + 1 for r in ranks)))
        y = np.array([rank])
        sub.broadcast(y, sub.size - 1)
        assert y[0] == ranks[-1], f"group {ranks}: broadcast gave {y[0]}"
    for work, x, total in works:
        _wait_all([work])
        assert (x == total).all(), f"{x[0]}, not {total}"
    for sub in made:
        if isinstance(sub, ProcessGroup):
            destroy_process_group(sub)


def an_abort_reaches_everybody(group: ProcessGroup) -> None:
    """Pending and later operations of an aborted group raise on all ranks; other groups work."""
    sub = new_group(range(group.size))
    assert isinstance(sub, ProcessGroup)
    last = group.size - 1
    if group.rank == last:
        group.barrier()
        sub.abort(REASON)
    else:
        work = sub.all_reduce(np.ones(5), async_op=True)
        assert work is not None
        group.barrier()
        _must_fail("a pending all_reduce", work.wait)
    _must_fail("a later all_reduce", lambda: sub.all_reduce(np.ones(5)))
    sub.close()
    sub.close()
    x = np.ones(5)
    group.all_reduce(x)
    assert (x == group.size).all()


def _must_fail(operation: str, call: Callable[[], object]) -> None:
    try:
        call()
    except DistError as error:
        if not (isinstance(error, Aborted) and REASON in str(error)):
            text = f"{operation} of an aborted group must raise Aborted with the reason"
            raise AssertionError(f"{text}, not {error!r}") from error
    else:
        raise AssertionError(f"{operation} of an aborted group returned without an error")


REQUIREMENTS: tuple[Callable[[ProcessGroup], None], ...] = (
    tags_are_matched_in_any_order,
    one_tag_keeps_the_order,
    any_source_takes_each_message_once,
    receives_take_messages_in_the_order_of_posting,
    both_may_send_first,
    an_exchange_goes_round_a_ring,
    a_probe_shows_the_next_message,
    messages_lie_in_any_way,
    a_sent_array_may_be_changed,
    messages_overtake_collectives,
    nobody_leaves_a_barrier_early,
    groups_compute_among_their_members,
    an_abort_reaches_everybody,
)
