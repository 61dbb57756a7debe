"""How ranks meet and groups form, with ranks that are late, absent, killed, stopped or mistaken.

Laws: either all ranks are in, or all live ones raise the same error, which names who is to blame,
within the deadline and a moment.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from nc10d.backend.cpu.membership import formation
from nc10d.backend.cpu.native import offsets as at
from nc10d.base.deadline import Deadline
from nc10d.errors import PeerLost, RendezvousError, StoreError
from nc10d.rendezvous.methods import _wait_for_ranks
from nc10d.store.base import Store
from nc10d.store.prefix import PrefixStore
from simulation.clock import Actor, Simulation
from simulation.laws import demand, ending, in_time, live, same, typed
from simulation.network import Network, Weather
from simulation.stores import Site, VirtualStore

_LIMIT = 3.0
_MOMENT = 1.0


class Deaths:
    """Who is dead, and who of the others knows it: the kernel tells each in its own time."""

    def __init__(self, sim: Simulation, net: Network, size: int) -> None:
        self.sim, self.net = sim, net
        self.actors: list[Actor] = []
        self.memory = [Mapping(2 * at.AREA_LINKS + 4096) for _ in range(size)]
        self.known: list[set[int]] = [set() for _ in range(size)]

    def kill(self, rank: int) -> None:
        """Kill a rank; the others learn it within 50 ms."""
        actor = self.actors[rank]
        if actor.done:
            return
        self.sim.note(f"{actor.name} is killed")
        actor.kill()
        self.net.close_all_of(f"rank {rank}")
        for known in self.known:
            self.sim.after(self.sim.random.random() * 0.05, partial(known.add, rank))

    def pause(self, rank: int, seconds: float) -> None:
        """Stop a rank for a while."""
        self.sim.note(f"rank {rank} stops for {seconds:g} s")
        self.actors[rank].paused_until = self.sim.now + seconds


class Mapping:
    """A rank's memory, as `Host` shows it."""

    def __init__(self, nbytes: int) -> None:
        self.data = np.zeros(nbytes, np.uint8)
        self.base = int(self.data.ctypes.data)

    def words(self, offset: int, count: int) -> Any:
        """Return some words of it."""
        return self.data[offset : offset + 8 * count].view(np.int64)


class Arena:
    """Hands out memory; only an area's first bytes are ever touched here."""

    def __init__(self, mapping: Mapping) -> None:
        self.mapping = mapping
        self.given = 0
        self.freed: list[int] = []

    def free(self, offset: int) -> None:
        """Take memory back."""
        self.freed.append(offset)


class Host:
    """What forming needs of a host."""

    def __init__(self, deaths: Deaths, rank: int, size: int) -> None:
        self._deaths, self._rank = deaths, rank
        self.listeners: dict[str, object] = {}
        self.arena = Arena(deaths.memory[rank])
        self.peers = [
            SimpleNamespace(mapping=deaths.memory[number], rank=number, number=number)
            for number in range(size)
        ]
        self.near = {number: number for number in range(size)}
        self.number = rank
        self.router = SimpleNamespace(unreachable=lambda number: None)
        self.infos = [SimpleNamespace(pid=number, host="host") for number in range(size)]

    def allocate(self, nbytes: int) -> int:
        """Return where an area lies: elsewhere on each rank, so that a mix-up shows."""
        self.arena.given += 1
        return 8 * self._rank

    def abandon(self, offsets: object, left_word: int, members: int) -> None:
        """Keep memory until the others have left."""

    def access(self, members: object) -> int:
        """Say what the kernel lets this rank do with others' memory: nothing."""
        return 0

    def lost(self, members: Any) -> Any:
        """Return a member that is known to be dead."""
        dead = self._deaths.known[self._rank]
        for number in members:
            if number in dead:
                return SimpleNamespace(number=number, pidfd=-1, pid=number, host="host")
        return None


def gathering(sim: Simulation) -> None:
    """The first meeting of a job's ranks."""
    random = sim.random
    net = Network(sim, Weather.any(random))
    site, size = Site(net), random.randint(2, 5)
    deaths = Deaths(sim, net, size)
    trouble = random.choice(("none", "absent", "twice", "size", "killed", "edge", "store"))
    victim = random.randrange(size)

    def meet(rank: int, of: int) -> str:
        store = VirtualStore(site, f"rank {rank}", 10.0)
        _wait_for_ranks(store, rank, of, Deadline.after(_LIMIT), _LIMIT)
        return "met"

    for rank in range(size):
        if trouble == "absent" and rank == victim:
            continue
        of = size + 1 if trouble == "size" and rank == victim else size
        delay = random.random() * 0.5
        if trouble == "edge" and rank == victim:
            delay = _LIMIT + random.uniform(-0.05, 0.6)
        deaths.actors.append(sim.start(f"rank {rank}", partial(meet, rank, of), delay))
    if trouble == "twice":
        sim.start(f"another rank {victim}", lambda: meet(victim, size), random.random())
    if trouble == "store":
        site.fail(random.random() * 0.6)
    if trouble == "killed":
        actor = deaths.actors[victim]
        sim.after(random.random() * 0.6, lambda: None if actor.done else deaths.kill(victim))
    sim.run()
    _check_meeting(sim, deaths.actors, trouble, victim)


