"""One cause for all hosts: council and verdict, while ranks die, stop and report at once.

Laws: all live ranks fail with the same cause, one that somebody had, within three seconds (who was
stopped: when it goes on).
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

from nc10d.backend.cpu.algorithms.group_shape import Topology, grouped
from nc10d.backend.cpu.failure import cause
from nc10d.backend.cpu.failure.cause import AgreedCause
from nc10d.backend.cpu.memory.group_memory import GroupMemory
from nc10d.backend.cpu.native import offsets as at
from nc10d.errors import CollectiveTimeout, DistError, PeerLost
from simulation.clock import Signal, Simulation
from simulation.control_ranks import Company, Member
from simulation.laws import demand, ending, in_time, live, same
from simulation.meeting import Mapping
from simulation.network import Network, Weather

_BOUND = 3.0
_AREA = (at.AREA_LINKS + 4096) // 4096 * 4096


class Judge:
    """One rank's part in its group's verdict, and in the memory of its host."""

    def __init__(self, job: Job, member: Member) -> None:
        self.job, self.rank = job, member.rank
        self.failed = Signal()
        ranks = job.hosts.local_ranks(self.rank)
        count, mine = len(ranks), ranks.index(self.rank)
        peers: Any = [job.memory[rank] for rank in ranks]
        self.areas = GroupMemory(peers, mine, [0] * count, 0, list(ranks))
        self._ring = job.ring(ranks)
        self.verdict = AgreedCause(member.council, self.areas, self._ring)
        member.on_loss = lambda number: self.report(job.lost(number))

    def report(self, error: DistError) -> None:
        """Learn a cause."""
        self.job.company.awake(self.rank, partial(self._fail, error))

    def _fail(self, error: DistError) -> None:
        if len(self.job.hosts.hosts) > 1:
            self.verdict.report(error, wait=False)
        else:
            cause.publish(self.areas, error)
            self._ring(self.areas.bits())

    def operate(self) -> str:
        """Be in a collective until the group fails; return the cause."""
        while not cause.known(self.areas):
            self.job.company.sim.wait(self.failed, float("inf"))
        return str(cause.read(self.areas))


class Job:
    """All ranks of a job, and the memory of its hosts."""

    def __init__(self, sim: Simulation, net: Network, hosts: Topology) -> None:
        self.hosts = hosts
        self.memory = [
            SimpleNamespace(mapping=Mapping(_AREA), rank=hosts.places[rank][1])
            for rank in range(hosts.size)
        ]
        self.company = Company(sim, net, hosts)
        self.judges = [Judge(self, member) for member in self.company.members]

    def ring(self, mates: tuple[int, ...]) -> Any:
        """Return the bell of a host: all of its ranks look up."""

        def ring(bits: int) -> None:
            for rank in mates:
                self.judges[rank].failed.notify()

        return ring

    def lost(self, rank: int) -> PeerLost:
        """Return the error that says that a rank is lost."""
        return PeerLost(f"rank {rank} is lost", rank=rank, group="group")


def judging(sim: Simulation) -> None:
    """A group across hosts fails, for one or several reasons at once."""
    random = sim.random
    net = Network(sim, Weather.any(random))
    names = sorted(random.choice("abc") for _ in range(random.randint(3, 6)))
    job = Job(sim, net, grouped(names))
    size, begin, company = job.hosts.size, sim.now, job.company
    for judge in job.judges:
        sim.start(f"rank {judge.rank}", judge.operate)
    victims = random.sample(range(size), random.choice((0, 1, 1, 1, 2, 2, 3)))
    for number, victim in enumerate(victims):
        sim.after(0.01 + number * random.random() * 0.1, partial(company.kill, victim))
    causes_had = {str(job.lost(victim)) for victim in victims}
    if not victims or random.random() < 0.3:
        stopped = random.randrange(size)
        accuser = (stopped + random.randrange(1, size)) % size
        error = CollectiveTimeout(f"rank {accuser} waits for rank {stopped}", rank=stopped)
        causes_had.add(str(error))
        sim.after(0.01 + random.random() * 0.05, partial(job.judges[accuser].report, error))
    if random.random() < 0.3:
        other = random.randrange(size) if victims else stopped
        sim.after(random.random() * 0.03, partial(company.pause, other, 5.0))
    sim.run()
    _judge(job, causes_had)
    in_time([actor for actor in sim.actors if actor.paused_until < begin], begin + _BOUND)


def _judge(job: Job, causes_had: set[str]) -> None:
    actors = job.company.sim.actors
    same(actors)
    for actor in live(actors):
        demand(actor.result in causes_had, f"{actor.name}: a cause from nowhere, {ending(actor)}")
    for rank, judge in enumerate(job.judges):
        if not actors[rank].dead:
            kept = str(cause.read(judge.areas))
            demand(kept == actors[rank].result, f"rank {rank}: another cause later, {kept}")
