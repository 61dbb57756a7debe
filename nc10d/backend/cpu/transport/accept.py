"""The handshakes of a rank with the ranks of other hosts, all at once, on one loop.

Calls that this rank makes and calls that it takes go on side by side, so neither a slow rank nor a
stranger keeps the others waiting. A stranger is cut off as soon as it says something else than a
rank would, or after two seconds; `MOST_STRANGERS` are listened to at a time.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from nc10d.auth.admission import Admission
from nc10d.auth.handshake import BadHandshake, HandshakeAnswerer, HandshakeCaller, Introduction
from nc10d.backend.cpu.transport.congestion import tcp_socket

MOST_STRANGERS = 256
_AT_ONCE = 64  # fewer than MOST_STRANGERS: who comes in one go is heard before it has to go
_SLICE = 0.05
_UNDER_WAY = (0, errno.EINPROGRESS)


@dataclass(slots=True, eq=False)
class PendingHandshake:
    """One handshake under way; `peer` and `purpose` are known from the start if this rank calls."""

    wire: socket.socket
    side: HandshakeCaller | HandshakeAnswerer
    peer: int = -1
    purpose: int = -1
    greeted: bool = True


class Acceptor:
    """Calls some ranks and takes calls on a listener, until all `awaited` ones have been taken.

    `awaited` are (rank, purpose) pairs; `key` proves that a caller belongs here, and `me` and
    `group` that it means this rank. Finished connections are in `made`, by (rank, purpose).
    """

    def __init__(
        self,
        listener: socket.socket,
        key: bytes,
        me: int,
        group: bytes,
        awaited: set[tuple[int, int]],
    ) -> None:
        self.made: dict[tuple[int, int], socket.socket] = {}
        self._awaited = awaited
        self._calling = 0
        self._strangers = Admission[PendingHandshake](MOST_STRANGERS)
        self._listener, self._key, self._me, self._group = listener, key, me, group
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)

    def call(self, address: tuple[str, int], key: bytes, who: Introduction) -> None:
        """Begin to call the rank `who.peer`; OSError if that can't be done."""
        wire = tcp_socket(address[0])
        wire.setblocking(False)
        talk = PendingHandshake(
            wire, HandshakeCaller(key, who), who.peer, who.purpose, greeted=False
        )
        self._calling += 1
        self._selector.register(wire, selectors.EVENT_WRITE, talk)
        answer = wire.connect_ex(address)
        if answer not in _UNDER_WAY:
            raise OSError(answer, os.strerror(answer))

    def run(self, look: Callable[[], None]) -> None:
        """Block until all calls have been made and taken; `look` raises what ends this earlier."""
        while self._calling or self._awaited:
            self.turn(_SLICE)
            look()

    def turn(self, patience: float) -> None:
        """Go on with whoever is ready; blocks for at most so many seconds until somebody is."""
        for key, _ in self._selector.select(patience):
            if key.data is None:
                self._accept()
            elif key.data.wire.fileno() >= 0:  # not cut off in this very round
                self._go_on(key.data)
        for talk in self._strangers.overdue(time.monotonic()):
            self._cut_off(talk)

    def close(self) -> dict[tuple[int, int], socket.socket]:
        """Close what has not become a connection, or all if something is missing; return `made`."""
        unfinished = [key.data.wire for key in self._selector.get_map().values() if key.data]
        if self._calling or self._awaited:
            unfinished += self.made.values()
        for wire in unfinished:
            wire.close()
        self._selector.close()
        return self.made

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                wire, _ = self._listener.accept()
            except OSError:  # nobody, or somebody who was gone before we came to it
                return
            self._listen_to(wire)

    def _listen_to(self, wire: socket.socket) -> None:
        wire.setblocking(False)
        talk = PendingHandshake(wire, HandshakeAnswerer(self._key, self._accepts))
        self._selector.register(wire, selectors.EVENT_READ, talk)
        eldest = self._strangers.admit(talk, time.monotonic())
        if eldest is not None:
            self._cut_off(eldest)

    def _accepts(self, who: Introduction) -> bool:
        expected = (who.rank, who.purpose) in self._awaited
        return expected and who.peer == self._me and who.group == self._group

    def _go_on(self, talk: PendingHandshake) -> None:
        try:
            self._step(talk)
        except BlockingIOError:
            return
        except (OSError, BadHandshake) as error:
            if isinstance(talk.side, HandshakeCaller):
                raise _refused(talk, error) from error
            self._cut_off(talk)
            return
        if not talk.side.wants:
            self._finish(talk)

    def _step(self, talk: PendingHandshake) -> None:
        if isinstance(talk.side, HandshakeCaller) and not talk.greeted:
            failed = talk.wire.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if failed:
                raise OSError(failed, os.strerror(failed))
            talk.wire.sendall(talk.side.hello)
            talk.greeted = True
            self._selector.modify(talk.wire, selectors.EVENT_READ, talk)
            return
        data = talk.wire.recv(talk.side.wants)
        if not data:
            raise ConnectionResetError("it closed the connection")
        # A fresh connection has room for these few bytes.
        talk.wire.sendall(talk.side.feed(data))

    def _finish(self, talk: PendingHandshake) -> None:
        self._selector.unregister(talk.wire)
        if isinstance(talk.side, HandshakeAnswerer):
            self._strangers.remove(talk)
            assert talk.side.introduction is not None
            talk.peer, talk.purpose = talk.side.introduction.rank, talk.side.introduction.purpose
            if (talk.peer, talk.purpose) not in self._awaited:  # it has come twice meanwhile
                talk.wire.close()
                return
            self._awaited.discard((talk.peer, talk.purpose))
        else:
            self._calling -= 1
        self.made[talk.peer, talk.purpose] = talk.wire

    def _cut_off(self, talk: PendingHandshake) -> None:
        self._strangers.remove(talk)
        self._selector.unregister(talk.wire)
        talk.wire.close()


def _refused(talk: PendingHandshake, error: Exception) -> OSError:
    why = getattr(error, "strerror", None) or str(error)
    if isinstance(error, BadHandshake):
        why += (
            " (do all processes of the job have the same token, NC10D_TOKEN_FILE or NC10D_TOKEN?)"
        )
    return ConnectionError(f"rank {talk.peer}: {why}")
