"""A network of streams in virtual time, with weather: delays, losses, small pieces, cuts.

An End has the methods of a non-blocking socket that the product uses. Data arrives complete, once
and in order, as with TCP, but in pieces of any size and after any delay. A lost packet comes 0.2 s
later, and all data behind it waits. A stream can be cut, and an attacker may change packets.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from nc10d.testing.simulated.virtual_time import Killed, RankTask
from simulation.clock import Simulation

_RESENT = 0.2


@dataclass
class Weather:
    """A network's behaviour: seconds of delay, and probabilities of faults per packet."""

    delay: float = 0.0005
    lost: float = 0.0
    pieces: bool = False
    room: int = 1 << 20
    tampering: float = 0.0

    @classmethod
    def any(cls, random: Random) -> Weather:
        """Draw the weather; in a third of all runs it is fine."""
        if random.random() < 1 / 3:
            return cls()
        return cls(
            delay=random.choice((0.0001, 0.001, 0.02)),
            lost=random.choice((0.0, 0.01, 0.05)),
            pieces=random.random() < 0.6,
            room=random.choice((600, 4096, 1 << 20)),
        )


class End:
    """An end of a stream, as a non-blocking socket; it raises a socket's errors."""

    family = socket.AF_INET

    def __init__(self, net: Network, number: int, owner: str) -> None:
        self.net, self.owner = net, owner
        self.peer: End = self
        self.events = 1
        self.on_event: Callable[[], None] = lambda: None
        self.changed: list[RankTask] = []
        """Ranks that wait for this end."""
        self._number = number
        self._inbox = bytearray()
        self._travelling = 0
        self._arrival = 0.0
        self._over: OSError | bool = False
        self._closed = False

    def fileno(self) -> int:
        """Return the number of the end, or -1 if it is closed."""
        return -1 if self._closed else self._number

    def getpeername(self) -> tuple[str, int]:
        """Return the name of the process at the other end, in the place of its address."""
        return self.peer.owner, self.peer._number

    def readable(self) -> bool:
        """Return whether recv would return or raise at once."""
        return bool(self._inbox) or bool(self._over)

    def writable(self) -> bool:
        """Return whether send would take data, or fail, at once."""
        return bool(self._over) or self._space() > 0

    def _space(self) -> int:
        return self.net.weather.room - self._travelling - len(self.peer._inbox)

    def recv(self, most: int) -> bytes:
        """Return the data that has come, or a part of it; b"" at the end of the stream."""
        self._alive()
        if self._inbox:
            count = self.net.cut(min(most, len(self._inbox)))
            data = bytes(self._inbox[:count])
            del self._inbox[:count]
            self.peer._notify()  # there is room again
            return data
        if isinstance(self._over, OSError):
            raise self._over
        if self._over:
            return b""
        raise BlockingIOError

    def send(self, data: bytes | memoryview, flags: int = 0) -> int:
        """Send as many bytes as there is room for; return their number."""
        self._alive()
        if self._over:
            raise BrokenPipeError("the peer has closed the stream")
        space = self._space()
        if space <= 0:
            raise BlockingIOError
        count = min(len(data), space)
        self._dispatch(bytes(data[:count]))
        return count

    def _alive(self) -> None:
        actor = self.net.sim.acting()
        if actor is not None and actor.dead:
            raise Killed
        if self._closed:
            raise OSError("the end is closed")

    def _dispatch(self, data: bytes | None) -> None:
        sim, size = self.net.sim, len(data or b"")
        data = self.net.tampered(data)
        self._travelling += size
        for piece, weight in _in_two(data, size, self.net.cut(len(data or b""))):
            self._arrival = max(self._arrival, sim.now + self.net.delay())
            sim.at(self._arrival, partial(self.peer._arrive, self, piece, weight))

    def _arrive(self, sender: End, data: bytes | None, size: int) -> None:
        sender._travelling -= size
        if self._closed:
            if data is not None:
                sender.end(ConnectionResetError("connection reset by peer"))
            return
        if data is None:
            self._over = self._over or True
        else:
            self._inbox += data
            if size > len(data):
                sender._notify()  # a packet's room becomes free with its last piece
        self._notify()

    def end(self, error: OSError) -> None:
        """End the stream with an error at this end."""
        self._over = self._over or error
        self._notify()

    def _notify(self) -> None:
        self.net.sim.notify(self.changed)
        self.on_event()

    def shutdown(self, how: int) -> None:
        """Send the end of the stream."""
        if not self._closed:
            self._dispatch(None)

    def close(self) -> None:
        """Close the end; the peer still reads the data sent before, then the end of the stream."""
        self.shutdown(socket.SHUT_RDWR)
        self._closed = True

    def setsockopt(self, *option: object) -> None:
        """Do nothing."""

    def settimeout(self, timeout: float | None) -> None:
        """Do nothing: the end never blocks."""


def _in_two(data: bytes | None, size: int, at: int) -> list[tuple[bytes | None, int]]:
    """Return a packet, or its two parts, with the room that each takes on its way."""
    if data is None or at == len(data):
        return [(data, size)]
    return [(data[:at], 0), (data[at:], size)]


class Network:
    """All streams of one simulation."""

    def __init__(self, sim: Simulation, weather: Weather, first: int = 3) -> None:
        """`first` is the number of the first end; the ends of several networks must differ."""
        self.sim, self.weather = sim, weather
        self.ends: list[End] = []
        self._numbers = itertools.count(first)

    def stream(self, owner: str, peer: str) -> tuple[End, End]:
        """Return the two ends of a new stream between two named processes."""
        a, b = (End(self, next(self._numbers), name) for name in (owner, peer))
        a.peer, b.peer = b, a
        self.ends += a, b
        return a, b

    def close_all_of(self, owner: str) -> None:
        """Close all ends of a process, as the kernel does when the process dies."""
        for end in self.ends:
            if end.owner == owner:
                end.close()

    def cut_off(self, end: End) -> None:
        """Cut a stream: both ends get a reset at once."""
        for side in (end, end.peer):
            side.end(ConnectionResetError("connection reset by peer"))

    def delay(self) -> float:
        """Return the seconds that a packet travels."""
        random, weather = self.sim.random, self.weather
        lost = _RESENT if random.random() < weather.lost else 0.0
        return weather.delay * (0.5 + random.random()) + lost

    def cut(self, count: int) -> int:
        """Return how many of `count` bytes travel together."""
        if not self.weather.pieces or count < 2 or self.sim.random.random() < 0.5:
            return count
        return self.sim.random.randint(1, count)

    def tampered(self, data: bytes | None) -> bytes | None:
        """Return the data that arrives in place of `data`: a bit flipped, doubled or cut."""
        random = self.sim.random
        if not data or random.random() >= self.weather.tampering:
            return data
        self.sim.note("the attacker changes a packet")
        at = random.randrange(len(data))
        return random.choice(
            (
                data[:at] + bytes((data[at] ^ 1 << random.randrange(8),)) + data[at + 1 :],
                data + data,
                data[:at],
            )
        )
