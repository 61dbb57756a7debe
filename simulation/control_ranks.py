"""Ranks of one or several hosts with the product's control lines and councils, in virtual time.

What a host's control thread does (hear what has come, then look whether anybody is overdue) happens
between the steps of the rank itself, and not while the rank is stopped. A death is known in two
ways, each in its own time: lines end behind what was sent on them, and the kernel tells host mates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from nc10d.backend.cpu.algorithms.group_shape import Topology
from nc10d.backend.cpu.control.connections import ControlConnections, Message
from nc10d.backend.cpu.control.group_control import GroupControl
from simulation.clock import Simulation
from simulation.network import End, Network, Weather

_TOLD = 0.02
_SOON = 1e-6


class Poller:
    """Where a rank's control thread registers its lines."""

    def modify(self, fd: int, events: int) -> None:
        """Wait for other events."""

    def unregister(self, fd: int) -> None:
        """Wait no more."""


class Member:
    """One rank: its lines and its council."""

    def __init__(self, company: Company, rank: int) -> None:
        self.company, self.rank = company, rank
        self.wires: dict[int, Any] = {}
        self.known: set[int] = set()
        self.closed = False
        self._minding = math.inf
        self.on_loss: Callable[[int], None] = lambda number: None
        self.control: ControlConnections
        self.council: GroupControl

    def open(self) -> None:
        """Make the product's objects; all wires are there."""
        self.control = ControlConnections(self.wires, self._on_message, self._on_end, self.mind)
        members = list(range(self.company.hosts.size))
        self.council = GroupControl("group", members, self.rank, self.control, self.gone)
        for number, wire in self.wires.items():
            end: End = wire
            end.on_event = partial(self.company.sim.after, _SOON, partial(self._attend, number))

    def gone(self) -> set[int]:
        """Return who is known to have died, to have left, or not to be reached any more."""
        mates = [self.company.members[mate] for mate in self.company.hosts.local_ranks(self.rank)]
        left = {mate.rank for mate in mates if mate.closed} | self.council.left
        return self.known | left | {n for n in self.wires if self.control.lost(n) is not None}

    def close(self) -> None:
        """Leave the group: nothing about it is heard any more."""
        self.council.leave(self.company.hosts.remote_ranks(self.rank))
        self.closed = True

    def mind(self, delay: float = _SOON) -> None:
        """Look soon whether anybody is overdue, and again when it is time."""
        due = self.company.sim.now + delay
        if due < self._minding:
            self._minding = due
            self.company.sim.after(delay, partial(self._mind, due))

    def _mind(self, due: float) -> None:
        if due != self._minding:  # it is looked at earlier
            return
        self._minding = math.inf
        actor = self.company.sim.actors[self.rank]
        late = actor.paused_until - self.company.sim.now
        if late > 0:  # what has come meanwhile is heard before
            self.mind(late + 3 * _SOON)
        elif not actor.dead and not self.closed:
            left = self.council.overdue()
            if left is not None:
                self.mind(left)

    def _attend(self, number: int) -> None:
        actor, end = self.company.sim.actors[self.rank], self.wires[number]
        late = actor.paused_until - self.company.sim.now
        if actor.dead or end.fileno() < 0 or self.control.lines[number].over is not None:
            return
        if late > 0:
            self.company.sim.after(late + _SOON, partial(self._attend, number))
        else:
            self.control.ready(end.fileno(), Poller())  # type: ignore[arg-type]
            self.mind()

    def _on_message(self, number: int, message: Message) -> None:
        if not self.closed:
            said = [str(message[k]) for k in ("topic", "step", "value") if k in message]
            self.company.sim.note(f"rank {self.rank} hears rank {number}: {' '.join(said)[:120]}")
            self.council.hear(number, message["kind"], message)

    def _on_end(self, number: int, reason: str) -> None:
        del reason
        self.council.notify()
        if number not in self.council.left and number in self.company.hosts.remote_ranks(self.rank):
            self.on_loss(number)

    def learn(self, number: int) -> None:
        """Hear from the kernel that a host mate is dead."""
        self.known.add(number)
        self.council.notify()
        if not self.closed:
            self.on_loss(number)


class Company:
    """All ranks of a job, and what happens to them."""

    def __init__(self, sim: Simulation, net: Network, hosts: Topology) -> None:
        self.sim, self.hosts = sim, hosts
        # Inside a host there is no weather: what is sent on a Unix socket is there.
        near = Network(sim, Weather(delay=_SOON), first=10_000)
        self.nets = (near, net)
        self.members = [Member(self, rank) for rank in range(hosts.size)]
        for rank, member in enumerate(self.members):
            for other in range(rank + 1, hosts.size):
                between = near if other in hosts.local_ranks(rank) else net
                a, b = between.stream(f"rank {rank}", f"rank {other}")
                member.wires[other], self.members[other].wires[rank] = a, b
        for member in self.members:
            member.open()

    def kill(self, rank: int) -> None:
        """Kill a rank: the kernel tells its host mates, its lines end."""
        actor = self.sim.actors[rank]
        if actor.dead:
            return
        self.sim.note(f"rank {rank} is killed")
        if actor.done:
            actor.dead = True
        else:
            actor.kill()
        for net in self.nets:
            net.close_all_of(f"rank {rank}")
        for mate in self.hosts.local_ranks(rank):
            if mate != rank:
                self.sim.after(self.sim.random.random() * _TOLD, partial(self._tell, mate, rank))

    def pause(self, rank: int, seconds: float) -> None:
        """Stop a rank for a while."""
        self.sim.note(f"rank {rank} stops for {seconds:g} s")
        self.sim.actors[rank].paused_until = self.sim.now + seconds

    def awake(self, rank: int, act: Callable[[], None]) -> None:
        """Have a rank do something as soon as it is not stopped, if it lives."""
        actor = self.sim.actors[rank]
        late = actor.paused_until - self.sim.now
        if late > 0:
            self.sim.after(late, partial(self.awake, rank, act))
        elif not actor.dead:
            act()

    def _tell(self, mate: int, victim: int) -> None:
        self.awake(mate, partial(self.members[mate].learn, victim))
