"""One cause for all hosts: ranks report, die and stop at once, and all agree on a failure cause.

Laws: all live ranks fail with the same cause, and it is a cause that a rank reported. They fail
within three seconds; a stopped rank fails when it goes on.
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
from nc10d.testing.simulated.virtual_time import RankTask
from simulation.clock import Simulation
from simulation.control_ranks import ControlPlane, ControlRank
from simulation.formation import FakeMapping
from simulation.laws import ending, live, require, require_by, require_same
from simulation.network import Network, Weather

_BOUND = 3.0
_AREA = (at.AREA_LINKS + 4096) // 4096 * 4096


class FailingRank:
    """One rank's part in the agreement on a cause, and in the memory of its host."""

    def __init__(self, job: Job, member: ControlRank) -> None:
        self.job, self.rank = job, member.rank
        self.failed: list[RankTask] = []
        ranks = job.hosts.local_ranks(self.rank)
        count, position = len(ranks), ranks.index(self.rank)
        peers: Any = [job.memory[rank] for rank in ranks]
        self.areas = GroupMemory(peers, position, [0] * count, 0, list(ranks))
        self._ring = job.ring(ranks)
        self.agreed = AgreedCause(member.control, self.areas, self._ring)
        member.on_loss = lambda number: self.report(job.lost(number))

    def report(self, error: DistError) -> None:
        """Report a cause, as soon as the rank runs."""
        self.job.plane.when_running(self.rank, partial(self._fail, error))

    def _fail(self, error: DistError) -> None:
        if len(self.job.hosts.hosts) > 1:
            self.agreed.report(error, wait=False)
        else:
            cause.publish(self.areas, error)
            self._ring(self.areas.bits())

    def operate(self) -> str:
        """Block, as in a collective, until the group fails; return the cause."""
        failed = partial(cause.has_failed, self.areas)
        self.job.plane.sim.wait(failed, float("inf"), self.failed)
        return str(cause.read(self.areas))


class Job:
    """All ranks of a job, and the memory of its hosts."""

    def __init__(self, sim: Simulation, net: Network, hosts: Topology) -> None:
        self.hosts = hosts
        self.memory = [
            SimpleNamespace(mapping=FakeMapping(_AREA), rank=hosts.places[rank][1])
            for rank in range(hosts.size)
        ]
        self.plane = ControlPlane(sim, net, hosts)
        self.ranks = [FailingRank(self, member) for member in self.plane.ranks]

    def ring(self, peers: tuple[int, ...]) -> Any:
        """Return the doorbell of a host: it wakes all of its ranks."""

        def ring(bits: int) -> None:
            for rank in peers:
                self.plane.sim.notify(self.ranks[rank].failed)

        return ring

    def lost(self, rank: int) -> PeerLost:
        """Return the error of a lost rank."""
        return PeerLost(f"rank {rank} is lost", rank=rank, group="group")


def one_cause(sim: Simulation) -> None:
    """Let a group across hosts fail, for a single reason or several at once."""
    random = sim.random
    net = Network(sim, Weather.any(random))
    names = sorted(random.choice("abc") for _ in range(random.randint(3, 6)))
    job = Job(sim, net, grouped(names))
    size, plane = job.hosts.size, job.plane
    for member in job.ranks:
        sim.start(f"rank {member.rank}", member.operate)
    victims = random.sample(range(size), random.choice((0, 1, 1, 1, 2, 2, 3)))
    for number, victim in enumerate(victims):
        sim.after(0.01 + number * random.random() * 0.1, partial(plane.kill, victim))
    reported = {str(job.lost(victim)) for victim in victims}
    if not victims or random.random() < 0.3:
        stopped = random.randrange(size)
        accuser = (stopped + random.randrange(1, size)) % size
        error = CollectiveTimeout(f"rank {accuser} waits for rank {stopped}", rank=stopped)
        reported.add(str(error))
        sim.after(0.01 + random.random() * 0.05, partial(job.ranks[accuser].report, error))
    if random.random() < 0.3:
        other = random.randrange(size) if victims else stopped
        sim.after(random.random() * 0.03, partial(plane.pause, other, 5.0))
    sim.run()
    _check_causes(job, reported)
    require_by([actor for actor in sim.actors if not actor.paused_until], _BOUND)


def _check_causes(job: Job, reported: set[str]) -> None:
    actors = job.plane.sim.actors
    require_same(actors)
    for actor in live(actors):
        require(actor.result in reported, f"{actor.name}: a cause from nowhere, {ending(actor)}")
    for rank, member in enumerate(job.ranks):
        if not actors[rank].dead:
            later = str(cause.read(member.areas))
            require(later == actors[rank].result, f"rank {rank}: another cause later, {later}")
