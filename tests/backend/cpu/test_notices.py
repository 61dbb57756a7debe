"""Notices between hosts: forwarding finds every cycle, and sends no notice twice."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nc10d.backend.cpu.control.connections import ControlConnections
from nc10d.backend.cpu.deadlock.notices import MESSAGES_PER_LOOK, NoticeExchange, VersionedNotice
from nc10d.backend.cpu.deadlock.wait_graph import (
    Need,
    ProgressState,
    WaitNotice,
    find_cycle,
    waiting_for,
)


class Connections:
    """Control connections on which messages wait until they are delivered."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Any]] = []
        self.stopped: set[int] = set()

    def send(self, numbers: set[int], message: Any) -> None:
        self.sent += [(number, json.loads(json.dumps(message))) for number in numbers]

    def backlogged(self, number: int) -> bool:
        return number in self.stopped


class World:
    """Ranks on hosts (a letter each); each rank needs the next rank."""

    def __init__(self, hosts: str) -> None:
        self.hosts, self.size = hosts, len(hosts)
        self.connections = Connections()
        self.control = cast(ControlConnections, self.connections)
        self.exchanges = [NoticeExchange() for _ in hosts]

    def notices_of(self, me: int) -> dict[int, VersionedNotice]:
        near = [rank for rank in range(self.size) if self.hosts[rank] == self.hosts[me]]
        return self.exchanges[me].received | {peer: (2, self.notice(peer)) for peer in near}

    def notice(self, rank: int) -> WaitNotice:
        need = Need(rank, 1, -1, (rank + 1) % self.size, rank)
        return WaitNotice(
            f"rank {rank}", (need,), (ProgressState((rank - 1) % self.size, 0, False),)
        )

    def look(self, me: int) -> list[int]:
        versioned = self.notices_of(me)
        notices = {rank: notice for rank, (_, notice) in versioned.items() if notice is not None}
        found = find_cycle(me, notices)
        if not found:
            near = [rank for rank in range(self.size) if self.hosts[rank] == self.hosts[me]]
            sent = {rank: versioned[rank] for rank in waiting_for(me, notices)}
            self.exchanges[me].forward(sent, me, near, self.control)
        return found

    def deliver(self) -> int:
        sent, self.connections.sent = self.connections.sent, []
        for rank, message in sent:
            self.exchanges[rank].receive(message)
        return len(sent)


@given(hosts=st.text("abc", min_size=2, max_size=6))
def test_a_cycle_on_any_hosts_is_found_after_as_many_steps_as_it_has_ranks(hosts: str) -> None:
    world, sent = World(hosts), 0
    for _ in hosts:
        found = [world.look(rank) for rank in range(world.size)]
        sent += world.deliver()
    assert [*range(world.size)] in [sorted(ranks) for ranks in found]
    assert sent <= world.size**2
    assert len(set(hosts)) > 1 or sent == 0, "peers of a host read each other's slots"


def test_a_notice_is_sent_once_and_not_to_a_rank_with_a_backlog() -> None:
    world = World("ab")
    world.connections.stopped = {1}
    world.look(0)
    assert world.deliver() == 0
    world.connections.stopped = set()
    world.look(0)
    assert world.deliver() == 1
    world.look(0)
    assert world.deliver() == 0


@pytest.mark.parametrize("me", [0, 7])
def test_a_rank_that_needs_many_sends_a_few_at_a_time_its_own_notice_first(me: int) -> None:
    size = 3 * MESSAGES_PER_LOOK
    connections, exchanges = Connections(), NoticeExchange()
    others = [rank for rank in range(size) if rank != me]
    mine = WaitNotice("", tuple(Need(0, 1, -1, rank, 0) for rank in others), ())
    led: dict[int, VersionedNotice] = {(me - 1) % size: (2, mine), me: (2, mine)}
    looks = []
    while not looks or looks[-1]:
        exchanges.forward(led, me, [me], cast(ControlConnections, connections))
        looks.append([(rank, message["waiter"]) for rank, message in connections.sent])
        connections.sent.clear()
    assert max(map(len, looks)) == MESSAGES_PER_LOOK
    sent = [pair for look in looks for pair in look]
    assert sent[: len(others)] == [(rank, me) for rank in (*others[me:], *others[:me])]
    assert len(sent) == len(set(sent)) == 2 * len(others) - 1


def test_all_ranks_that_wait_for_a_rank_are_found() -> None:
    world = World("abcd")
    notices = {rank: world.notice(rank) for rank in (0, 1, 3)}
    assert waiting_for(1, notices) == {3, 0, 1}
    assert waiting_for(3, notices) == {3}


@pytest.mark.parametrize("notice", ["", "AAAA", "no base64!", "/////w=="])
def test_a_malformed_notice_is_ignored(notice: str) -> None:
    exchanges = NoticeExchange()
    exchanges.receive({"kind": "wait_notice", "waiter": 1, "version": 2, "notice": notice})
    assert exchanges.received == {}


def test_an_older_notice_that_comes_by_a_longer_path_is_ignored() -> None:
    world = World("ab")
    world.look(0)
    ((rank, message),) = world.connections.sent
    world.deliver()
    later = world.exchanges[rank].received[0]
    world.exchanges[rank].receive(message | {"version": 1, "notice": "AAAAAAAA"})
    assert world.exchanges[rank].received[0] is later
