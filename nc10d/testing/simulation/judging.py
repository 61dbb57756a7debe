"""One cause for all hosts: control lines and council, while ranks die and report at once.

Laws: all live ranks fail with the same cause, one that somebody had, within three seconds. If a
second rank dies meanwhile, that holds for the ranks of each host; the hosts may differ.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

from nc10d.backend.cpu import causes
from nc10d.backend.cpu.algorithms.topology import Topology, grouped
from nc10d.backend.cpu.area import Areas
from nc10d.backend.cpu.control import Control, Message
from nc10d.backend.cpu.council import Council
from nc10d.backend.cpu.native import layout as at
from nc10d.errors import CollectiveTimeout, DistError, PeerLost
from nc10d.testing.simulation.clock import Signal, Simulation
from nc10d.testing.simulation.laws import demand, ending, in_time, live, same
from nc10d.testing.simulation.meeting import Mapping
from nc10d.testing.simulation.network import End, Network, Weather

_BOUND = 3.0
_AREA = (at.AREA_LINKS + 4096) // 4096 * 4096


class Poller:
    """Where a rank's control thread registers its lines."""

    def modify(self, fd: int, events: int) -> None:
        """Wait for other events."""

    def unregister(self, fd: int) -> None:
        """Wait no more."""


class Member:
    """One rank: its lines, its council, its part of the memory of its host."""

    def __init__(self, job: Job, rank: int) -> None:
        self.job, self.rank = job, rank
        self.failed = Signal()
        self.wires: dict[int, Any] = {}
        self.control: Control
        self.council: Council

    def open(self) -> None:
        """Make the product's objects; all wires are there."""
        job, rank = self.job, self.rank
        mates = job.hosts.mates(rank)
        host: Any = SimpleNamespace(mates=[job.memory[r] for r in mates], ring=job.ring(mates))
        numbers = list(mates)
        self.areas = Areas(
            host, list(range(len(mates))), mates.index(rank), [0] * len(mates), 0, numbers
        )
        self.control = Control(self.wires, self._on_message, self._on_end)
        members = list(range(job.hosts.size))
        self.council = Council("group", members, job.hosts, self.areas, self.control)
        for wire in self.wires.values():
            end: End = wire
            end.on_event = partial(job.sim.after, 1e-6, partial(self._attend, end))

    def _attend(self, end: End) -> None:
        actor = self.job.sim.actors[self.rank]
        late = actor.paused_until - self.job.sim.now
        line = self.control.lines[next(n for n, wire in self.wires.items() if wire is end)]
        if actor.dead or end.fileno() < 0 or line.over is not None:
            return
        if late > 0:
            self.job.sim.after(late, lambda: self._attend(end))
        else:
            self.control.ready(end.fileno(), Poller())  # type: ignore[arg-type]

    def _on_message(self, number: int, message: Message) -> None:
        sim = self.job.sim
        sim.note(f"rank {self.rank} hears from rank {number}: {message['kind']}")
        self.council.hear(message["kind"], message)
        self._mind()

    def _on_end(self, number: int, reason: str) -> None:
        self.council.notify()
        if number not in self.council.left:
            self.council.report(self.job.lost(number), wait=False)
        self._mind()

    def _mind(self) -> None:
        """Come back when a decision is overdue, as the control thread does."""
        if self.job.sim.actors[self.rank].dead:
            return
        left = self.council.overdue()
        if left is not None:
            self.job.sim.after(left + 1e-6, self._mind)

    def operate(self) -> str:
        """Be in a collective until the group fails; return the cause."""
        sim = self.job.sim
        while not causes.known(self.areas):
            sim.wait(self.failed, float("inf"))
        self.council.tell()
        error = causes.read(self.areas)
        return str(error)


