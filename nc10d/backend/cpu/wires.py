"""How ranks of different hosts connect: once for a group, and then nobody listens any more.

Each rank listens on a port of its own address and puts both into the store, with a secret. Of two
ranks the higher one connects, once for each purpose, and says who it is; who knows the secret has
read it in the store. Strangers are turned away.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import select
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nc10d.backend.cpu.interfaces import own_address
from nc10d.deadline import Deadline
from nc10d.errors import RendezvousError, StoreTimeout

if TYPE_CHECKING:
    from nc10d.store.base import Store

_HELLO = struct.Struct("<8sII32s32s")
_MAGIC = b"nc10d-1\n"
_STRANGER_SECONDS = 2.0
_SLICE = 0.05

Wires = dict[int, list[socket.socket]]
"""For each rank of another host its sockets, one for each purpose."""


@dataclass(frozen=True, slots=True)
class Door:
    """Where a rank listens, and what it lets in."""

    address: str
    port: int
    secret: str


def connect(
    store: Store,
    name: str,
    rank: int,
    away: Sequence[int],
    purposes: int,
    deadline: Deadline,
    check: Callable[[], None],
) -> Wires:
    """Connect to the ranks `away`, which do the same in the same store under the same name.

    Blocks until all have. `check` is called meanwhile, and raises what makes waiting pointless.
    """
    with _listener(own_address(store), purposes * len(away)) as listener:
        address, port = listener.getsockname()[:2]
        mine = Door(address, port, secrets.token_hex(16))
        store.set(f"door/{name}/{rank}", json.dumps([mine.address, mine.port, mine.secret]))
        doors = _doors(store, name, rank, away, deadline, check)
        wires: Wires = {peer: [] for peer in away}
        try:
            for peer in away:
                if peer < rank:
                    for purpose in range(purposes):
                        wires[peer].append(_call(doors[peer], rank, purpose, name, deadline))
            higher = {
                (peer, purpose) for peer in away if peer > rank for purpose in range(purposes)
            }
            _answer(listener, mine, name, higher, wires, deadline, check)
        except BaseException as error:
            close(wires)
            if not isinstance(error, OSError):
                raise
            message = f"rank {rank} could not reach the other hosts of {name!r}: {error}"
            raise RendezvousError(message, rank=rank, group=name) from error
    return wires


def close(wires: Wires) -> None:
    """Close all sockets."""
    for sockets in wires.values():
        for wire in sockets:
            wire.close()


def _listener(address: str, backlog: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.bind((address, 0))
    except OSError as error:
        listener.close()
        raise RendezvousError(f"can't listen on {address}: {error}") from error
    listener.listen(max(backlog, 8))
    listener.setblocking(False)
    return listener


def _doors(
    store: Store,
    name: str,
    rank: int,
    away: Sequence[int],
    deadline: Deadline,
    check: Callable[[], None],
) -> dict[int, Door]:
    keys = [f"door/{name}/{peer}" for peer in away]
    for _ in _slices(deadline, check, lambda: _absent(store, name, rank, away)):
        try:
            store.wait(keys, _SLICE)
            break
        except StoreTimeout:
            continue
    raw = store.multi_get(keys)
    return {peer: Door(*json.loads(text)) for peer, text in zip(away, raw, strict=True)}


def _absent(store: Store, name: str, rank: int, away: Sequence[int]) -> str:
    missing = [peer for peer in away if not store.check([f"door/{name}/{peer}"])]
    return f"rank {rank} waits for ranks {missing} of other hosts to join {name!r}"


def _slices(
    deadline: Deadline, check: Callable[[], None], late: Callable[[], str]
) -> Iterator[None]:
    """Go on until the deadline; then raise what `late` says."""
    while True:
        yield
        check()
        if deadline.expired():
            raise RendezvousError(late())


def _call(door: Door, rank: int, purpose: int, name: str, deadline: Deadline) -> socket.socket:
    family = socket.AF_INET6 if ":" in door.address else socket.AF_INET
    wire = socket.socket(family, socket.SOCK_STREAM)
    try:
        wire.settimeout(max(deadline.slice(60.0), 0.001))
        wire.connect((door.address, door.port))
        wire.sendall(_HELLO.pack(_MAGIC, rank, purpose, _digest(name), door.secret.encode()))
    except OSError:
        wire.close()
        raise
    return _ready(wire)


def _answer(
    listener: socket.socket,
    mine: Door,
    name: str,
    waiting: set[tuple[int, int]],
    wires: Wires,
    deadline: Deadline,
    check: Callable[[], None],
) -> None:
    """Take the calls of all that are waited for, in whatever order they come."""
    came: dict[tuple[int, int], socket.socket] = {}
    try:
        for _ in _slices(deadline, check, lambda: f"ranks {_ranks(waiting)} did not connect"):
            while waiting and select.select([listener], [], [], _SLICE)[0]:
                wire, _address = listener.accept()
                who = _introduced(wire, mine, name, waiting)
                if who is None:
                    wire.close()
                else:
                    waiting.discard(who)
                    came[who] = _ready(wire)
            if not waiting:
                break
    except BaseException:
        for wire in came.values():
            wire.close()
        raise
    for peer, _purpose in sorted(came):
        wires[peer].append(came[peer, _purpose])


def _ranks(waiting: set[tuple[int, int]]) -> list[int]:
    return sorted({peer for peer, _ in waiting})


def _introduced(
    wire: socket.socket, mine: Door, name: str, waiting: set[tuple[int, int]]
) -> tuple[int, int] | None:
    """Return (rank, purpose) of a caller that may come in, or None."""
    wire.settimeout(_STRANGER_SECONDS)
    try:
        raw = wire.recv(_HELLO.size, socket.MSG_WAITALL)
    except OSError:
        return None
    if len(raw) != _HELLO.size:
        return None
    magic, rank, purpose, digest, secret = _HELLO.unpack(raw)
    proper = secrets.compare_digest(secret, mine.secret.encode())
    if not proper or magic != _MAGIC or digest != _digest(name):
        return None
    return (rank, purpose) if (rank, purpose) in waiting else None


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def _ready(wire: socket.socket) -> socket.socket:
    wire.setblocking(False)
    wire.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return wire
