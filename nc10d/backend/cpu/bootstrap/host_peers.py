"""Bootstrap on a host: the ranks find each other and map each other's arenas.

The bootstrap happens once, when the first group forms. Each rank listens on an abstract Unix socket
(without a file) and publishes the socket's name in the store. Each pair of ranks exchanges
descriptors over a connection: the arena, and a pidfd, through which the kernel reports the rank's
death. The connections then serve as control connections. Both ends must run as the same user, and
prove that they know the secret in the store and the job's token, if there is one. The proof covers
the info that a rank has published: a change in the store is noticed.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import math
import os
import secrets
import select
import selectors
import socket
import struct
import time
from collections.abc import Generator
from typing import TYPE_CHECKING

from nc10d.auth.admission import Admission
from nc10d.auth.token import job_token
from nc10d.backend.cpu.bootstrap.rank_info import (
    RankInfo,
    as_text,
    exchange_infos,
    host_id,
    socket_timeout,
    version,
)
from nc10d.backend.cpu.engine.cpu_policy import own_thresholds, quota
from nc10d.backend.cpu.memory.arena import Arena, ArenaMapping
from nc10d.backend.cpu.memory.host_peer import HostPeer, process
from nc10d.base.deadline import Deadline, monotonic
from nc10d.base.text import ranks_text
from nc10d.base.wait_report import WaitReport
from nc10d.errors import RendezvousError, UnsupportedPlatform

if TYPE_CHECKING:
    from nc10d.store.base import Store


MAX_RANKS = 64
# Large, since strangers use it up, too: any user on the host may connect to an abstract socket.
BACKLOG = 4096
_RETRY_SECONDS = 0.005
_MOST_STRANGERS, _SLICE = 256, 0.05
_ENDED = ConnectionRefusedError, ConnectionResetError, BrokenPipeError
_GAVE_UP = "has ended or given up meanwhile; its output says why"


def map_peers(
    store: Store, rank: int, size: int, arena: Arena, deadline: Deadline, host: str | None = None
) -> tuple[list[HostPeer], list[RankInfo]]:
    """Map the arena of every rank on this host; return them, and all ranks' infos.

    Blocks until all ranks have called; RendezvousError once the deadline has passed.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        name = f"\0nc10d-{secrets.token_hex(16)}"
        listener.bind(name)
        listener.listen(BACKLOG)
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
        infos = exchange_infos(store, "ranks", mine, size, deadline)
        near = [info for info in infos if info.host_id == mine.host_id]
        if len(near) > MAX_RANKS:
            raise UnsupportedPlatform(
                f"at most {MAX_RANKS} ranks share a host, not {len(near)} as on {mine.host}"
            )
        own_pidfd = _pidfd()
        try:
            found = _exchange_all(listener, mine, infos, arena, own_pidfd, deadline)
        finally:
            os.close(own_pidfd)
    found.append(HostPeer(0, rank, mine.pid, mine.process, mine.host, arena.mapping, -1))
    found.sort(key=lambda peer: peer.number)
    for number, peer in enumerate(found):
        peer.rank = number
    return found, infos


def _pidfd() -> int:
    try:
        return os.pidfd_open(os.getpid())
    except (OSError, AttributeError) as error:
        raise UnsupportedPlatform(f"the cpu backend needs Linux 5.3 or newer: {error}") from error


def _exchange_all(
    listener: socket.socket,
    mine: RankInfo,
    infos: list[RankInfo],
    arena: Arena,
    pidfd: int,
    deadline: Deadline,
) -> list[HostPeer]:
    # Connect to lower ranks first, then accept from higher ranks: a connection completes against
    # the peer's backlog, so no two ranks wait for each other.
    called: list[tuple[RankInfo, socket.socket]] = []
    peers: list[HostPeer] = []
    report = WaitReport(f"rank {mine.rank} of {len(infos)}", deadline)
    try:
        near = [info for info in infos if info.host_id == mine.host_id]
        for info in near[: near.index(mine)]:
            link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            called.append((info, link))
            _connect(link, info, deadline)
            if not _same_user(link):  # before the peer gets this rank's memory
                raise ConnectionError(f"another user answers in the place of rank {info.rank}")
            _send(link, mine, info.secret, arena, pidfd)
        waiting = {info.rank for info in near[near.index(mine) + 1 :]}
        accepted = _accepted(listener, mine, infos, waiting, deadline, report)
        with contextlib.closing(accepted):
            for peer, link in accepted:
                peers.append(peer)
                link.settimeout(socket_timeout(deadline))
                _send(link, mine, infos[peer.number].secret, arena, pidfd)
        peers.extend(_receive(link, info, mine, deadline, report) for info, link in called)
    except BaseException as error:
        for peer in peers:
            peer.close()
        for _, link in called:
            link.close()
        if not isinstance(error, OSError):
            raise
        why = f"one of them {_GAVE_UP}" if isinstance(error, _ENDED) else error
        raise RendezvousError(
            f"rank {mine.rank} could not reach the other ranks of its host: {why}"
        ) from error
    for peer in peers:
        assert peer.wire is not None, "its hello came over that connection"
        peer.wire.setblocking(False)
    return peers


def _connect(link: socket.socket, info: RankInfo, deadline: Deadline) -> None:
    """Connect to a rank; `link`'s timeout is the time left until the deadline."""
    link.settimeout(socket_timeout(deadline))
    while True:
        try:
            link.connect("\0" + info.socket)
            return
        except BlockingIOError:  # strangers fill the backlog; the rank turns them away
            if deadline.expired():
                raise
            time.sleep(_RETRY_SECONDS)  # the kernel does not report room in a backlog


