"""The wait graph: however late notices are, ranks in a reported cycle are stuck for ever."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nc10d.backend.cpu.deadlock.wait_graph import (
    Need,
    ProgressState,
    WaitNotice,
    describe_cycle,
    find_cycle,
)

Op = tuple[str, int]  # ("call" or "start", group), ("send" or "recv", peer)
GROUPS = ((0, 1, 2), (0, 1), (1, 2), (0, 2))
RANKS = 3
LINK = 100  # keys of links begin here


def link_key(sender: int, receiver: int) -> int:
    return LINK + RANKS * sender + receiver


@dataclass
class Rank:
    """A thread with a program, its calls in flight by group, and its notices."""

    program: list[Op]
    waits: Op | None = None
    queues: dict[int, list[int]] = field(default_factory=lambda: {g: [] for g in range(4)})
    calls: list[int] = field(default_factory=lambda: [0] * 4)  # made, by group
    entered: list[int] = field(default_factory=lambda: [0] * 4)
    number: int = 0  # of the call that the thread waits for
    version: int = 0
    notice: WaitNotice | None = None
    shown: list[WaitNotice] = field(default_factory=list)  # all of them: some are read late


class World:
    """Three ranks that share groups and links; a link holds one message.

    The `lazy` moves (kind, rank) hardly ever happen, unless no other move is left.
    """

    def __init__(self, programs: list[list[Op]], lazy: Collection[tuple[str, int]] = ()) -> None:
        self.lazy = lazy
        self.ranks = [Rank(list(program)) for program in programs]
        self.sent = {link_key(s, r): 0 for s in range(RANKS) for r in range(RANKS)}
        self.taken = dict(self.sent)

    def over(self, me: int) -> bool:
        """Return whether the wait of a rank's thread is over."""
        rank = self.ranks[me]
        assert rank.waits is not None
        kind, event = rank.waits
        if kind == "call":
            return rank.number not in rank.queues[event]
        if kind == "send":
            return self.sent[link_key(me, event)] - self.taken[link_key(me, event)] < 1
        return self.sent[link_key(event, me)] > self.taken[link_key(event, me)]

    def moves(self) -> list[tuple[str, int, int]]:
        """Return the events that may happen next."""
        found = []
        for me, rank in enumerate(self.ranks):
            if rank.waits is None and rank.program:
                found.append(("next", me, 0))
            if rank.waits is not None and self.over(me):
                found.append(("notice", me, 0))
            found += [("enter", me, g) for g, queue in rank.queues.items() if self._enters(me, g)]
            found += [
                ("end", me, g) for g, queue in rank.queues.items() if queue and self._ends(me, g)
            ]
        return found

    def _enters(self, me: int, group: int) -> bool:
        queue = self.ranks[me].queues[group]
        return bool(queue) and self.ranks[me].entered[group] < queue[0]

    def _ends(self, me: int, group: int) -> bool:
        queue = self.ranks[me].queues[group]
        return bool(queue) and all(
            self.ranks[member].entered[group] >= queue[0] for member in GROUPS[group]
        )

    def move(self, event: str, me: int, group: int) -> None:
        rank = self.ranks[me]
        if event == "enter":
            rank.entered[group] = rank.queues[group][0]
        elif event == "end":
            rank.queues[group].pop(0)
        elif event == "next":
            self._next(me)
        else:
            self._go_on(me)

    def _next(self, me: int) -> None:
        rank = self.ranks[me]
        kind, event = rank.program.pop(0)
        if kind in ("call", "start"):
            if me not in GROUPS[event]:
                return
            rank.calls[event] += 1
            rank.queues[event].append(rank.calls[event])
            rank.number = rank.calls[event]
        elif event == me:
            return
        if kind != "start":
            rank.waits = (kind, event)

    def _go_on(self, me: int) -> None:
        rank = self.ranks[me]
        assert rank.waits is not None
        kind, event = rank.waits
        if kind == "send":
            self.sent[link_key(me, event)] += 1
        elif kind == "recv":
            self.taken[link_key(event, me)] += 1
        rank.waits, rank.notice = None, None
        rank.version += 1

    def publish(self, me: int) -> None:
        """Publish the notice of a waiting rank, as the detector does."""
        rank = self.ranks[me]
        if rank.waits is None:
            return
        needs = tuple(self._needs(me))
        if not self.over(me) and needs:
            rank.notice = WaitNotice(f"rank {me}", needs, tuple(self._states(me)))
            rank.shown.append(rank.notice)
            rank.version += 1

    def _needs(self, me: int) -> Iterator[Need]:
        rank = self.ranks[me]
        assert rank.waits is not None
        kind, event = rank.waits
        if kind == "call":
            number = rank.entered[event]
            for member in GROUPS[event]:
                if self.ranks[member].entered[event] < number:
                    yield Need(event, number, -1, member, event)
        elif kind == "send":
            key = link_key(me, event)
            yield Need(key, 0, self.taken[key], event, 0)
        else:
            key = link_key(event, me)
            yield Need(key, 0, self.sent[key], event, 0)

    def _states(self, me: int) -> Iterator[ProgressState]:
        rank = self.ranks[me]
        for group, members in enumerate(GROUPS):
            if me in members:
                yield ProgressState(group, rank.entered[group], bool(rank.queues[group]))
        for peer in set(range(RANKS)) - {me}:
            yield ProgressState(
                link_key(me, peer), self.sent[link_key(me, peer)], rank.waits == ("send", peer)
            )
            yield ProgressState(
                link_key(peer, me), self.taken[link_key(peer, me)], rank.waits == ("recv", peer)
            )

    def settle(self, draw: random.Random) -> None:
        """Make moves until none is left."""
        while moves := self.moves():
            self.move(*draw.choice(moves))


