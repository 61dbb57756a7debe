"""Rendezvous and group formation, with ranks that are late, absent, killed, replaced or stopped.

Laws: either all ranks get in, or all live ranks raise the same error. The error names the rank at
fault and comes within the deadline and a moment.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from nc10d.backend.cpu.membership import formation
from nc10d.backend.cpu.memory.arena import PAGE
from nc10d.backend.cpu.memory.group_memory import area_bytes
from nc10d.base.deadline import Deadline
from nc10d.errors import PeerLost, RendezvousError, StoreError
from nc10d.init_methods.meeting import meet
from nc10d.store.base import Store
from nc10d.store.prefix import PrefixStore
from simulation.clock import Actor, Simulation
from simulation.laws import ending, live, require, require_by, require_same, require_types
from simulation.network import Network, Weather
from simulation.stores import Site, VirtualStore

_LIMIT = 3.0
_MOMENT = 1.0


class HostFailures:
    """The dead ranks, and for each rank the failures that the kernel has reported to it."""

    def __init__(self, sim: Simulation, net: Network, size: int) -> None:
        self.sim, self.net = sim, net
        self.actors: list[Actor] = []
        self.memory = memory_of(size)
        self.known: list[set[int]] = [set() for _ in range(size)]

    def kill(self, rank: int) -> None:
        """Kill a rank; the kernel reports it to the other ranks within 50 ms."""
        actor = self.actors[rank]
        if actor.done:
            return
        self.sim.note(f"{actor.name} is killed")
        actor.kill()
        self.net.close_all_of(f"rank {rank}")
        for known in self.known:
            self.sim.after(self.sim.random.random() * 0.05, partial(known.add, rank))

    def pause(self, rank: int, seconds: float) -> None:
        """Stop a rank for `seconds`."""
        self.sim.note(f"rank {rank} stops for {seconds:g} s")
        self.actors[rank].pause(seconds)


class FakeMapping:
    """A rank's shared memory."""

    def __init__(self, nbytes: int) -> None:
        self.data = np.zeros(nbytes, np.uint8)
        self.base = int(self.data.ctypes.data)

    def words(self, offset: int, count: int) -> Any:
        """Return `count` words from `offset` in bytes."""
        return self.data[offset : offset + 8 * count].view(np.int64)


def memory_of(size: int) -> list[FakeMapping]:
    """Return the memory of `size` ranks, each with room for the areas of all attempts."""
    nbytes = (size + 1) ** 2 * PAGE + area_bytes(size, formation.LARGE_SLOT)
    return [FakeMapping(nbytes) for _ in range(size)]


class FakeArena:
    """An allocator that counts; the simulation touches only the first bytes of an area."""

    def __init__(self, mapping: FakeMapping) -> None:
        self.mapping = mapping
        self.given = 0
        self.freed: list[int] = []

    def free(self, offset: int) -> None:
        """Take memory back."""
        self.freed.append(offset)


class FakeContext:
    """The part of a rank's context that forms groups."""

    def __init__(self, failures: HostFailures, rank: int, size: int) -> None:
        self._failures, self._rank = failures, rank
        self.live_groups: dict[str, object] = {}
        self.arena = FakeArena(failures.memory[rank])
        self.peers = [
            SimpleNamespace(mapping=failures.memory[number], rank=number, number=number)
            for number in range(size)
        ]
        self.near = {number: number for number in range(size)}
        self.number = rank
        self.router = SimpleNamespace(unreachable=lambda number: None)
        self.infos = [SimpleNamespace(pid=number, host="host") for number in range(size)]

    def allocate(self, nbytes: int) -> int:
        """Return an area's offset: another offset each time and on each rank; a mix-up shows."""
        number = self._rank + len(self.near) * self.arena.given
        self.arena.given += 1
        return PAGE * (number + 1)

    def abandon(self, offsets: object, left_word: int, members: int) -> None:
        """Do nothing: the product keeps memory until all members have left."""

    def access(self, members: object) -> int:
        """Return 0: this rank cannot access its peers' memory."""
        return 0

    def lost(self, members: Any) -> Any:
        """Return a member that is known to be dead, or None."""
        dead = self._failures.known[self._rank]
        for number in members:
            if number in dead:
                return SimpleNamespace(number=number, pidfd=-1, pid=number, host="host")
        return None


def rendezvous(sim: Simulation) -> None:
    """Let the ranks of a job meet in a store, perhaps where an earlier job has died."""
    random = sim.random
    net = Network(sim, Weather.any(random))
    site, size = Site(net), random.randint(2, 5)
    failures = HostFailures(sim, net, size)
    trouble = random.choice(("none", "absent", "twice", "size", "killed", "edge", "store", "dead"))
    victim = random.randrange(size)
    # Ranks that find marks of the dead call them, and wait for answers.
    limit = 3 * _LIMIT if trouble == "dead" else _LIMIT

    def come(rank: int, of: int) -> str:
        store = VirtualStore(site, f"rank {rank}", 10.0)
        return f"met in {meet(store, rank, of, Deadline.after(limit), limit)}"

    begin = _let_an_earlier_job_die(sim, come) if trouble == "dead" else 0.0
    for rank in range(size):
        if trouble == "absent" and rank == victim:
            continue
        of = size + 1 if trouble == "size" and rank == victim else size
        delay = begin + random.random() * 0.5
        if trouble == "edge" and rank == victim:
            delay = _LIMIT + random.uniform(-0.05, 0.6)
        failures.actors.append(sim.start(f"rank {rank}", partial(come, rank, of), delay))
    if trouble == "twice":
        sim.start(f"another rank {victim}", lambda: come(victim, size), random.random())
    if trouble == "store":
        site.fail(random.random() * 0.6)
    if trouble == "killed":
        actor = failures.actors[victim]
        sim.after(random.random() * 0.6, lambda: None if actor.done else failures.kill(victim))
    sim.run()
    _check_meeting(sim, failures.actors, trouble, victim)