class Job:
    """All ranks of a job, and the memory of its hosts."""

    def __init__(self, sim: Simulation, net: Network, hosts: Topology) -> None:
        self.sim, self.net, self.hosts = sim, net, hosts
        self.memory = [SimpleNamespace(mapping=Mapping(_AREA)) for _ in range(hosts.size)]
        self.members = [Member(self, rank) for rank in range(hosts.size)]
        for member in self.members:
            for other in hosts.away(member.rank):
                if other > member.rank:
                    a, b = net.stream(f"rank {member.rank}", f"rank {other}")
                    member.wires[other], self.members[other].wires[member.rank] = a, b
        for member in self.members:
            member.open()

    def ring(self, mates: tuple[int, ...]) -> Any:
        """Return the bell of a host: all of its ranks look up."""

        def ring(bits: int) -> None:
            for rank in mates:
                self.members[rank].failed.notify()

        return ring

    def lost(self, rank: int) -> PeerLost:
        """Return the error that says that a rank is lost."""
        return PeerLost(f"rank {rank} is lost", rank=rank, group="group")

    def kill(self, rank: int) -> None:
        """Kill a rank: the kernel tells its host mates, its lines end."""
        actor = self.sim.actors[rank]
        if actor.dead:
            return
        self.sim.note(f"rank {rank} is killed")
        actor.dead = True
        if not actor.done:
            actor.kill()
        self.net.close_all_of(f"rank {rank}")
        for mate in self.hosts.mates(rank):
            if mate != rank:
                self.sim.after(self.sim.random.random() * 0.02, partial(self._tell, mate, rank))

    def pause(self, rank: int, seconds: float) -> None:
        """Stop a rank for a while."""
        self.sim.note(f"rank {rank} stops for {seconds:g} s")
        self.sim.actors[rank].paused_until = self.sim.now + seconds

    def _tell(self, mate: int, victim: int) -> None:
        self.report(mate, self.lost(victim))

    def report(self, rank: int, error: DistError) -> None:
        """Have a rank report a cause, if it lives, as soon as it is not stopped."""
        actor = self.sim.actors[rank]
        late = actor.paused_until - self.sim.now
        if actor.dead:
            return
        if late > 0:
            self.sim.after(late, partial(self.report, rank, error))
            return
        self.members[rank].council.report(error, wait=False)
        self.members[rank]._mind()


def judging(sim: Simulation) -> None:
    """A group across hosts fails, for one or several reasons at once."""
    random = sim.random
    net = Network(sim, Weather.any(random))
    names = sorted(random.choice("abc") for _ in range(random.randint(3, 6)))
    job = Job(sim, net, grouped(names))
    size, begin = job.hosts.size, sim.now
    for rank, member in enumerate(job.members):
        sim.start(f"rank {rank}", member.operate)
    victims = [random.randrange(size)]
    sim.after(0.01, partial(job.kill, victims[0]))
    causes_had = {str(job.lost(victims[0]))}
    trouble = random.choice(("none", "second", "late", "stopped"))
    other = random.randrange(size)
    if trouble == "second":
        victims.append(other)
        causes_had.add(str(job.lost(other)))
        sim.after(0.01 + random.random() * 0.1, partial(job.kill, other))
    elif trouble == "late":
        error = CollectiveTimeout(f"rank {other} waits too long", rank=other)
        causes_had.add(str(error))
        sim.after(0.01 + random.random() * 0.05, partial(job.report, other, error))
    elif trouble == "stopped":
        sim.after(random.random() * 0.03, partial(job.pause, other, 5.0))
    sim.run()
    _judge(job, len(victims) == 1, causes_had)
    in_time([actor for actor in sim.actors if actor.paused_until < begin], begin + _BOUND)


def _judge(job: Job, alone: bool, causes_had: set[str]) -> None:
    actors = job.sim.actors
    if alone:
        same(actors)
    for mates in job.hosts.hosts:
        # A judge that dies while it tells its verdict may have told it to some hosts only.
        same([actors[rank] for rank in mates])
    for actor in live(actors):
        demand(actor.result in causes_had, f"{actor.name}: a cause from nowhere, {ending(actor)}")
    for rank, member in enumerate(job.members):
        if not actors[rank].dead:
            kept = str(causes.read(member.areas))
            demand(kept == actors[rank].result, f"rank {rank}: another cause later, {kept}")
