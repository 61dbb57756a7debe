"""The store under random calls of several clients: table, messages, client and sealed frames.

Laws: every `add` gives another number and none is lost; one compare_set wins; what was set is
read; queues lose, double and reorder nothing; a barrier lets nobody out before all are in; a wait
ends when its keys are there, or at its timeout. With a dead or frozen server, or a meddler who
changes packets, a client may get a StoreError instead, in time; a wrong value it may not.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from random import Random

from nc10d.auth.handshake import HELLO, MAGIC
from nc10d.errors import StoreError, StoreTimeout
from nc10d.store import wire as m
from nc10d.store.auth_server import STORE_INTRODUCTION
from simulation.clock import Simulation
from simulation.laws import Wrong, demand, ending, in_time, typed
from simulation.network import Network, Weather
from simulation.stores import TOKEN, Site, VirtualStore

_TIMEOUT = 6.0
_GRACE = 0.1
_SOON = 3.0
"""Seconds in which clients come, and make the calls that go well; bad weather included."""


class Client:
    """One client's script: what it does and what it has seen."""

    def __init__(self, sim: Simulation, site: Site, number: int, size: int, seed: int) -> None:
        self.sim, self.site, self.number, self.size = sim, site, number, size
        self.random = Random(seed)
        self.added: list[int] = []
        self.winner = b""
        self.popped: list[bytes] = []
        self.increments = 0
        self.inside = self.outside = 0.0

    def run(self) -> str:
        """Make all calls, in an order of its own; then meet the others."""
        self.store = VirtualStore(self.site, f"client {self.number}", _TIMEOUT)
        parts = [self.count, self.elect, self.swap, self.keep, self.push, self.give_up, self.many]
        for part in self.random.sample(parts, self.random.randint(2, len(parts))):
            part()
        self.gather()
        self.pop()
        return "done"

    def count(self) -> None:
        """Add one, a few times."""
        for _ in range(self.random.randint(1, 3)):
            self.added.append(self.store.add("count", 1))

    def elect(self) -> None:
        """Take part in an election."""
        self.winner = self.store.compare_set("leader", "", str(self.number))

    def swap(self) -> None:
        """Increment by compare_set until it is mine that counted."""
        for _ in range(50):
            now = self.store.get("swapped") if self.store.check(["swapped"]) else b""
            new = b"%d.%d" % (int(now.split(b".")[0] or b"0") + 1, self.number)
            if self.store.compare_set("swapped", now, new) == new:
                self.increments += 1
                return

    def keep(self) -> None:
        """Set, append to and read a key of my own."""
        value = bytes([65 + self.number]) * self.random.choice((0, 1, 500, 9_000))
        self.store.set(f"own/{self.number}", value)
        self.store.append(f"own/{self.number}", "!")
        demand(self.store.get(f"own/{self.number}") == value + b"!", "a value is not what was set")

    def push(self) -> None:
        """Give the others something to pop."""
        self.store.set(f"item/{self.number}", f"{self.number}")

    def give_up(self) -> None:
        """Wait in vain for a moment; the connection must stay in step."""
        limit, begin = self.random.choice((0.0, 0.01, 0.3)), self.sim.now
        try:
            self.store.wait(["never"], limit)
        except StoreTimeout:
            demand(self.sim.now >= begin + limit, "a wait has timed out too early")
            demand(self.sim.now <= begin + limit + _GRACE, "a wait has timed out late")
        else:
            raise Wrong("a wait for nothing has ended well")

    def many(self) -> None:
        """Set and read several keys at once."""
        keys = [f"many/{self.number}/{i}" for i in range(3)]
        self.store.multi_set(keys, ["a", "b" * 300, "c"])
        got = self.store.multi_get(keys)
        demand(got == [b"a", b"b" * 300, b"c"], f"multi_get gives {got!r:.60}")

    def gather(self) -> None:
        """Come to the barrier, which all clients reach."""
        self.inside = self.sim.now
        if self.random.random() < 0.5:
            self.store.queue_push("queue", f"{self.number}:0")
            self.store.queue_push("queue", f"{self.number}:1")
        else:
            self.store.multi_set([f"x/{self.number}"], ["x"])
            for turn in range(2):
                self.store.queue_push("queue", f"{self.number}:{turn}")
        self.store.barrier("all", self.size)
        self.outside = self.sim.now

    def pop(self) -> None:
        """Take two things off the queue, and one that only comes when I wait."""
        self.popped += [self.store.queue_pop("queue") for _ in range(2)]
        self.store.queue_push(f"late/{(self.number + 1) % self.size}", "late")
        demand(
            self.store.queue_pop(f"late/{self.number}") == b"late", "a queue gives something else"
        )
        self.store.set(f"end/{self.number}", b"")
        ends = [f"end/{number}" for number in range(self.size)]
        self.store.wait(ends)
        demand(self.store.check(ends), "a wait has ended, and its keys are not there")


