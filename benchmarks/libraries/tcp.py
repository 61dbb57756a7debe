"""A lower bound: a plain TCP copy of the bytes that a collective across hosts has to move.

Ranks with the same number on their hosts share their hosts' traffic. Each pair of ranks has a
blocking socket (`tcp4`: four), and each direction a thread, which calls `sendall` or `recv_into`.
Nothing is reduced and nothing is checked; nc10d only makes the ranks begin together. Received bytes
begin at a page, because some kernels copy twice as fast then (see `wire_rates.met`).
"""

from __future__ import annotations

import mmap
import os
import socket
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from benchmarks.libraries.base import Call, there_and_back
from benchmarks.libraries.nc10d import Nc10d

ADDRESSES = "BENCHMARK_ADDRESSES"
"""The variable with the addresses of all hosts, separated by commas."""
PORT = 29600
FITS = 32 << 10
"""Bytes that a socket takes without a reader: sending them needs no thread."""
Bytes = npt.NDArray[np.uint8]
Share = Callable[[int, int, int], float]
SHARES: dict[str, Share] = {
    "all_reduce": lambda hosts, host, peer: 2 / hosts,
    "all_gather": lambda hosts, host, peer: 1 / hosts,
    "reduce_scatter": lambda hosts, host, peer: 1 / hosts,
    "all_to_all": lambda hosts, host, peer: 1 / hosts,
    "broadcast": lambda hosts, host, peer: float(host == 0),
    "reduce": lambda hosts, host, peer: float(peer == 0),
    "gather": lambda hosts, host, peer: (peer == 0) / hosts,
    "scatter": lambda hosts, host, peer: (host == 0) / hosts,
    "ping_pong": lambda hosts, host, peer: float(host ^ 1 == peer),
    "exchange": lambda hosts, host, peer: float(host ^ 1 == peer),
    "barrier": lambda hosts, host, peer: 0.0,
}
"""The share of an array that a host must send to a peer host."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A host's data for a peer: `nbytes` from `low` on, of an array of `whole` bytes."""

    low: int
    nbytes: int
    whole: int


def cut(collective: str, hosts: int, host: int, peer: int, nbytes: int) -> Cut:
    """Return the bytes from `host` to `peer` of an array of `nbytes` (all_gather: of its chunk)."""
    whole = nbytes // hosts if collective == "all_gather" else nbytes
    share = min(whole, int(SHARES[collective](hosts, host, peer) * nbytes))
    return Cut(min(peer * whole // hosts, whole - share), share, whole)


class Tcp(Nc10d):
    """Sockets to the ranks that have this rank's number on the other hosts, `count` to each."""

    def __init__(self, count: int = 1) -> None:
        self._count = count

    def start(self) -> None:
        """Join the launcher's job, and connect; blocks until all ranks have."""
        super().start()
        addresses = os.environ[ADDRESSES].split(",")
        self._hosts, local_ranks = len(addresses), self.size // len(addresses)
        self._host, number = divmod(self.rank, local_ranks)
        with socket.create_server((addresses[self._host], PORT + number)) as listener:
            self.dist.barrier()
            sockets = [
                (host, socket.create_connection((addresses[host], PORT + number)))
                for host in [*range(self._host)] * self._count
            ]
            for _, connection in sockets:
                connection.sendall(bytes([self._host]))
            for _ in range(self._count * (self._hosts - self._host - 1)):
                connection, _ = listener.accept()
                sockets.append((connection.recv(1)[0], connection))
        for _, connection in sockets:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sockets = sockets
        self._parts = local_ranks * self._count
        self._pool = ThreadPoolExecutor(2 * len(sockets))

    def copy(self, collective: str, nbytes: int) -> tuple[Call, Call | None]:
        """Return a call that moves this rank's part of a collective on arrays of `nbytes`.

        The second call writes the arrays that the first call sends; it is None where a rank sends
        nothing. Each further socket to a host sends from a separate array.
        """
        arrays: list[Bytes] = []
        used: Counter[int] = Counter()
        sends: list[Call] = []
        receives: list[Call] = []
        for peer, connection in self._sockets:
            number, used[peer] = used[peer], used[peer] + 1
            sent = cut(collective, self._hosts, self._host, peer, nbytes // self._parts)
            received = cut(collective, self._hosts, peer, self._host, nbytes // self._parts)
            if sent.nbytes:
                if number == len(arrays):
                    arrays.append(np.ones(sent.whole, np.uint8))
                part = arrays[number][sent.low : sent.low + sent.nbytes]
                sends.append(partial(connection.sendall, part.data))
            if received.nbytes:
                receives.append(partial(receive, connection, mmap.mmap(-1, received.nbytes)))
        rewrite = partial(_write, arrays) if arrays else None
        if collective == "ping_pong":
            send, recv = (partial(self._run, moves, nbytes) for moves in (sends, receives))
            return there_and_back(send, recv, self._host % 2 == 0), rewrite
        return partial(self._run, [*sends, *receives], nbytes), rewrite

    def _run(self, moves: Sequence[Call], nbytes: int) -> None:
        """Make all moves of an operation of `nbytes`; in this thread, if none of them can block."""
        if nbytes <= FITS or len(moves) < 2:
            for move in moves:
                move()
        else:
            others = [self._pool.submit(move) for move in moves[1:]]
            moves[0]()
            for other in others:
                other.result()


def _write(arrays: Sequence[Bytes]) -> None:
    """Write arrays again without changing them."""
    for array in arrays:
        np.bitwise_or(array, 0, out=array)


def receive(connection: socket.socket, into: mmap.mmap) -> None:
    """Fill memory from a socket; EOFError if it ends before."""
    left = memoryview(into)
    while left:
        count = connection.recv_into(left, len(left), socket.MSG_WAITALL)
        if count == 0:
            raise EOFError("the other side has gone")
        left = left[count:]
