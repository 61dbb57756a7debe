"""Probes: what each rank passes on is enough to find a circle across hosts, and comes once."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nc10d.backend.cpu.control.connections import ControlConnections
from nc10d.backend.cpu.deadlock.notices import AT_A_TIME, Known, NoticeExchange
from nc10d.backend.cpu.deadlock.wait_graph import Need, ProgressState, WaitNotice, circle, leading


class Lines:
    """Control lines on which messages wait until they are delivered."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Any]] = []
        self.stopped: set[int] = set()

    def send(self, numbers: set[int], message: Any) -> None:
        self.sent += [(number, json.loads(json.dumps(message))) for number in numbers]

    def behind(self, number: int) -> bool:
        return number in self.stopped


class World:
    """Ranks on hosts (a letter each), each of which needs the next one."""

    def __init__(self, hosts: str) -> None:
        self.hosts, self.size = hosts, len(hosts)
        self.lines = Lines()
        self.control = cast(ControlConnections, self.lines)
        self.probes = [NoticeExchange() for _ in hosts]

    def known(self, me: int) -> dict[int, Known]:
        mates = [rank for rank in range(self.size) if self.hosts[rank] == self.hosts[me]]
        return self.probes[me].heard | {mate: (2, self.standing(mate)) for mate in mates}

    def standing(self, rank: int) -> WaitNotice:
        need = Need(rank, 1, -1, (rank + 1) % self.size, rank)
        return WaitNotice(
            f"rank {rank}", (need,), (ProgressState((rank - 1) % self.size, 0, False),)
        )

    def look(self, me: int) -> list[int]:
        known = self.known(me)
        standings = {rank: one for rank, (_, one) in known.items() if one is not None}
        found = circle(me, standings)
        if not found:
            near = [rank for rank in range(self.size) if self.hosts[rank] == self.hosts[me]]
            told = {rank: known[rank] for rank in leading(me, standings)}
            self.probes[me].pass_on(told, me, near, self.control)
        return found

    def deliver(self) -> int:
        sent, self.lines.sent = self.lines.sent, []
        for rank, message in sent:
            self.probes[rank].hear(message)
        return len(sent)


@given(hosts=st.text("abc", min_size=2, max_size=6))
def test_a_circle_on_any_hosts_is_found_after_as_many_looks_as_it_has_ranks(hosts: str) -> None:
    world, sent = World(hosts), 0
    for _ in hosts:
        found = [world.look(rank) for rank in range(world.size)]
        sent += world.deliver()
    assert [*range(world.size)] in [sorted(one) for one in found]
    assert sent <= world.size**2
    assert len(set(hosts)) > 1 or sent == 0, "mates read each other's boards"


def test_what_was_sent_is_not_sent_again_and_not_to_who_does_not_take_it() -> None:
    world = World("ab")
    world.lines.stopped = {1}
    world.look(0)
    assert world.deliver() == 0
    world.lines.stopped = set()
    world.look(0)
    assert world.deliver() == 1
    world.look(0)
    assert world.deliver() == 0


@pytest.mark.parametrize("me", [0, 7])
def test_who_needs_many_tells_a_few_at_a_time_each_once_and_itself_first(me: int) -> None:
    size = 3 * AT_A_TIME
    lines, probes = Lines(), NoticeExchange()
    others = [rank for rank in range(size) if rank != me]
    mine = WaitNotice("", tuple(Need(0, 1, -1, rank, 0) for rank in others), ())
    led: dict[int, Known] = {(me - 1) % size: (2, mine), me: (2, mine)}
    looks = []
    while not looks or looks[-1]:
        probes.pass_on(led, me, [me], cast(ControlConnections, lines))
        looks.append([(rank, message["who"]) for rank, message in lines.sent])
        lines.sent.clear()
    assert max(map(len, looks)) == AT_A_TIME
    told = [pair for look in looks for pair in look]
    assert told[: len(others)] == [(rank, me) for rank in (*others[me:], *others[:me])]
    assert len(told) == len(set(told)) == 2 * len(others) - 1


def test_who_leads_to_a_rank() -> None:
    world = World("abcd")
    standings = {rank: world.standing(rank) for rank in (0, 1, 3)}
    assert leading(1, standings) == {3, 0, 1}
    assert leading(3, standings) == {3}


@pytest.mark.parametrize("notice", ["", "AAAA", "no base64!", "/////w=="])
def test_what_is_no_notice_is_not_heard(notice: str) -> None:
    probes = NoticeExchange()
    probes.hear({"kind": "waits", "who": 1, "version": 2, "notice": notice})
    assert probes.heard == {}


def test_what_comes_by_a_longer_way_does_not_count_if_it_is_older() -> None:
    world = World("ab")
    world.look(0)
    ((rank, message),) = world.lines.sent
    world.deliver()
    later = world.probes[rank].heard[0]
    world.probes[rank].hear(message | {"version": 1, "notice": "AAAAAAAA"})
    assert world.probes[rank].heard[0] is later
