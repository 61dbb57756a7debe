"""A yardstick: a plain TCP copy of the bytes that a collective across hosts can't do without.

`python -m benchmarks.compare.plain tcp ADDRESSES JOBS BUDGET UNTOUCHED OUT`, as
`benchmarks.compare.peers`;
ADDRESSES is a JSON list of the hosts' addresses. Ranks that have the same number on their hosts
share what their hosts must give each other of the arrays: a blocking socket a pair (`tcp4`: four),
`sendall` and `recv_into`, each direction in a thread of its own. Nothing is reduced and nothing
checked; nc10d is there only so that ranks meet and begin together. As by every library the array
that is sent is written before each call, unless UNTOUCHED is 1; what is received begins a page, as
some kernels are twice as quick then (see rates.met).
"""

from __future__ import annotations

import json
import mmap
import socket
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from benchmarks.compare.libraries import Call, Nc10d, there_and_back
from benchmarks.compare.peers import barrier_of, nothing, timed, write

PLAIN = "tcp"
PORT = 29600
FITS = 32 << 10
"""Bytes that a socket takes before anybody reads: they need no thread to be sent."""
Bytes = npt.NDArray[np.uint8]
Gives = Callable[[int, int, int], float]
GIVES: dict[str, Gives] = {
    "all_reduce": lambda hosts, host, peer: 2 / hosts,
    "all_gather": lambda hosts, host, peer: 1 / hosts,
    "reduce_scatter": lambda hosts, host, peer: 1 / hosts,
    "all_to_all": lambda hosts, host, peer: 1 / hosts,
    "broadcast": lambda hosts, host, peer: float(host == 0),
    "ping_pong": lambda hosts, host, peer: float(host ^ 1 == peer),
    "exchange": lambda hosts, host, peer: float(host ^ 1 == peer),
    "barrier": lambda hosts, host, peer: 0.0,
}
"""What part of an array a host must give to another one."""


def is_plain(name: str) -> bool:
    """Say whether a name is a plain copy's: tcp, or tcp4."""
    count = name.removeprefix(PLAIN)
    return name.startswith(PLAIN) and (not count or (count.isdecimal() and int(count) > 0))


@dataclass(frozen=True, slots=True)
class Cut:
    """What a host gives another one: `given` bytes from `low` on, of an array of `whole`."""

    low: int
    given: int
    whole: int


def cut(collective: str, hosts: int, host: int, peer: int, nbytes: int) -> Cut:
    """Return what `host` gives `peer` of an array of `nbytes`, or of its chunk in an all_gather."""
    whole = nbytes // hosts if collective == "all_gather" else nbytes
    given = min(whole, int(GIVES[collective](hosts, host, peer) * nbytes))
    return Cut(min(peer * whole // hosts, whole - given), given, whole)


class Wires:
    """My sockets to the ranks that have my number on the other hosts: `count` to each, by host."""

    def __init__(self, library: Nc10d, addresses: Sequence[str], count: int = 1) -> None:
        self.hosts, mates = len(addresses), library.size // len(addresses)
        self.host, number = divmod(library.rank, mates)
        meet = barrier_of(library)
        with socket.create_server((addresses[self.host], PORT + number)) as listener:
            meet()
            wires = [
                (host, socket.create_connection((addresses[host], PORT + number)))
                for host in [*range(self.host)] * count
            ]
            for _, wire in wires:
                wire.sendall(bytes([self.host]))
            for _ in range(count * (self.hosts - self.host - 1)):
                wire, _ = listener.accept()
                wires.append((wire.recv(1)[0], wire))
        for _, wire in wires:
            wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.wires = wires
        self._share = mates * count
        self._pool = ThreadPoolExecutor(2 * len(wires))

    def copy(self, collective: str, nbytes: int) -> tuple[Call, Call]:
        """Return a call that moves my part of what a collective of arrays of `nbytes` needs.

        And one that writes what it sends: each further socket to a host has an array of its own.
        """
        arrays: list[Bytes] = []
        sockets: Counter[int] = Counter()
        sends: list[Call] = []
        receives: list[Call] = []
        for peer, wire in self.wires:
            number, sockets[peer] = sockets[peer], sockets[peer] + 1
            mine = cut(collective, self.hosts, self.host, peer, nbytes // self._share)
            theirs = cut(collective, self.hosts, peer, self.host, nbytes // self._share)
            if mine.given:
                if number == len(arrays):
                    arrays.append(np.ones(mine.whole, np.uint8))
                part = arrays[number][mine.low : mine.low + mine.given]
                sends.append(partial(wire.sendall, part.data))
            if theirs.given:
                receives.append(partial(receive, wire, mmap.mmap(-1, theirs.given)))
        rewrite = partial(_write, arrays) if arrays else nothing
        if collective == "ping_pong":
            send, recv = (partial(self._all, moves, nbytes) for moves in (sends, receives))
            return there_and_back(send, recv, self.host % 2 == 0), rewrite
        return partial(self._all, [*sends, *receives], nbytes), rewrite

    def _all(self, moves: Sequence[Call], nbytes: int) -> None:
        """Make all moves of an operation of `nbytes`; in turn, if none of them has to wait."""
        if nbytes <= FITS or len(moves) < 2:
            for move in moves:
                move()
        else:
            others = [self._pool.submit(move) for move in moves[1:]]
            moves[0]()
            for other in others:
                other.result()


def _write(parts: Sequence[Bytes]) -> None:
    """Write what is in arrays once more."""
    for part in parts:
        np.bitwise_or(part, 0, out=part)


def receive(wire: socket.socket, into: mmap.mmap) -> None:
    """Fill memory from a socket; EOFError if it ends before."""
    left = memoryview(into)
    while left:
        count = wire.recv_into(left, len(left), socket.MSG_WAITALL)
        if count == 0:
            raise EOFError("the other side has gone")
        left = left[count:]


def main() -> None:
    """Measure the copies on this rank; rank 0 writes what came out."""
    name, addresses, jobs, budget, untouched, out = sys.argv[1:7]
    library = Nc10d()
    wires = Wires(library, json.loads(addresses), int(name.removeprefix(PLAIN) or 1))
    rows: list[list[object]] = []
    for what, nbytes in json.loads(jobs):
        call, rewrite = wires.copy(what, nbytes)
        before = None if untouched == "1" else rewrite
        rows.append([what, nbytes, timed(library, what, call, float(budget), before), 0])
    write(library, rows, out)


if __name__ == "__main__":
    main()