def steps(world: World, draw: random.Random, most: int) -> None:
    """Make a few moves and publish a few notices."""
    for _ in range(draw.randrange(most + 1)):
        moves = [m for m in world.moves() if m[:2] not in world.lazy or draw.random() < 0.02]
        if moves and draw.random() < 0.7:
            world.move(*draw.choice(moves))
        else:
            world.publish(draw.randrange(RANKS))


def look(world: World, me: int, draw: random.Random, late: bool) -> list[int]:
    """Look at all notices, while the world goes on; return the cycle that is found.

    With `late`, a peer's notice is any that it has ever published.
    """
    notices: dict[int, WaitNotice] = {}
    for rank in draw.sample(range(RANKS), RANKS):
        steps(world, draw, 2)
        notice, shown = world.ranks[rank].notice, world.ranks[rank].shown
        if late and shown and rank != me:
            notice = draw.choice(shown)
        if notice is not None:
            notices[rank] = notice
    return find_cycle(me, notices) if me in notices else []


def an_op(draw: random.Random) -> Op:
    if draw.random() < 0.7:
        return draw.choice(["call", "call", "start"]), draw.randrange(4)
    return draw.choice(["send", "recv"]), draw.randrange(RANKS)


def world_of(seed: int) -> tuple[World, random.Random]:
    draw = random.Random(seed)
    programs = [[an_op(draw) for _ in range(draw.randrange(2, 7))] for _ in range(RANKS)]
    kinds = [(kind, rank) for kind in ("next", "enter", "end", "notice") for rank in range(RANKS)]
    return World(programs, {move for move in kinds if draw.random() < 0.3}), draw


# Seeds that reveal mistakes that other seeds do not: a message that has arrived is ignored (all of
# them), an operation in flight is ignored, a call that was made is not seen.
REVEALING = (690, 1209, 1572, 342, 550)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("seeds", [range(300), REVEALING])
def test_no_rank_of_a_reported_cycle_ever_goes_on(seeds: Sequence[int], late: bool) -> None:
    for seed in seeds:
        world, draw = world_of(seed)
        for _ in range(40):
            steps(world, draw, 6)
            found = look(world, draw.randrange(RANKS), draw, late)
            if found:
                before = [
                    (len(world.ranks[rank].program), world.ranks[rank].waits) for rank in found
                ]
                world.settle(draw)
                after = [
                    (len(world.ranks[rank].program), world.ranks[rank].waits) for rank in found
                ]
                assert before == after, seed
                assert not any(world.over(rank) for rank in found), seed
                break


