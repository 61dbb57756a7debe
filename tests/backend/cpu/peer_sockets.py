"""Connect ranks of several hosts to each other, each rank in a thread."""

from __future__ import annotations

from nc10d.backend.cpu.transport import addresses
from nc10d.backend.cpu.transport import connect as connect_module
from nc10d.backend.cpu.transport.connect import EndpointExchange, PeerSockets, connect
from nc10d.base.deadline import Deadline
from nc10d.store import HashStore


def nothing() -> None:
    pass


def endpoints(store: HashStore, rank: int) -> EndpointExchange:
    return EndpointExchange(store, addresses.own_address(store), "world", rank)


def join(store: HashStore, rank: int, size: int, timeout: float = 10.0) -> PeerSockets:
    peers = [r for r in range(size) if r != rank]
    return connect(endpoints(store, rank), peers, 2, Deadline.after(timeout), nothing)


def close(*made: PeerSockets) -> None:
    for some in made:
        connect_module.close_all(some)