HELLO = struct.Struct("<I32s")


def _send(link: socket.socket, mine: RankInfo, secret: str, arena: Arena, pidfd: int) -> None:
    hello = HELLO.pack(mine.rank, proof_of(secret, mine))
    socket.send_fds(link, [hello], [arena.fd, pidfd])


def proof_of(secret: str, sender: RankInfo) -> bytes:
    """Return the sender's proof that it knows a rank's secret and the job's token, if any."""
    return hmac.digest(job_token() or b"", f"{secret} {as_text(sender)}".encode(), "sha256")


def _same_user(link: socket.socket) -> bool:
    peer = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", peer)
    return bool(uid == os.getuid())


def _accepted(
    listener: socket.socket,
    mine: RankInfo,
    infos: list[RankInfo],
    waiting: set[int],
    deadline: Deadline,
    report: WaitReport,
) -> Generator[tuple[HostPeer, socket.socket]]:
    """Yield each rank in `waiting` once a valid hello has come; turn strangers away.

    All connections are read at once, so silent strangers delay nobody.
    """
    listener.setblocking(False)
    unproven = Admission[socket.socket](_MOST_STRANGERS)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)

        def release(link: socket.socket) -> socket.socket:
            unproven.remove(link)
            selector.unregister(link)
            return link

        try:
            while waiting:
                report.look(lambda: _silent(sorted(waiting)))
                if deadline.expired():
                    raise _no_hello(report, sorted(waiting))
                for key, _ in selector.select(deadline.slice(_SLICE)):
                    link = key.fileobj
                    if link is listener:
                        came = _next_connection(listener)
                        if came is not None:
                            selector.register(came, selectors.EVENT_READ)
                            oldest = unproven.admit(came, monotonic())
                            if oldest is not None:
                                release(oldest).close()
                    elif isinstance(link, socket.socket) and link in unproven:
                        peer = _greeted(release(link), mine, infos, waiting)
                        if peer is not None:
                            waiting.discard(peer.number)
                            yield peer, link
                for late in unproven.overdue(monotonic()):
                    release(late).close()
        finally:
            for late in unproven.overdue(math.inf):
                late.close()


def _next_connection(listener: socket.socket) -> socket.socket | None:
    try:
        return listener.accept()[0]
    except (BlockingIOError, ConnectionError):  # the caller has gone meanwhile
        return None


def _greeted(
    link: socket.socket, mine: RankInfo, infos: list[RankInfo], waiting: set[int]
) -> HostPeer | None:
    """Return the peer whose hello has arrived; close the connection of anybody else."""
    peer = None
    try:
        peer = _read_hello(link, mine, infos, waiting)
    finally:
        if peer is None:
            link.close()
    return peer


def _read_hello(
    link: socket.socket, mine: RankInfo, infos: list[RankInfo], waiting: set[int]
) -> HostPeer | None:
    if not _same_user(link):
        return None
    try:
        hello, fds, flags, _ = socket.recv_fds(link, HELLO.size, 2, socket.MSG_CMSG_CLOEXEC)
    except OSError:  # the peer sends nothing, or has gone already
        return None
    rank, proof = HELLO.unpack(hello) if len(hello) == HELLO.size else (-1, b"")
    valid = rank in waiting and secrets.compare_digest(proof, proof_of(mine.secret, infos[rank]))
    if valid and len(fds) == 2:
        return _host_peer(infos[rank], fds, link)
    _refuse(fds, flags if valid else 0)
    return None


def _refuse(fds: list[int], flags: int) -> None:
    """Close descriptors; OSError if the kernel has dropped any, since this process has too many."""
    for fd in fds:
        os.close(fd)
    if flags & socket.MSG_CTRUNC:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def _silent(ranks: list[int]) -> str:
    return f"{ranks_text(ranks)} came, and then did not answer on this host: stopped, busy or dead"


def _no_hello(report: WaitReport, ranks: list[int]) -> RendezvousError:
    return RendezvousError(report.timed_out(_silent(ranks)), rank=ranks[0])


def _receive(
    link: socket.socket, info: RankInfo, mine: RankInfo, deadline: Deadline, report: WaitReport
) -> HostPeer:
    poller = select.poll()
    poller.register(link, select.POLLIN)
    while not poller.poll(deadline.slice(_SLICE) * 1000):
        if deadline.expired():
            raise _no_hello(report, [info.rank])
    hello, fds, flags, _ = socket.recv_fds(link, HELLO.size, 2, socket.MSG_CMSG_CLOEXEC)
    whole = len(hello) == HELLO.size and len(fds) == 2
    rank, proof = HELLO.unpack(hello) if whole else (-1, b"")
    if rank == info.rank and secrets.compare_digest(proof, proof_of(mine.secret, info)):
        return _host_peer(info, fds, link)
    _refuse(fds, flags)
    if not whole:
        raise ConnectionError(f"rank {info.rank} {_GAVE_UP}")
    raise ConnectionError(
        f"another process answered in the place of rank {info.rank}, or the store has been changed"
    )


def _host_peer(info: RankInfo, fds: list[int], link: socket.socket) -> HostPeer:
    memory, pidfd = fds
    mapping = ArenaMapping(memory)
    os.close(memory)
    return HostPeer(0, info.rank, info.pid, info.process, info.host, mapping, pidfd, link)