def _check_meeting(sim: Simulation, actors: list[Actor], trouble: str, victim: int) -> None:
    if trouble == "store":
        typed(sim.actors, RendezvousError, StoreError)
        return
    typed(sim.actors, RendezvousError)
    in_time(sim.actors, sim.end - 20.0 + _LIMIT + 2 * _MOMENT)  # who is missing is asked for
    if trouble == "none":
        demand(all(actor.result == "met" for actor in actors), "ranks that all came do not meet")
    elif trouble == "twice":
        errors = [actor for actor in sim.actors if "come twice" in ending(actor)]
        demand(len(errors) == 1, "a rank came twice, and not one of them is told so")
    elif trouble == "size":
        same(actors)
        demand("don't agree on their number" in ending(actors[0]), "sizes differ unnoticed")
    elif trouble == "absent":
        named = f"missing: {victim} "
        demand(all(named in ending(actor) for actor in actors), f"not named: {ending(actors[0])}")
    else:
        met = [actor.result == "met" for actor in live(actors)]
        demand(all(met) or not any(met), "some have met and some have not")


def form(host: Host, name: str, members: list[int], rank: int, store: Store, limit: float) -> Any:
    """Form a group by the product's way; return where its members' areas lie."""
    founding = formation.GroupSpec(
        host,  # type: ignore[arg-type]
        name,
        members,
        rank,
        store,
        Deadline.after(limit),
        lambda: formation.check_alive(host, name, members),  # type: ignore[arg-type]
    )
    return formation.form(founding)._offsets


def founding(sim: Simulation) -> None:
    """A group forms on all of its ranks or on none."""
    random = sim.random
    net = Network(sim, Weather.any(random))
    site, size = Site(net), random.randint(2, 5)
    deaths = Deaths(sim, net, size)
    trouble = random.choice(("none", "absent", "killed", "killed", "edge", "paused", "store"))
    victim = random.randrange(size)
    members = list(range(size))

    def join(rank: int) -> str:
        host = Host(deaths, rank, size)
        store = PrefixStore("job", VirtualStore(site, f"rank {rank}", 10.0))
        offsets = form(host, "group", members, rank, store, _LIMIT)
        return f"areas at {offsets}"

    for rank in members:
        late = random.random() * 0.3
        if rank == victim and trouble == "absent":
            late = 60.0
        if rank == victim and trouble == "edge":
            late = _LIMIT + random.uniform(-0.05, 0.3)
        deaths.actors.append(sim.start(f"rank {rank}", partial(join, rank), late))
    if trouble == "store":
        site.fail(random.random() * 0.4)
        sim.end += 20.0
    if trouble == "killed":
        sim.after(random.random() * 0.4, lambda: deaths.kill(victim))
    if trouble == "absent":
        sim.after(0.0, lambda: deaths.kill(victim) if random.random() < 0.5 else None)
        sim.after(59.0, lambda: deaths.actors[victim].kill())
        sim.end += 60.0
    if trouble == "paused":
        sim.after(random.random() * 0.4, lambda: deaths.pause(victim, 5.0))
    begin = sim.now
    sim.run()
    _check_founding(deaths.actors, trouble, victim, begin)


def _check_founding(actors: list[Actor], trouble: str, victim: int, begin: float) -> None:
    if trouble == "store":
        typed(actors, RendezvousError, StoreError)
        return
    typed(actors, PeerLost, RendezvousError)
    same(actors)
    prompt = [actor for actor in actors if actor.paused_until < begin]
    in_time(prompt, begin + 2 * _LIMIT + _MOMENT)
    first = ending(live(actors)[0])
    if trouble == "none":
        in_time(actors, begin + 2 * _MOMENT)
        expected = f"areas at {[8 * rank for rank in range(len(actors))]}"
        demand(actors[0].result == expected, f"a group is not formed right: {first}")
    elif trouble == "killed" and "returned" not in first:
        demand("PeerLost" in first, f"a rank was killed, and the others say {first}")
        in_time(actors, begin + 0.5 + 2 * _MOMENT)
    if trouble in ("absent", "killed") and "returned" not in first:
        demand(f"rank {victim}" in first, f"{first} does not name rank {victim}")
