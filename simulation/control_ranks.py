"""Ranks of several hosts with the product's control connections and group control, in virtual time.

A host's control thread handles messages and then checks for overdue ranks. Here it runs between the
steps of its rank, and not while the rank is stopped. A rank learns of a death in two ways, each
with its own delay: a control connection ends, and the kernel notifies the peers of the host.
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

_NOTICE_SECONDS = 0.02
_SOON = 1e-6


class FakePoller:
    """A poller without sockets: the simulation calls the control thread itself."""

    def modify(self, fd: int, events: int) -> None:
        """Do nothing."""

    def unregister(self, fd: int) -> None:
        """Do nothing."""


class ControlRank:
    """One rank: its control connections and its group control."""

    def __init__(self, plane: ControlPlane, rank: int) -> None:
        self.plane, self.rank = plane, rank
        self.ends: dict[int, Any] = {}
        self.dead: set[int] = set()
        self.closed = False
        self._next_check = math.inf
        self.on_loss: Callable[[int], None] = lambda number: None
        self.connections: ControlConnections
        self.control: GroupControl

    def open(self) -> None:
        """Make the product's objects; all streams exist already."""
        self.connections = ControlConnections(
            self.ends, self._on_message, self._on_end, self.check_overdue
        )
        members = list(range(self.plane.hosts.size))
        self.control = GroupControl("group", members, self.rank, self.connections, self.gone)
        for number, stream in self.ends.items():
            end: End = stream
            end.on_event = partial(self.plane.sim.after, _SOON, partial(self._on_event, number))

    def gone(self) -> set[int]:
        """Return the ranks known to be dead, departed or unreachable."""
        peers = [self.plane.ranks[peer] for peer in self.plane.hosts.local_ranks(self.rank)]
        left = {peer.rank for peer in peers if peer.closed} | self.control.left.keys()
        return self.dead | left | {n for n in self.ends if self.connections.lost(n) is not None}

    def close(self) -> None:
        """Leave the group, and ignore its later messages."""
        self.control.leave(self.plane.hosts.remote_ranks(self.rank))
        self.closed = True

    def check_overdue(self, delay: float = _SOON) -> None:
        """Check for overdue ranks after `delay`, and again when the group control asks for it."""
        due = self.plane.sim.now + delay
        if due < self._next_check:
            self._next_check = due
            self.plane.sim.after(delay, partial(self._check, due))

    def _check(self, due: float) -> None:
        if due != self._next_check:  # an earlier check has been scheduled
            return
        self._next_check = math.inf
        actor = self.plane.sim.actors[self.rank]
        late = actor.paused_until - self.plane.sim.now
        if late > 0:  # messages that have come meanwhile are handled first
            self.check_overdue(late + 3 * _SOON)
        elif not actor.dead and not self.closed:
            left = self.control.overdue()
            if left is not None:
                self.check_overdue(left)

    def _on_event(self, number: int) -> None:
        actor, end = self.plane.sim.actors[self.rank], self.ends[number]
        late = actor.paused_until - self.plane.sim.now
        if actor.dead or end.fileno() < 0 or self.connections.connections[number].ended is not None:
            return
        if late > 0:
            self.plane.sim.after(late + _SOON, partial(self._on_event, number))
        else:
            self.connections.ready(end.fileno(), FakePoller())  # type: ignore[arg-type]
            self.check_overdue()

    def _on_message(self, number: int, message: Message) -> None:
        if not self.closed:
            text = [str(message[k]) for k in ("topic", "step", "value") if k in message]
            self.plane.sim.note(
                f"rank {self.rank} handles a message of rank {number}: {' '.join(text)[:120]}"
            )
            self.control.on_message(number, message["kind"], message)

    def _on_end(self, number: int, reason: str) -> None:
        del reason
        self.control.notify()
        if number not in self.control.left and number in self.plane.hosts.remote_ranks(self.rank):
            self.on_loss(number)

    def on_death(self, number: int) -> None:
        """Take the kernel's notice that a peer of this host is dead."""
        self.dead.add(number)
        self.control.notify()
        if not self.closed:
            self.on_loss(number)


class ControlPlane:
    """All ranks of a job, their networks and their failures."""

    def __init__(self, sim: Simulation, net: Network, hosts: Topology) -> None:
        self.sim, self.hosts = sim, hosts
        # Inside a host there is no weather: data sent on a Unix socket arrives at once.
        near = Network(sim, Weather(delay=_SOON), first=10_000)
        self.nets = (near, net)
        self.ranks = [ControlRank(self, rank) for rank in range(hosts.size)]
        for rank, member in enumerate(self.ranks):
            for other in range(rank + 1, hosts.size):
                between = near if other in hosts.local_ranks(rank) else net
                a, b = between.stream(f"rank {rank}", f"rank {other}")
                member.ends[other], self.ranks[other].ends[rank] = a, b
        for member in self.ranks:
            member.open()

    def kill(self, rank: int) -> None:
        """Kill a rank: its connections end, and the kernel notifies the peers of its host."""
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
        for peer in self.hosts.local_ranks(rank):
            if peer != rank:
                self.sim.after(
                    self.sim.random.random() * _NOTICE_SECONDS, partial(self._notify, peer, rank)
                )

    def pause(self, rank: int, seconds: float) -> None:
        """Stop a rank for `seconds`."""
        self.sim.note(f"rank {rank} stops for {seconds:g} s")
        self.sim.actors[rank].pause(seconds)

    def when_running(self, rank: int, act: Callable[[], None]) -> None:
        """Call `act` as soon as a rank is not stopped, if it lives."""
        actor = self.sim.actors[rank]
        late = actor.paused_until - self.sim.now
        if late > 0:
            self.sim.after(late, partial(self.when_running, rank, act))
        elif not actor.dead:
            act()

    def _notify(self, peer: int, victim: int) -> None:
        self.when_running(peer, partial(self.ranks[peer].on_death, victim))
