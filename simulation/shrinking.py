"""Survivors agree on the next group, while more of them die, stop, or learn of deaths late.

Laws: all ranks that go on are in the same group. Every survivor that kept up is in it. An excluded
rank gets an error. All of that takes at most the patience for each death and a moment. There is no
store.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

from nc10d.backend.cpu.algorithms.group_shape import grouped
from nc10d.backend.cpu.membership import formation
from nc10d.backend.cpu.memory.arena import PAGE
from nc10d.base.deadline import Deadline
from nc10d.errors import Aborted, PeerLost, RendezvousError
from nc10d.group import shrink
from nc10d.store import HashStore
from simulation.clock import Simulation
from simulation.control_ranks import ControlPlane, ControlRank
from simulation.formation import FakeContext, FakeMapping, memory_of
from simulation.laws import ending, live, require, require_by, require_types, sample
from simulation.network import Network, Weather

_PAUSE = 20.0
_BOUND = 4.0


class Survivor:
    """One rank of the shrinking group."""

    def __init__(self, member: ControlRank, memory: list[FakeMapping]) -> None:
        self.member, self.rank = member, member.rank
        self.size = len(memory)
        deaths: Any = SimpleNamespace(memory=memory, known=[member.dead] * self.size)
        self.host = FakeContext(deaths, self.rank, self.size)
        self.host.router = SimpleNamespace(unreachable=member.connections.lost)

    def go_on(self) -> Any:
        """Shrink; return the new group's name and members."""
        old: Any = SimpleNamespace(
            name="old", store=HashStore(), size=self.size, rank=self.rank, successor=self._successor
        )
        control: Any = self.member.control
        new: Any = shrink._shrink(old, control, self.member.gone, shrink.PATIENCE)
        self.member.close()
        return new.name, tuple(new.members)

    def _successor(self, name: str, members: list[int], store: Any, until: Deadline) -> Any:
        host: Any = self.host
        check = partial(formation.check_alive, host, name, members)
        rank = members.index(self.rank)
        spec = formation.GroupSpec(host, name, members, rank, store, until, check)
        areas = formation.form_again(spec, self.member.control)
        owners = [(offset // PAGE - 1) % self.size for offset in areas._offsets]
        require(owners == members, f"areas at {areas._offsets} are not those of {members}")
        self._connect(members)
        return SimpleNamespace(name=name, members=members, close=lambda: None)

    def _connect(self, members: list[int]) -> None:
        """Simulate connecting the hosts; PeerLost if a member is known to be dead."""
        sim = self.member.plane.sim
        sim.sleep(sim.random.random() * 0.1)
        lost = self.member.gone().intersection(members)
        if lost:
            raise PeerLost(f"ranks {sorted(lost)} are lost while links are made")


def shrink_survivors(sim: Simulation) -> None:
    """Let a group shrink while further ranks die or stop."""
    random = sim.random
    net = Network(sim, Weather.any(random))
    size = random.randint(3, 6)
    hosts = sorted(random.choice("ab") for _ in range(size))
    plane = ControlPlane(sim, net, grouped(hosts))
    memory = memory_of(size)
    for member in plane.ranks:
        body = Survivor(member, memory).go_on
        sim.start(f"rank {member.rank}", body, random.random() * 0.2)
    victims = sample(random, size, size - 2) or [random.randrange(size)]
    sim.after(0.0, lambda: plane.kill(victims[0]))
    for victim in victims[1:]:
        sim.after(random.random() * 0.6, partial(plane.kill, victim))
    stopped = random.randrange(size) if random.random() < 0.25 else -1
    if stopped >= 0:
        sim.after(random.random() * 0.3, lambda: plane.pause(stopped, _PAUSE))
    sim.run()
    if stopped < 0:
        slow = 2 if net.weather.lost else 1
        require_by(sim.actors, slow * _BOUND)
    _check_survivors(sim, stopped)


def _check_survivors(sim: Simulation, stopped: int) -> None:
    require_types(sim.actors, Aborted, PeerLost, RendezvousError)
    groups = {actor.result for actor in live(sim.actors) if actor.result is not None}
    require(len(groups) <= 1, f"survivors go on in different groups: {sorted(groups)}")
    members = next(iter(groups))[1] if groups else ()
    for rank, actor in enumerate(sim.actors):
        if actor.dead:
            continue
        if actor.error is None:
            require(rank in members, f"rank {rank} goes on in a group that it is not in")
        else:
            require(rank == stopped, f"rank {rank} kept up and is left out: {ending(actor)}")
