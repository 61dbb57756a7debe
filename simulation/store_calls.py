"""The store under random calls of several clients: table, wire format, client and sealed frames.

Laws: every `add` returns another number and no addition is lost. A single compare_set wins. A read
returns the value that was set. Queues lose, repeat and reorder nothing. No client leaves a barrier
before all have entered. A wait ends when its keys exist, or at its timeout. With a dead or frozen
server, or an attacker who changes packets, a client may get a StoreError in time, but never a wrong
value.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from random import Random

from nc10d.auth.admission import UNPROVEN_SECONDS
from nc10d.auth.handshake import HELLO, MAGIC
from nc10d.errors import StoreError, StoreTimeout
from nc10d.store import wire as m
from nc10d.store.auth_server import STORE_INTRODUCTION
from simulation.clock import Simulation
from simulation.laws import LawBroken, ending, require, require_by, require_types
from simulation.network import Network, Weather
from simulation.stores import TOKEN, Site, VirtualStore

_TIMEOUT = 6.0
_GRACE = 0.1
_SOON = 3.0
"""Seconds in which clients come, and make the calls that go well; bad weather included."""


class Client:
    """A client's random calls, and the results that it got."""

    def __init__(self, sim: Simulation, site: Site, number: int, size: int, seed: int) -> None:
        self.sim, self.site, self.number, self.size = sim, site, number, size
        self.random = Random(seed)
        self.added: list[int] = []
        self.winner = b""
        self.popped: list[bytes] = []
        self.increments = 0
        self.inside = self.outside = 0.0

    def run(self) -> str:
        """Make a random selection of the calls in random order; then enter the barrier."""
        self.store = VirtualStore(self.site, f"client {self.number}", _TIMEOUT)
        parts = [self.count, self.elect, self.swap, self.keep, self.push, self.give_up, self.many]
        for part in self.random.sample(parts, self.random.randint(2, len(parts))):
            part()
        self.gather()
        self.pop()
        return "done"

    def count(self) -> None:
        """Add 1, a few times."""
        for _ in range(self.random.randint(1, 3)):
            self.added.append(self.store.add("count", 1))

    def elect(self) -> None:
        """Take part in an election."""
        self.winner = self.store.compare_set("leader", "", str(self.number))

    def swap(self) -> None:
        """Increment a value by compare_set until a call succeeds."""
        for _ in range(50):
            now = self.store.get("swapped") if self.store.check(["swapped"]) else b""
            new = b"%d.%d" % (int(now.split(b".")[0] or b"0") + 1, self.number)
            if self.store.compare_set("swapped", now, new) == new:
                self.increments += 1
                return

    def keep(self) -> None:
        """Set, append to and read this client's own key."""
        value = bytes([65 + self.number]) * self.random.choice((0, 1, 500, 9_000))
        self.store.set(f"own/{self.number}", value)
        self.store.append(f"own/{self.number}", "!")
        require(self.store.get(f"own/{self.number}") == value + b"!", "a value is not what was set")

    def push(self) -> None:
        """Set a key of this client."""
        self.store.set(f"item/{self.number}", f"{self.number}")

    def give_up(self) -> None:
        """Wait in vain for a moment; later answers must still match their requests."""
        limit, begin = self.random.choice((0.0, 0.01, 0.3)), self.sim.now
        try:
            self.store.wait(["never"], limit)
        except StoreTimeout:
            require(self.sim.now >= begin + limit, "a wait has timed out too early")
            require(self.sim.now <= begin + limit + _GRACE, "a wait has timed out late")
        else:
            raise LawBroken("a wait for nothing has ended well")

    def many(self) -> None:
        """Set and read several keys at once."""
        keys = [f"many/{self.number}/{i}" for i in range(3)]
        self.store.multi_set(keys, ["a", "b" * 300, "c"])
        got = self.store.multi_get(keys)
        require(got == [b"a", b"b" * 300, b"c"], f"multi_get gives {got!r:.60}")

    def gather(self) -> None:
        """Push two items, then enter the barrier of all clients."""
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
        """Pop two items, and a third that another client pushes only now."""
        self.popped += [self.store.queue_pop("queue") for _ in range(2)]
        self.store.queue_push(f"late/{(self.number + 1) % self.size}", "late")
        require(
            self.store.queue_pop(f"late/{self.number}") == b"late", "a queue gives something else"
        )
        self.store.set(f"end/{self.number}", b"")
        ends = [f"end/{number}" for number in range(self.size)]
        self.store.wait(ends)
        require(self.store.check(ends), "a wait has ended, and its keys are not there")


