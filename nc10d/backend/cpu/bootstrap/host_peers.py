"""How the ranks of one host find and map each other: once, when the first group forms.

Each rank listens on an abstract Unix socket (no file), tells its name through the store, and
exchanges two descriptors with every other: its arena, and a pidfd of itself, which tells the
kernel's word on its death. The connections stay, as control lines. Who connects, and who answers,
must run as the same user and know the secret that is in the store, and the job's token if it has
one.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import socket
import struct
import time
from typing import TYPE_CHECKING

from nc10d.auth.token import job_token
from nc10d.backend.cpu.bootstrap.rank_info import (
    RankInfo,
    exchange_cards,
    host_id,
    patience,
    version,
)
from nc10d.backend.cpu.engine.cpu_policy import own_thresholds, quota
from nc10d.backend.cpu.memory.arena import Arena, ArenaMapping
from nc10d.backend.cpu.memory.host_peer import HostPeer, process
from nc10d.base.deadline import Deadline
from nc10d.errors import RendezvousError, UnsupportedPlatform

if TYPE_CHECKING:
    from nc10d.store.base import Store


MAX_RANKS = 64
# Strangers wait there too: any user of the host may connect to an abstract socket.
_BACKLOG = 4096
_AGAIN = 0.005


def meet(store: Store, rank: int, size: int, arena: Arena, deadline: Deadline) -> list[HostPeer]:
    """Map the arena of every rank of this host; see `gather`."""
    return gather(store, rank, size, arena, deadline)[0]


def gather(
    store: Store,
    rank: int,
    size: int,
    arena: Arena,
    deadline: Deadline,
    host: str | None = None,
) -> tuple[list[HostPeer], list[RankInfo]]:
    """Map the arena of every rank of this host; return these, and the cards of all ranks.

    Blocks until all ranks have come or the deadline has passed.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        name = f"\0nc10d-{secrets.token_hex(16)}"
        listener.bind(name)
        listener.listen(_BACKLOG)
        thresholds = own_thresholds()
        mine = RankInfo(
            rank,
            host or host_id(),
            socket.gethostname(),
            os.getpid(),
            name[1:],
            secrets.token_hex(16),
            version(),
            process(),
            sorted(os.sched_getaffinity(0)),
            quota(),
            thresholds.read_from,
            thresholds.write_from,
        )
        cards = exchange_cards(store, "mates", mine, size, deadline)
        _fitting(cards, mine)
        own_pidfd = _pidfd()
        try:
            found = _exchange_all(listener, mine, cards, arena, own_pidfd, deadline)
        finally:
            os.close(own_pidfd)
    found.append(HostPeer(0, rank, mine.pid, mine.process, mine.host, arena.mapping, -1))
    found.sort(key=lambda mate: mate.number)
    for number, mate in enumerate(found):
        mate.rank = number
    return found, cards


def _pidfd() -> int:
    try:
        return os.pidfd_open(os.getpid())
    except (OSError, AttributeError) as error:
        raise UnsupportedPlatform(f"the cpu backend needs Linux 5.3 or newer: {error}") from error


def _fitting(cards: list[RankInfo], mine: RankInfo) -> None:
    near = [card for card in cards if card.host_id == mine.host_id]
    if len(near) > MAX_RANKS:
        raise UnsupportedPlatform(
            f"at most {MAX_RANKS} ranks share a host, not {len(near)} as on {mine.host}"
        )


def _exchange_all(
    listener: socket.socket,
    mine: RankInfo,
    cards: list[RankInfo],
    arena: Arena,
    pidfd: int,
    deadline: Deadline,
) -> list[HostPeer]:
    # Connect to lower ranks first, then accept the higher ones: a connection completes against
    # the peer's backlog, so nobody waits for somebody who waits for him.
    calls: list[tuple[RankInfo, socket.socket]] = []
    mates: list[HostPeer] = []
    try:
        near = [card for card in cards if card.host_id == mine.host_id]
        for card in near[: near.index(mine)]:
            link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            calls.append((card, link))
            _connect(link, card, deadline)
            if not _same_user(link):  # before it gets hold of my memory
                raise ConnectionError(f"another user answers in the place of rank {card.rank}")
            _send(link, mine, card.secret, arena, pidfd)
        waiting = {card.rank for card in near[near.index(mine) + 1 :]}
        while waiting:
            mate, link = _accept(listener, mine, cards, waiting, deadline)
            mates.append(mate)
            _send(link, mine, cards[mate.number].secret, arena, pidfd)
            waiting.discard(mate.number)
        mates.extend(_receive(link, card, mine.secret, deadline) for card, link in calls)
    except BaseException as error:
        for mate in mates:
            mate.close()
        for _, link in calls:
            link.close()
        if not isinstance(error, OSError):
            raise
        raise RendezvousError(
            f"rank {mine.rank} could not reach its host mates: {error}"
        ) from error
    for mate in mates:
        assert mate.wire is not None, "who has introduced itself has done so there"
        mate.wire.setblocking(False)
    return mates