def check(clients: list[Client], site: Site) -> None:
    """Hold what all clients saw against what a store is."""
    added = sorted(number for client in clients for number in client.added)
    demand(added == list(range(1, len(added) + 1)), f"add gives {added}")
    winners = {client.winner for client in clients if client.winner}
    demand(len(winners) <= 1, f"compare_set has several winners: {winners}")
    swapped = int((site.server.held("swapped") or b"0").split(b".")[0])
    demand(swapped == sum(client.increments for client in clients), "an increment is lost")
    last_in = max(client.inside for client in clients)
    demand(all(c.outside >= last_in for c in clients), "a barrier has let somebody out too early")
    popped = [value for client in clients for value in client.popped]
    expected = sorted(f"{n}:{turn}".encode() for n in range(len(clients)) for turn in range(2))
    demand(sorted(popped) == expected, f"the queue gives {popped}")
    for client in clients:
        demand(
            all(a[:1] != b[:1] or a < b for a, b in pairwise(client.popped)),
            f"the queue gives the newest first: {client.popped}",
        )


def _play(sim: Simulation, token: bytes | None, trouble: Callable[[Site], float]) -> None:
    random = sim.random
    net = Network(sim, Weather.any(random))
    site = Site(net, token)
    size = random.randint(2, 4)
    clients = [Client(sim, site, n, size, random.getrandbits(32)) for n in range(size)]
    # The weather is drawn first, so that the calls meet what they have to.
    bound = trouble(site)
    begin, delays = sim.now, [random.choice((0.0, 0.01, 0.5)) for _ in clients]
    actors = [
        sim.start(f"client {client.number}", client.run, delay)
        for client, delay in zip(clients, delays, strict=True)
    ]
    sim.run()
    if not bound:
        for actor in actors:
            demand(actor.error is None, f"{actor.name} fails with {ending(actor)}")
        check(clients, site)
        return
    typed(actors, StoreError)
    in_time(actors, begin + bound)
    if all(actor.error is None for actor in actors):
        check(clients, site)


def storing(sim: Simulation) -> None:
    """Clients of a store in all kinds of weather."""
    _play(sim, None, lambda site: 0.0)


def dying(sim: Simulation) -> None:
    """The server dies, or freezes: every client is told in time."""

    def trouble(site: Site) -> float:
        dies = site.fail(sim.random.random() * 0.1)
        return _SOON if dies else _TIMEOUT + _SOON

    _play(sim, None, trouble)


def deserting(sim: Simulation) -> None:
    """A client dies while it waits for a queue: what comes goes to who still lives."""
    net = Network(sim, Weather.any(sim.random))
    site = Site(net)

    def consume(number: int) -> bytes:
        return VirtualStore(site, f"consumer {number}", 5.0).queue_pop("jobs")

    def produce() -> None:
        store = VirtualStore(site, "producer", 5.0)
        store.queue_push("jobs", "job")
        store.check(["jobs"])

    first = sim.start("consumer 0", lambda: consume(0))
    second = sim.start("consumer 1", lambda: consume(1), 0.3)

    def die() -> None:
        first.kill()
        net.close_all_of("consumer 0")

    sim.after(0.8, die)
    sim.start("producer", produce, 1.8)
    sim.run()
    demand(second.result == b"job", f"the consumer that lives gets nothing: {ending(second)}")


def sealed(sim: Simulation) -> None:
    """The same clients with a token: nothing else changes."""
    _play(sim, TOKEN, lambda site: 0.0)


def meddled(sim: Simulation) -> None:
    """Somebody changes, doubles or cuts packets of a job with a token: none is believed."""

    def trouble(site: Site) -> float:
        site.net.weather.meddling = 0.05
        return _TIMEOUT + 2 * _SOON  # what a cut packet leaves never comes

    _play(sim, TOKEN, trouble)


def strange(sim: Simulation) -> None:
    """Who does not know the token gets nothing done, and is thrown out in time."""
    net = Network(sim, Weather.any(sim.random))
    net.weather.room = 1 << 20
    site = Site(net, TOKEN)
    wish = m.with_value(m.SET, b"/stolen", b"yes")
    hello = m.with_u32(m.VALIDATE, m.MAGIC)
    forged = HELLO.pack(MAGIC, *STORE_INTRODUCTION, bytes(32)) + bytes(32)
    way = sim.random.randrange(4)

    def intrude() -> str:
        if way == 0:
            VirtualStore(site, "stranger", 1.0, b"x" * 32).set("stolen", "yes")
            return "in"
        end = site.dial("stranger")
        data = (hello + wish, forged, b"")[way - 1]
        if data:
            end.send(data)
        until = sim.now + 4.0
        while not end.readable() and sim.now < until:
            sim.wait(end.changed, until)
        while end.readable():
            try:
                if not end.recv(4096):
                    return "out"
            except OSError:
                return "out"
            while not end.readable() and sim.now < until:
                sim.wait(end.changed, until)
        return "kept"

    def honest() -> bytes:
        store = VirtualStore(site, "honest", 2.0)
        store.set("mine", "value")
        return store.get("mine")

    stranger, friend = sim.start("stranger", intrude), sim.start("honest", honest, 0.1)
    sim.run()
    demand(site.server.held("stolen") is None, "a stranger has written into the store")
    demand(friend.result == b"value", f"an honest client: {ending(friend)}")
    if way == 0:
        demand(isinstance(stranger.error, StoreError), f"another token: {ending(stranger)}")
    else:
        demand(stranger.result == "out", f"a stranger is {ending(stranger)}")