def check(clients: list[Client], site: Site) -> None:
    """Check the results of all clients against a store's contract."""
    added = sorted(number for client in clients for number in client.added)
    require(added == list(range(1, len(added) + 1)), f"add gives {added}")
    winners = {client.winner for client in clients if client.winner}
    require(len(winners) <= 1, f"compare_set has several winners: {winners}")
    swapped = int((site.server.held("swapped") or b"0").split(b".")[0])
    require(swapped == sum(client.increments for client in clients), "an increment is lost")
    last_in = max(client.inside for client in clients)
    require(all(c.outside >= last_in for c in clients), "a client left a barrier too early")
    popped = [value for client in clients for value in client.popped]
    expected = sorted(f"{n}:{turn}".encode() for n in range(len(clients)) for turn in range(2))
    require(sorted(popped) == expected, f"the queue gives {popped}")
    for client in clients:
        require(
            all(a[:1] != b[:1] or a < b for a, b in pairwise(client.popped)),
            f"the queue gives the newest first: {client.popped}",
        )


def _play(sim: Simulation, token: bytes | None, trouble: Callable[[Site], float]) -> None:
    random = sim.random
    net = Network(sim, Weather.any(random))
    site = Site(net, token)
    size = random.randint(2, 4)
    clients = [Client(sim, site, n, size, random.getrandbits(32)) for n in range(size)]
    # The trouble is drawn first, so that the server may fail during the calls.
    bound = trouble(site)
    delays = [random.choice((0.0, 0.01, 0.5)) for _ in clients]
    actors = [
        sim.start(f"client {client.number}", client.run, delay)
        for client, delay in zip(clients, delays, strict=True)
    ]
    sim.run()
    if not bound:
        for actor in actors:
            require(actor.error is None, f"{actor.name} fails with {ending(actor)}")
        check(clients, site)
        return
    require_types(actors, StoreError)
    require_by(actors, bound)
    if all(actor.error is None for actor in actors):
        check(clients, site)


def store_calls(sim: Simulation) -> None:
    """Run clients of a store in all kinds of weather."""
    _play(sim, None, lambda site: 0.0)


def server_death(sim: Simulation) -> None:
    """Let the server die or freeze: every client gets an error in time."""

    def trouble(site: Site) -> float:
        dies = site.fail(sim.random.random() * 0.1)
        return _SOON if dies else _TIMEOUT + _SOON

    _play(sim, None, trouble)


def client_death(sim: Simulation) -> None:
    """Kill a client that waits for a queue: the next item goes to the live client."""
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
    require(second.result == b"job", f"the consumer that lives gets nothing: {ending(second)}")


def authenticated(sim: Simulation) -> None:
    """Run the same clients with a token."""
    _play(sim, TOKEN, lambda site: 0.0)


def tampering(sim: Simulation) -> None:
    """Change, double or cut packets of a job with a token: no end accepts them."""

    def trouble(site: Site) -> float:
        site.net.weather.tampering = 0.05
        return _TIMEOUT + 2 * _SOON  # the rest of a cut packet never comes

    _play(sim, TOKEN, trouble)


def unknown_client(sim: Simulation) -> None:
    """Connect without the token: the server executes no request and disconnects in time."""
    net = Network(sim, Weather.any(sim.random))
    net.weather.room = 1 << 20
    site = Site(net, TOKEN)
    request = m.with_value(m.SET, b"/stolen", b"yes")
    hello = m.with_u32(m.VALIDATE, m.MAGIC)
    forged = HELLO.pack(MAGIC, *STORE_INTRODUCTION, bytes(32)) + bytes(32)
    way = sim.random.randrange(4)

    def intrude() -> str:
        if way == 0:
            VirtualStore(site, "stranger", 1.0, b"x" * 32).set("stolen", "yes")
            return "in"
        end = site.dial("stranger")
        data = (hello + request, forged, b"")[way - 1]
        if data:
            end.send(data)
        until = sim.now + 2 * UNPROVEN_SECONDS
        while sim.wait(end.readable, until, end.changed):
            try:
                if not end.recv(4096):
                    return "out"
            except OSError:
                return "out"
        return "kept"

    def honest() -> bytes:
        store = VirtualStore(site, "honest", 2.0)
        store.set("mine", "value")
        return store.get("mine")

    stranger, friend = sim.start("stranger", intrude), sim.start("honest", honest, 0.1)
    sim.run()
    require(site.server.held("stolen") is None, "a stranger has written into the store")
    require(friend.result == b"value", f"an honest client: {ending(friend)}")
    if way == 0:
        require(isinstance(stranger.error, StoreError), f"another token: {ending(stranger)}")
    else:
        require(stranger.result == "out", f"a stranger is {ending(stranger)}")