@pytest.mark.parametrize("seed", range(300))
def test_a_cycle_is_found_unless_a_rank_that_has_ended_is_needed(seed: int) -> None:
    world, draw = world_of(seed)
    world.settle(draw)
    stuck = {me for me, rank in enumerate(world.ranks) if rank.waits is not None}
    for me in stuck:
        world.publish(me)
    notices = {me: notice for me in stuck if (notice := world.ranks[me].notice) is not None}
    needed = {need.rank for notice in notices.values() for need in notice.needs}
    if stuck and needed <= stuck and not any(q for r in world.ranks for q in _starts(r)):
        assert any(find_cycle(me, notices) for me in notices)


def _starts(rank: Rank) -> list[list[int]]:
    """Return the queues with calls that the thread does not wait for."""
    waited = rank.waits[1] if rank.waits is not None and rank.waits[0] == "call" else None
    return [queue for group, queue in rank.queues.items() if queue and group != waited]


wait_notices = st.builds(
    WaitNotice,
    st.text(max_size=40),
    st.lists(st.builds(Need, *[st.integers(-(2**63), 2**63 - 1)] * 5), max_size=5).map(tuple),
    st.lists(
        st.builds(ProgressState, *[st.integers(-(2**63), 2**63 - 1)] * 2, st.booleans()), max_size=5
    ).map(tuple),
    st.floats(allow_nan=False),
)


@given(notice=wait_notices)
def test_a_packed_notice_is_unpacked_unchanged(notice: WaitNotice) -> None:
    raw = notice.packed(10_000)
    assert raw is not None
    assert WaitNotice.unpacked(raw + b"rest") == notice
    assert notice.packed(len(raw) - 1) is None


def test_all_ranks_of_a_cycle_give_the_same_description() -> None:
    words = {rank: f"rank {rank} waits" for rank in (2, 5, 7)}
    texts = {describe_cycle(ranks, words) for ranks in ([7, 2, 5], [2, 5, 7], [5, 7, 2])}
    assert len(texts) == 1
    assert (
        "rank 2 waits, for rank 5; rank 5 waits, for rank 7; rank 7 waits, for rank 2"
        in texts.pop()
    )


@pytest.mark.parametrize("size", [1, 2, 50])
def test_a_cycle_of_any_size_is_found_from_each_of_its_ranks(size: int) -> None:
    notices = {
        me: WaitNotice(
            "", (Need(me, 1, -1, (me + 1) % size, me),), (ProgressState((me - 1) % size, 0, False),)
        )
        for me in range(size)
    }
    if size > 1:
        for me in range(size):
            assert find_cycle(me, notices) == [(me + i) % size for i in range(size)]
        timed = {me: replace(notice, timeout=300.0) for me, notice in notices.items()}
        assert find_cycle(0, timed)
        timed[0] = replace(notices[0], timeout=1.5)  # this rank leaves the cycle by its timeout
        assert all(find_cycle(me, timed) == [] for me in timed)
    del notices[0]
    assert all(find_cycle(me, notices) == [] for me in notices)


def test_a_need_of_an_unused_link_is_unmet_unless_the_rank_has_left_the_group() -> None:
    need = Need(key=LINK, until=0, seen=0, rank=1, group=0)
    assert not WaitNotice("", (), (ProgressState(0, 3, False),)).meets(need)
    assert WaitNotice("", (), (ProgressState(1, 3, False),)).meets(need)


def test_the_text_of_a_cycle_of_hundreds_fits_into_an_error_and_a_message() -> None:
    words = {rank: f"rank {rank} waits in recv #1 {'x' * 90}" for rank in range(1000)}
    text = describe_cycle([*range(1000)], words)
    assert len(text) < 1920
    assert "rank 7 waits in recv #1" in text
    assert "992 more ranks" in text
