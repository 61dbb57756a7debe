"""Receives from any rank on devices, over the emulators."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from device_ranks import afresh, after, full, once, value
from emulated import emulated_ranks, needs_emulators

from nc10d.errors import Aborted, CollectiveTimeout
from nc10d.group.process_group import ProcessGroup
from nc10d.testing.ranks import Ranks

pytestmark = needs_emulators


def messages_come_from_whoever_sends(group: ProcessGroup) -> None:
    """Rank 1 sends before rank 0 has asked, rank 2 afterwards; then both again."""
    got = full(group, 0.0)
    if group.rank == 0:
        after(group, "sent-1")
        assert (group.recv(got, None), value(got)) == (1, 10.0)
        once(group, "received")
        found = [(group.recv(got, None), value(got)) for _ in range(5)]
        assert [x for peer, x in found if peer == 1] == [11.0, 12.0]
        assert [x for peer, x in found if peer == 2] == [20.0, 21.0, 22.0]
        return
    if group.rank == 2:
        after(group, "received")
    first = full(group, 10.0 * group.rank)
    works = [group.isend(first, 0)]
    once(group, f"sent-{group.rank}")
    more = [full(group, 10.0 * group.rank + number) for number in (1, 2)]
    works += [group.isend(x, 0) for x in more]
    for work in works:
        assert work is not None
        work.wait_blocking()


def tags_and_named_receives_are_told_apart(group: ProcessGroup) -> None:
    got = full(group, 0.0)
    if group.rank == 0:
        work = group.irecv(got, None, tag=5)
        assert work is not None
        assert not work.is_completed()
        once(group, "asked")
        named = full(group, 0.0)
        assert group.recv(named, 1, tag=4) == 1
        work.wait()
        assert work.result() == 2
        assert (value(named), value(got)) == (4.0, 5.0)
        assert group.recv(named, 1, tag=6) == 1
        assert group.recv(got, None, tag=6) == 2
        assert (value(named), value(got)) == (61.0, 62.0)
    else:
        after(group, "asked")
        tag = 4 if group.rank == 1 else 5
        for number, key in ((tag, float(tag)), (6, 60.0 + group.rank)):
            group.isend(full(group, key), 0, tag=number).wait_blocking()


def receives_take_messages_in_the_order_of_posting(group: ProcessGroup) -> None:
    """Whichever is waited for first; one whose Work is dropped is not posted any more."""
    if group.rank == 2:
        return
    sources = (None, 1, None, 1)
    for turn in range(2):
        got = [full(group, 0.0) for _ in sources]
        if group.rank == 1:
            after(group, f"posted-{turn}")
            for number in range(len(sources)):
                group.isend(full(group, float(number)), 0, tag=7).wait_blocking()
            continue
        group.irecv(full(group, 0.0), None, tag=7)
        works = [group.irecv(x, src, tag=7) for x, src in zip(got, sources, strict=True)]
        once(group, f"posted-{turn}")
        for work in works[::-1] if turn else works:
            work.wait()
        assert [value(x) for x in got] == [0.0, 1.0, 2.0, 3.0]
        assert [work.result() for work in works] == [1] * len(sources)


def callbacks_find_their_sender(group: ProcessGroup) -> None:
    got, peer = full(group, 0.0), 3
    if group.rank == 0:
        work = group.irecv(got, None)
        assert work is not None
        done = work.get_future().then(lambda _: "done")
        once(group, "asked")
        assert done.wait() == "done"
        assert (work.result(), value(got)) == (1, float(peer))
    elif group.rank == 1:
        after(group, "asked")
        group.isend(full(group, float(peer)), 0).wait_blocking()


def nobody_sends(group: ProcessGroup) -> None:
    if group.rank == 0:
        with pytest.raises(CollectiveTimeout, match="no rank has sent a message with tag 9"):
            group.recv(full(group, 0.0), None, tag=9, timeout=0.2)


def an_abort_ends_the_wait(group: ProcessGroup) -> None:
    if group.rank == 0:
        work = group.irecv(full(group, 0.0), None)
        assert work is not None
        once(group, "asked")
        with pytest.raises(Aborted, match="enough"):
            work.wait()
    if group.rank == 1:
        after(group, "asked")
        group.abort("enough")


def blocks_refuse(group: ProcessGroup) -> None:
    def exchange() -> None:
        with group.coalescing_manager():
            group.send(full(group, 0.0), (group.rank + 1) % group.size)
            group.recv(full(group, 0.0), None)

    with pytest.raises(ValueError, match="src can't be None in a block"):
        exchange()


LAWS = [
    messages_come_from_whoever_sends,
    tags_and_named_receives_are_told_apart,
    receives_take_messages_in_the_order_of_posting,
    callbacks_find_their_sender,
    nobody_sends,
    an_abort_ends_the_wait,
    blocks_refuse,
]


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with emulated_ranks(3, NC10D_EMULATED_GPUS="3") as ranks:
        yield ranks


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_receives_from_any_rank(three: Ranks, law: Callable[..., None]) -> None:
    three.run(afresh, [law] * 3)
