"""Survivors agree on who goes on, while more of them die, stop, or learn of deaths late.

Laws: all ranks that go on are in the same group; every survivor that kept up is in it; who has been
left out is told; all of that within the patience for each death and a moment.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

from nc10d import shrink
from nc10d.deadline import Deadline
from nc10d.errors import Aborted, PeerLost, RendezvousError, StoreError
from nc10d.testing.simulation.clock import Simulation
from nc10d.testing.simulation.laws import demand, ending, in_time, live, some, typed
from nc10d.testing.simulation.meeting import Deaths, Host, form
from nc10d.testing.simulation.network import Network, Weather
from nc10d.testing.simulation.stores import Site, VirtualStore

_LONG = 20.0
_PROMPT = 4.0


def shrinking(sim: Simulation) -> None:
    """A group shrinks."""
    random = sim.random
    net = Network(sim, Weather.any(random))
    site, size = Site(net), random.randint(3, 6)
    deaths = Deaths(sim, net, size)

    def go_on(rank: int) -> Any:
        store = VirtualStore(site, f"rank {rank}", 30.0)

        def successor(name: str, members: list[int], below: Any, until: Deadline) -> Any:
            host = Host(deaths, rank, size)
            form(host, name, members, members.index(rank), below, until.remaining())
            _connect(sim, deaths, rank, members)
            return SimpleNamespace(name=name, members=members, close=lambda: None)

        old = SimpleNamespace(name="old", store=store, size=size, rank=rank, successor=successor)
        known = deaths.known[rank]
        new: Any = shrink._made(old, lambda: set(known), shrink.PATIENCE)  # type: ignore[arg-type]
        return new.name, tuple(new.members)

    for rank in range(size):
        delay = random.random() * 0.2
        deaths.actors.append(sim.start(f"rank {rank}", partial(go_on, rank), delay))
    victims = some(random, size, size - 2) or [random.randrange(size)]
    sim.after(0.0, lambda: deaths.kill(victims[0]))
    for victim in victims[1:]:
        sim.after(random.random() * 0.6, partial(deaths.kill, victim))
    stopped = random.randrange(size) if random.random() < 0.25 else -1
    if stopped >= 0:
        sim.after(random.random() * 0.3, lambda: deaths.pause(stopped, _LONG))
    begin, fails = sim.now, random.random() < 0.1
    if fails:
        site.fail(random.random() * 0.3)
        sim.end += 200.0
    sim.run()
    if fails:
        typed(deaths.actors, StoreError, RendezvousError, Aborted, PeerLost)
        return
    if stopped < 0:
        slow = 2 if net.weather.lost else 1
        in_time(deaths.actors, begin + slow * _PROMPT)
    _judge(deaths, stopped)


def _connect(sim: Simulation, deaths: Deaths, rank: int, members: list[int]) -> None:
    """Stand for the links between hosts: who lacks that to a dead rank gives up."""
    sim.sleep(sim.random.random() * 0.1)
    lost = deaths.known[rank].intersection(members)
    if lost:
        raise PeerLost(f"ranks {sorted(lost)} are lost while links are made")


def _judge(deaths: Deaths, stopped: int) -> None:
    typed(deaths.actors, Aborted, PeerLost, RendezvousError)
    went_on = {actor.result for actor in live(deaths.actors) if actor.result is not None}
    demand(len(went_on) <= 1, f"survivors go on in different groups: {sorted(went_on)}")
    members = next(iter(went_on))[1] if went_on else ()
    for rank, actor in enumerate(deaths.actors):
        if actor.dead:
            continue
        if actor.error is None:
            demand(rank in members, f"rank {rank} goes on in a group that it is not in")
        else:
            demand(rank == stopped, f"rank {rank} kept up and is left out: {ending(actor)}")