def _connect(link: socket.socket, card: RankInfo, deadline: Deadline) -> None:
    """Connect to a rank, and have `link` wait no longer than until the deadline from then on."""
    link.settimeout(patience(deadline))
    while True:
        try:
            link.connect("\0" + card.socket)
            return
        except BlockingIOError:  # strangers have taken all places; the rank turns them away
            if deadline.expired():
                raise
            time.sleep(_AGAIN)  # nobody tells us when there is room: ask again


_HELLO = struct.Struct("<I32s")


def _send(link: socket.socket, mine: RankInfo, secret: str, arena: Arena, pidfd: int) -> None:
    hello = _HELLO.pack(mine.rank, _shown(secret))
    socket.send_fds(link, [hello], [arena.fd, pidfd])


def _shown(secret: str) -> bytes:
    """Return what proves that somebody knows a rank's secret and the job's token, if it has one."""
    return hmac.digest(job_token() or b"", secret.encode(), "sha256")


def _same_user(link: socket.socket) -> bool:
    peer = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", peer)
    return bool(uid == os.getuid())


def _accept(
    listener: socket.socket,
    mine: RankInfo,
    cards: list[RankInfo],
    waiting: set[int],
    deadline: Deadline,
) -> tuple[HostPeer, socket.socket]:
    """Return the next rank that introduces itself properly; strangers are turned away."""
    while True:
        listener.settimeout(patience(deadline))
        try:
            link, _ = listener.accept()
        except TimeoutError as error:
            raise _silent(sorted(waiting)) from error
        link.settimeout(min(2.0, patience(deadline)))
        mate = None
        try:
            mate = _introduce(link, mine, cards, waiting)
        finally:
            if mate is None:
                link.close()
        if mate is not None:
            return mate, link


def _introduce(
    link: socket.socket, mine: RankInfo, cards: list[RankInfo], waiting: set[int]
) -> HostPeer | None:
    if not _same_user(link):
        return None
    try:
        hello, fds, flags, _ = socket.recv_fds(link, _HELLO.size, 2, socket.MSG_CMSG_CLOEXEC)
    except OSError:  # it says nothing, or has gone already
        return None
    rank, secret = _HELLO.unpack(hello) if len(hello) == _HELLO.size else (-1, b"")
    proper = secrets.compare_digest(secret, _shown(mine.secret))
    if proper and rank in waiting and len(fds) == 2:
        return _mate(cards[rank], fds, link)
    _close(fds)
    if proper:
        _demand_all(flags)
    return None


def _close(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _demand_all(flags: int) -> None:
    """Raise OSError if the kernel had to leave out descriptors that a rank has sent."""
    if flags & socket.MSG_CTRUNC:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def _silent(ranks: list[int]) -> RendezvousError:
    message = f"ranks {ranks} came, but did not introduce themselves to their host mates in time"
    return RendezvousError(message, rank=ranks[0])


def _receive(link: socket.socket, card: RankInfo, secret: str, deadline: Deadline) -> HostPeer:
    link.settimeout(patience(deadline))
    try:
        hello, fds, flags, _ = socket.recv_fds(link, _HELLO.size, 2, socket.MSG_CMSG_CLOEXEC)
    except TimeoutError as error:
        raise _silent([card.rank]) from error
    whole = len(hello) == _HELLO.size and len(fds) == 2
    rank, shown = _HELLO.unpack(hello) if whole else (-1, b"")
    if rank == card.rank and secrets.compare_digest(shown, _shown(secret)):
        return _mate(card, fds, link)
    _close(fds)
    _demand_all(flags)
    if not whole:
        raise ConnectionError(f"rank {card.rank} closed the connection")
    raise ConnectionError(f"somebody else answered in the place of rank {card.rank}")


def _mate(card: RankInfo, fds: list[int], link: socket.socket) -> HostPeer:
    memory, pidfd = fds
    mapping = ArenaMapping(memory)
    os.close(memory)
    return HostPeer(0, card.rank, card.pid, card.process, card.host, mapping, pidfd, link)