def _let_an_earlier_job_die(sim: Simulation, come: Callable[[int, int], str]) -> float:
    """Start ranks of another job and kill them all, at any point; return when they are dead."""
    size = sim.random.randint(2, 5)
    for rank in range(sim.random.randint(1, size)):
        actor = sim.start(f"dead rank {rank}", partial(come, rank, size), sim.random.random() * 0.5)
        sim.after(sim.random.random() * 0.6, actor.kill)
    return 0.6


def _check_meeting(sim: Simulation, actors: list[Actor], trouble: str, victim: int) -> None:
    if trouble == "store":
        require_types(sim.actors, RendezvousError, StoreError)
        return
    require_types(sim.actors, RendezvousError)
    # A rank asks the store for the missing ranks at the deadline, perhaps for a report just before.
    late = {"edge": _LIMIT, "dead": 3 * _LIMIT, "twice": _MOMENT}.get(trouble, 0.0)
    require_by(sim.actors, late + _LIMIT + 3 * _MOMENT)
    if trouble in ("none", "dead"):
        require(all("met in" in ending(actor) for actor in actors), "ranks that came do not meet")
        require_same(actors)
    elif trouble == "twice":
        errors = [ending(actor) for actor in sim.actors if actor.error is not None]
        require(len(errors) in (1, len(sim.actors)), f"a rank came twice: {errors}")
        words = ("come twice", "missing:", "gave up", "did not answer", "ranks came")
        require(all(any(text in error for text in words) for error in errors), f"{errors}")
    elif trouble == "size":
        errors = [ending(actor) for actor in actors]
        told = sum("don't agree on their number" in error for error in errors)
        require(told >= 2, f"sizes differ unnoticed: {errors}")
        # A rank that comes when the dispute is over waits for others: it may be of the next job.
        require(told + sum("missing:" in error for error in errors) == len(errors), f"{errors}")
    elif trouble == "absent":
        named = f"missing: {victim} "
        require(all(named in ending(actor) for actor in actors), f"not named: {ending(actors[0])}")
    else:
        met = ["met in" in ending(actor) for actor in live(actors)]
        require(all(met) or not any(met), "some have met and some have not")


def form(
    host: FakeContext, name: str, members: list[int], rank: int, store: Store, limit: float
) -> Any:
    """Form a group with the product's code; return the offsets of its members' areas."""
    spec = formation.GroupSpec(
        host,  # type: ignore[arg-type]
        name,
        members,
        rank,
        store,
        Deadline.after(limit),
        lambda: formation.check_alive(host, name, members),  # type: ignore[arg-type]
    )
    return formation.form(spec)._offsets


def group_formation(sim: Simulation) -> None:
    """Form a group on all of its ranks or on none."""
    random = sim.random
    net = Network(sim, Weather.any(random))
    site, size = Site(net), random.randint(2, 5)
    failures = HostFailures(sim, net, size)
    trouble = random.choice(("none", "absent", "killed", "killed", "edge", "paused", "store"))
    victim = random.randrange(size)
    members = list(range(size))

    def join(rank: int) -> str:
        host = FakeContext(failures, rank, size)
        store = PrefixStore("job", VirtualStore(site, f"rank {rank}", 10.0))
        offsets = form(host, "group", members, rank, store, _LIMIT)
        return f"areas at {offsets}"

    for rank in members:
        late = random.random() * 0.3
        if rank == victim and trouble == "absent":
            late = 60.0
        if rank == victim and trouble == "edge":
            late = _LIMIT + random.uniform(-0.05, 0.3)
        failures.actors.append(sim.start(f"rank {rank}", partial(join, rank), late))
    if trouble == "store":
        site.fail(random.random() * 0.4)
        sim.end += 20.0
    if trouble == "killed":
        sim.after(random.random() * 0.4, lambda: failures.kill(victim))
    if trouble == "absent":
        sim.after(0.0, lambda: failures.kill(victim) if random.random() < 0.5 else None)
        sim.after(59.0, lambda: failures.actors[victim].kill())
        sim.end += 60.0
    if trouble == "paused":
        sim.after(random.random() * 0.4, lambda: failures.pause(victim, 5.0))
    sim.run()
    _check_group(failures.actors, trouble, victim)


def _check_group(actors: list[Actor], trouble: str, victim: int) -> None:
    if trouble == "store":
        require_types(actors, RendezvousError, StoreError)
        return
    require_types(actors, PeerLost, RendezvousError)
    require_same(actors)
    prompt = [actor for actor in actors if not actor.paused_until]
    require_by(prompt, 2 * _LIMIT + _MOMENT)
    first = ending(live(actors)[0])
    if trouble == "none":
        require_by(actors, 2 * _MOMENT)
        expected = f"areas at {[PAGE * (rank + 1) for rank in range(len(actors))]}"
        require(actors[0].result == expected, f"a group is not formed right: {first}")
    elif trouble == "killed" and "returned" not in first:
        require("PeerLost" in first, f"a rank was killed, and the others say {first}")
        require_by(actors, 0.5 + 2 * _MOMENT)
    if trouble in ("absent", "killed") and "returned" not in first:
        require(f"rank {victim}" in first, f"{first} does not name rank {victim}")
