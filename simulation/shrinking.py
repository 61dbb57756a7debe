"""Survivors agree on who goes on, while more of them die, stop, or learn of deaths late.

Laws: all ranks that go on are in the same group; every survivor that kept up is in it; who has been
left out is told; all of that within the patience for each death and a moment. No store is there.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

from nc10d.backend.cpu.algorithms.group_shape import grouped
from nc10d.backend.cpu.membership import formation
from nc10d.backend.cpu.native import offsets as at
from nc10d.base.deadline import Deadline
from nc10d.errors import Aborted, PeerLost, RendezvousError
from nc10d.group import shrink
from simulation.clock import Simulation
from simulation.control_ranks import Company, Member
from simulation.laws import demand, ending, in_time, live, some, typed
from simulation.meeting import Host, Mapping
from simulation.network import Network, Weather

_LONG = 20.0
_PROMPT = 4.0


class Survivor:
    """One rank of the group that shrinks."""

    def __init__(self, member: Member, memory: list[Mapping]) -> None:
        self.member, self.rank = member, member.rank
        self.size = len(memory)
        deaths: Any = SimpleNamespace(memory=memory, known=[member.known] * self.size)
        self.host = Host(deaths, self.rank, self.size)
        self.host.router = SimpleNamespace(unreachable=member.control.lost)

    def go_on(self) -> Any:
        """Shrink; return the new group's name and members."""
        old: Any = SimpleNamespace(
            name="old", store=None, size=self.size, rank=self.rank, successor=self._successor
        )
        council: Any = self.member.council
        new: Any = shrink._made(old, council, self.member.gone, shrink.PATIENCE)
        self.member.close()
        return new.name, tuple(new.members)

    def _successor(self, name: str, members: list[int], store: Any, until: Deadline) -> Any:
        host: Any = self.host
        check = partial(formation.check_alive, host, name, members)
        rank = members.index(self.rank)
        founding = formation.GroupSpec(host, name, members, rank, store, until, check)
        areas = formation.form_again(founding, self.member.council)
        expected = [8 * rank for rank in members]
        demand(areas._offsets == expected, f"areas at {areas._offsets} are not those of {members}")
        self._connect(members)
        return SimpleNamespace(name=name, members=members, close=lambda: None)

    def _connect(self, members: list[int]) -> None:
        """Stand for the links between hosts: who lacks that to a dead rank gives up."""
        sim = self.member.company.sim
        sim.sleep(sim.random.random() * 0.1)
        lost = self.member.gone().intersection(members)
        if lost:
            raise PeerLost(f"ranks {sorted(lost)} are lost while links are made")


def shrinking(sim: Simulation) -> None:
    """A group shrinks."""
    random = sim.random
    net = Network(sim, Weather.any(random))
    size = random.randint(3, 6)
    hosts = sorted(random.choice("ab") for _ in range(size))
    company = Company(sim, net, grouped(hosts))
    memory = [Mapping(2 * at.AREA_LINKS + 4096) for _ in range(size)]
    for member in company.members:
        body = Survivor(member, memory).go_on
        sim.start(f"rank {member.rank}", body, random.random() * 0.2)
    victims = some(random, size, size - 2) or [random.randrange(size)]
    sim.after(0.0, lambda: company.kill(victims[0]))
    for victim in victims[1:]:
        sim.after(random.random() * 0.6, partial(company.kill, victim))
    stopped = random.randrange(size) if random.random() < 0.25 else -1
    if stopped >= 0:
        sim.after(random.random() * 0.3, lambda: company.pause(stopped, _LONG))
    begin = sim.now
    sim.run()
    if stopped < 0:
        slow = 2 if net.weather.lost else 1
        in_time(sim.actors, begin + slow * _PROMPT)
    _judge(sim, stopped)


def _judge(sim: Simulation, stopped: int) -> None:
    typed(sim.actors, Aborted, PeerLost, RendezvousError)
    went_on = {actor.result for actor in live(sim.actors) if actor.result is not None}
    demand(len(went_on) <= 1, f"survivors go on in different groups: {sorted(went_on)}")
    members = next(iter(went_on))[1] if went_on else ()
    for rank, actor in enumerate(sim.actors):
        if actor.dead:
            continue
        if actor.error is None:
            demand(rank in members, f"rank {rank} goes on in a group that it is not in")
        else:
            demand(rank == stopped, f"rank {rank} kept up and is left out: {ending(actor)}")
