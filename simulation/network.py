"""A network of streams in virtual time, with weather: delays, losses, small pieces, cuts.

An End has what the product uses of a socket that does not block. What is sent arrives whole, once
and in its order, as TCP promises, but cut anywhere and whenever it pleases; a lost packet is one
that comes 0.2 s later, and everything behind it waits. A stream can be cut, and a meddler may
change what travels.
"""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from simulation.clock import Killed, Signal, Simulation

_RESENT = 0.2


@dataclass
class Weather:
    """How a network behaves: seconds of delay, chances of what may befall a packet."""

    delay: float = 0.0005
    lost: float = 0.0
    pieces: bool = False
    room: int = 1 << 20
    meddling: float = 0.0

    @classmethod
    def any(cls, random: Random) -> Weather:
        """Return some weather; in a third of all runs it is fine."""
        if random.random() < 1 / 3:
            return cls()
        return cls(
            delay=random.choice((0.0001, 0.001, 0.02)),
            lost=random.choice((0.0, 0.01, 0.05)),
            pieces=random.random() < 0.6,
            room=random.choice((600, 4096, 1 << 20)),
        )


class End:
    """One end of a stream, as a socket that never blocks; errors are a socket's."""

    family = socket.AF_INET

    def __init__(self, net: Network, number: int, owner: str) -> None:
        self.net, self.owner = net, owner
        self.peer: End = self
        self.events = 1
        self.on_event: Callable[[], None] = lambda: None
        self.changed = Signal()
        self._number = number
        self._inbox = bytearray()
        self._travelling = 0
        self._arrival = 0.0
        self._over: OSError | bool = False
        self._closed = False

    def fileno(self) -> int:
        """Return the number of an open end, -1 of a closed one."""
        return -1 if self._closed else self._number

    def readable(self) -> bool:
        """Say whether recv has something to tell."""
        return bool(self._inbox) or bool(self._over)

    def writable(self) -> bool:
        """Say whether send would take something, or fail."""
        return bool(self._over) or self._space() > 0

    def _space(self) -> int:
        return self.net.weather.room - self._travelling - len(self.peer._inbox)

    def recv(self, most: int) -> bytes:
        """Return what has come, perhaps a part of it; b"" at the end."""
        self._alive()
        if self._inbox:
            count = self.net.cut(min(most, len(self._inbox)))
            data = bytes(self._inbox[:count])
            del self._inbox[:count]
            self.peer._tell()  # there is room again
            return data
        if isinstance(self._over, OSError):
            raise self._over
        if self._over:
            return b""
        raise BlockingIOError

    def send(self, data: bytes | memoryview, flags: int = 0) -> int:
        """Send what there is room for; return how much that was."""
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
        running = self.net.sim.running()
        if running is not None and running.dead:
            raise Killed
        if self._closed:
            raise OSError("the end is closed")

    def _dispatch(self, data: bytes | None) -> None:
        sim, size = self.net.sim, len(data or b"")
        data = self.net.meddled(data)
        self._travelling += size
        for piece, weight in _in_two(data, size, self.net.cut(len(data or b""))):
            self._arrival = max(self._arrival, sim.now + self.net.delay())
            due = self._arrival - sim.now
            sim.after(due, partial(self.peer._arrive, self, piece, weight))

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
                sender._tell()  # the piece before has left, and its room came with this one
        self._tell()

    def end(self, error: OSError) -> None:
        """Have the stream end with an error here."""
        self._over = self._over or error
        self._tell()

    def _tell(self) -> None:
        self.changed.notify()
        self.on_event()

    def shutdown(self, how: int) -> None:
        """Say that nothing more will come."""
        if not self._closed and not self.net.sim.over:
            self._dispatch(None)

    def close(self) -> None:
        """Close the end; the other one reads what has been sent, then that it is over."""
        self.shutdown(socket.SHUT_RDWR)
        self._closed = True

    def setsockopt(self, *option: object) -> None:
        """Take an option."""

    def settimeout(self, timeout: float | None) -> None:
        """Take a timeout, and never block all the same."""


def _in_two(data: bytes | None, size: int, at: int) -> list[tuple[bytes | None, int]]:
    """Return a packet, or its two parts, with the room that each takes on its way."""
    if data is None or at == len(data):
        return [(data, size)]
    return [(data[:at], 0), (data[at:], size)]


class Network:
    """All streams of one simulation."""

    def __init__(self, sim: Simulation, weather: Weather, first: int = 3) -> None:
        """`first` is the number of the first end: those of several networks must differ."""
        self.sim, self.weather = sim, weather
        self.ends: list[End] = []
        self._numbers = itertools.count(first)

    def stream(self, one: str, other: str) -> tuple[End, End]:
        """Return the ends of a new stream between two who are named."""
        a, b = (End(self, next(self._numbers), owner) for owner in (one, other))
        a.peer, b.peer = b, a
        self.ends += a, b
        return a, b

    def close_all_of(self, owner: str) -> None:
        """Close what a process held, as the kernel does when it dies."""
        for end in self.ends:
            if end.owner == owner:
                end.close()

    def cut_off(self, end: End) -> None:
        """Cut a stream: both ends learn it at once."""
        for side in (end, end.peer):
            side.end(ConnectionResetError("connection reset by peer"))

    def delay(self) -> float:
        """Return how long a packet takes."""
        random, weather = self.sim.random, self.weather
        lost = _RESENT if random.random() < weather.lost else 0.0
        return weather.delay * (0.5 + random.random()) + lost

    def cut(self, count: int) -> int:
        """Return how many of so many bytes go at once."""
        if not self.weather.pieces or count < 2 or self.sim.random.random() < 0.5:
            return count
        return self.sim.random.randint(1, count)

    def meddled(self, data: bytes | None) -> bytes | None:
        """Return what arrives in place of `data`."""
        random = self.sim.random
        if not data or random.random() >= self.weather.meddling:
            return data
        self.sim.note("the meddler changes a packet")
        at = random.randrange(len(data))
        return random.choice(
            (
                data[:at] + bytes((data[at] ^ 1 << random.randrange(8),)) + data[at + 1 :],
                data + data,
                data[:at],
            )
        )
