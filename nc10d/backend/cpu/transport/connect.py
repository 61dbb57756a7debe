"""Connections between a group's ranks on different hosts; made once, when the group forms.

Each rank listens on a port at its own address, and publishes address, port and a secret: in the
store, or over control connections where survivors form a new group. Of two ranks the higher
connects, once for each purpose. Both prove to each other (auth/handshake.py) that they know the
secret of the rank that is called and the job's token, if there is one. Afterwards the ports are
closed.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nc10d.auth.handshake import Introduction, group_digest
from nc10d.auth.token import job_token, require_token
from nc10d.backend.cpu.transport.accept import Acceptor
from nc10d.backend.cpu.transport.addresses import tcp_socket
from nc10d.base.deadline import Deadline
from nc10d.base.stored import read_json, whole
from nc10d.base.text import ranks_text
from nc10d.base.wait_report import WaitReport
from nc10d.errors import RendezvousError, StoreError
from nc10d.store.arrival import KeyValueExchange, await_ranks

# Large, since strangers use it up, too: they must not keep a rank from connecting.
_BACKLOG = 4096
_SECRET_BYTES = 32

PeerSockets = dict[int, list[socket.socket]]
"""The sockets to each rank on another host, by purpose."""


@dataclass(frozen=True, slots=True)
class EndpointExchange:
    """How a rank in a group publishes its endpoint, and finds the other ranks' endpoints."""

    # `exchange` carries them, `address` is where `rank` listens, `name` is the group's. `terms` is
    # a text that both ends of a connection must hold for true.

    exchange: KeyValueExchange
    address: str
    name: str
    rank: int
    terms: str = ""

    def key(self, peer: int) -> str:
        """Return the key for a rank's endpoint."""
        return f"endpoint/{self.name}/{peer}"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address and port where a rank listens; callers must know `secret` (hexadecimal)."""

    address: str
    port: int
    secret: str

    def key(self) -> bytes:
        """Return the key for handshakes with this endpoint."""
        return hmac.digest(job_token() or b"", bytes.fromhex(self.secret), "sha256")


def connect(
    endpoints: EndpointExchange,
    peers: Sequence[int],
    purposes: int,
    deadline: Deadline,
    check: Callable[[], None],
) -> PeerSockets:
    """Connect to the ranks `peers`, which call this with the same exchange and name.

    Blocks until all are connected. `check` is called meanwhile; `check` may raise to end the wait.
    RendezvousError if a rank does not come before the deadline, or can't be reached. AuthError if
    the job has no token and other machines can reach this rank's address.
    """
    name, rank = endpoints.name, endpoints.rank
    group = group_digest(name + endpoints.terms)
    require_token(endpoints.address, f"the port of rank {rank}")
    links = [(peer, purpose) for peer in peers for purpose in range(purposes)]
    with _listener(endpoints.address) as listener:
        address, port = listener.getsockname()[:2]
        mine = Endpoint(address, port, os.urandom(_SECRET_BYTES).hex())
        # Published only once the port is open: a peer connects as soon as it reads this.
        published = json.dumps([mine.address, mine.port, mine.secret])
        endpoints.exchange.set(endpoints.key(rank), published)
        # A fixed direction: two ranks that called each other would make two connections.
        awaited = {link for link in links if link[0] > rank}
        acceptor = Acceptor(listener, mine.key(), rank, group, awaited)

        report = WaitReport(f"rank {rank} of {name!r}", deadline)

        def unconnected() -> str:
            missing = sorted({link[0] for link in links if link not in acceptor.made})
            return f"no connection to {ranks_text(missing)} on another host"

        def check_time() -> None:
            check()
            report.look(unconnected)
            if deadline.expired():
                raise RendezvousError(report.timed_out(unconnected()), group=name)

        def check_strangers() -> None:
            # Strangers may come as soon as the port is open: they must not pile up meanwhile.
            acceptor.turn(0.0)
            check()

        complete = False
        try:
            found = _read_endpoints(endpoints, peers, report, deadline, check_strangers)
            for peer, purpose in links:
                if peer < rank:
                    there, introduction = found[peer], Introduction(rank, peer, purpose, group)
                    acceptor.call((there.address, there.port), there.key(), introduction)
            acceptor.run(check_time)
            complete = True
        except StoreError:  # an OSError as well, but its text already explains it
            raise
        except OSError as error:
            message = f"rank {rank} could not reach the other hosts of {name!r}: {error}"
            raise RendezvousError(message, rank=rank, group=name) from error
        finally:
            # Also after an error: the port and unfinished sockets must not outlive this call.
            made = acceptor.close(keep=complete)
    return {peer: [_ready(made[peer, purpose]) for purpose in range(purposes)] for peer in peers}


def close_all(sockets: PeerSockets) -> None:
    """Close all sockets."""
    for links in sockets.values():
        for wire in links:
            wire.close()


def _listener(address: str) -> socket.socket:
    listener = tcp_socket(address)
    try:
        # Port 0: the kernel chooses a free port, so jobs on the same host do not collide.
        listener.bind((address, 0))
    except OSError as error:
        listener.close()
        raise RendezvousError(f"can't listen on {address}: {error}") from error
    listener.listen(_BACKLOG)
    # A connection may vanish between the event and `accept`, which would then block.
    listener.setblocking(False)
    return listener


def _read_endpoints(
    endpoints: EndpointExchange,
    peers: Sequence[int],
    report: WaitReport,
    deadline: Deadline,
    check: Callable[[], None],
) -> dict[int, Endpoint]:
    exchange, keys = endpoints.exchange, [endpoints.key(peer) for peer in peers]

    def missing(places: Sequence[int]) -> str:
        absent = ranks_text([peers[place] for place in places])
        return f"{absent} on another host did not come to {endpoints.name!r}"

    await_ranks(exchange, keys, report, missing, deadline, check)
    raw = zip(peers, keys, exchange.multi_get(keys), strict=True)
    return {peer: read_json(key, text, _endpoint) for peer, key, text in raw}


def _endpoint(value: Any) -> Endpoint:
    """Return an endpoint from its JSON; ValueError or TypeError if malformed."""
    address, port, secret = value
    if not isinstance(address, str) or len(bytes.fromhex(secret)) != _SECRET_BYTES:
        raise ValueError("no endpoint")
    ipaddress.ip_address(address)
    return Endpoint(address, whole(port, 1, (1 << 16) - 1), secret)


def _ready(wire: socket.socket) -> socket.socket:
    wire.setblocking(False)
    # Nagle would hold a small message back until the last is acknowledged.
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return wire
