"""How ranks of different hosts connect: once for a group, and then nobody listens any more.

Each rank listens on a port of its own address and puts both up for the others, with a secret: in
the store, or told over the control lines by those who go on after a death. Of two ranks the higher
one connects, once for each purpose. Both prove to each other (auth/handshake.py) that they know the
job's token, if it has one, and the secret of who is called.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nc10d.auth.handshake import Introduction, group_digest
from nc10d.auth.token import job_token, require_token
from nc10d.backend.cpu.transport.accept import Acceptor
from nc10d.backend.cpu.transport.congestion import tcp_socket
from nc10d.base.deadline import Deadline
from nc10d.errors import RendezvousError, StoreError
from nc10d.store.arrival import POLL_SECONDS, KeyValueExchange, wait_for_keys

# Strangers wait there too: they must not keep a rank from getting in.
_BACKLOG = 4096

Wires = dict[int, list[socket.socket]]
"""For each rank of another host its sockets, one for each purpose."""


@dataclass(frozen=True, slots=True)
class MeetingPoint:
    """Where a rank meets the others of a group: a board, the address it listens on, its `rank`."""

    board: KeyValueExchange
    address: str
    name: str
    rank: int

    def key(self, peer: int) -> str:
        """Return the key of a rank's door."""
        return f"door/{self.name}/{peer}"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a rank listens, and what a caller must know, in hexadecimal digits."""

    address: str
    port: int
    secret: str

    def key(self) -> bytes:
        """Return the key of this door's handshakes."""
        return hmac.digest(job_token() or b"", bytes.fromhex(self.secret), "sha256")


def connect(
    place: MeetingPoint,
    away: Sequence[int],
    purposes: int,
    deadline: Deadline,
    check: Callable[[], None],
) -> Wires:
    """Connect to the ranks `away`, which do the same on the same board under the same name.

    Blocks until all have. `check` is called meanwhile, and raises what makes waiting pointless.
    AuthError if the job has no token and this rank's address is not its machine's alone.
    """
    name, rank = place.name, place.rank
    require_token(place.address, f"the port of rank {rank}")
    every = [(peer, purpose) for peer in away for purpose in range(purposes)]
    with _listener(place.address) as listener:
        address, port = listener.getsockname()[:2]
        mine = Endpoint(address, port, os.urandom(32).hex())
        key = mine.key()
        place.board.set(place.key(rank), json.dumps([mine.address, mine.port, mine.secret]))
        awaited = {one for one in every if one[0] > rank}
        greeting = Acceptor(listener, key, rank, group_digest(name), awaited)

        def look() -> None:
            check()
            if deadline.expired():
                raise RendezvousError(_late(rank, every, greeting.made), group=name)

        def wait() -> None:
            greeting.turn(0.0)  # strangers come as soon as there is a door
            check()

        try:
            doors = _doors(place, away, deadline, wait)
            _call_lower(greeting, doors, rank, every, name)
            greeting.run(look)
        except StoreError:
            raise
        except OSError as error:
            message = f"rank {rank} could not reach the other hosts of {name!r}: {error}"
            raise RendezvousError(message, rank=rank, group=name) from error
        finally:
            made = greeting.close()
    return {peer: [_ready(made[peer, one]) for one in range(purposes)] for peer in away}


def _call_lower(
    greeting: Acceptor,
    doors: dict[int, Endpoint],
    rank: int,
    every: Sequence[tuple[int, int]],
    name: str,
) -> None:
    for peer, purpose in every:
        if peer < rank:
            door = doors[peer]
            who = Introduction(rank, peer, purpose, group_digest(name))
            greeting.call((door.address, door.port), door.key(), who)


def _late(
    rank: int, every: Sequence[tuple[int, int]], made: dict[tuple[int, int], socket.socket]
) -> str:
    missing = sorted({peer for peer, purpose in every if (peer, purpose) not in made})
    return f"rank {rank} waited in vain for its connections with ranks {missing}"


def close_wires(wires: Wires) -> None:
    """Close all sockets."""
    for sockets in wires.values():
        for wire in sockets:
            wire.close()


def _listener(address: str) -> socket.socket:
    listener = tcp_socket(address)
    try:
        listener.bind((address, 0))
    except OSError as error:
        listener.close()
        raise RendezvousError(f"can't listen on {address}: {error}") from error
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


def _doors(
    place: MeetingPoint, away: Sequence[int], deadline: Deadline, check: Callable[[], None]
) -> dict[int, Endpoint]:
    keys = [place.key(peer) for peer in away]
    while not wait_for_keys(place.board, keys, POLL_SECONDS):
        check()
        if deadline.expired():
            raise RendezvousError(_absent(place, away))
    raw = place.board.multi_get(keys)
    return {peer: Endpoint(*json.loads(text)) for peer, text in zip(away, raw, strict=True)}


def _absent(place: MeetingPoint, away: Sequence[int]) -> str:
    missing = [peer for peer in away if not place.board.check([place.key(peer)])]
    return f"rank {place.rank} waits for ranks {missing} of other hosts to join {place.name!r}"


def _ready(wire: socket.socket) -> socket.socket:
    wire.setblocking(False)
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return wire
