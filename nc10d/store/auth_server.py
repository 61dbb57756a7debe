"""A server that serves only those who know the job's token.

A connection begins as a guest's: of a guest at most 116 bytes are read, and within 2 seconds it has
shown that it knows the token, or its connection is closed. Guests beyond `MOST_GUESTS` push out
those who have been here longest. Afterwards requests and replies travel in sealed frames.
"""

from __future__ import annotations

import socket
import time

from nc10d.auth.admission import Admission
from nc10d.auth.handshake import (
    BadHandshake,
    BadSeal,
    HandshakeAnswerer,
    Introduction,
    Opener,
    Sealer,
    group_digest,
)
from nc10d.store.server import Connection, Server
from nc10d.store.wire import Limits

MOST_GUESTS = 1024
WHO = Introduction(0, 0, 0, group_digest("store"))
"""How every client of a store introduces itself: the server knows no ranks."""


class AuthConnection(Connection):
    """A client's connection, of a guest until its handshake has ended."""

    __slots__ = ("answerer", "opener", "sealer")
    opener: Opener
    sealer: Sealer

    def __init__(self, sock: socket.socket, limits: Limits, token: bytes) -> None:
        super().__init__(sock, limits)
        self.answerer = HandshakeAnswerer(token, WHO.__eq__)


class AuthServer(Server):
    """A Server whose clients know `token`; the other arguments are Server's."""

    def __init__(
        self, listener: socket.socket, owner: int | None, limits: Limits, token: bytes
    ) -> None:
        super().__init__(listener, owner, limits)
        self._token = token
        self._guests = Admission[Connection](MOST_GUESTS)

    def _connection(self, sock: socket.socket) -> Connection:
        connection = AuthConnection(sock, self._limits, self._token)
        eldest = self._guests.welcome(connection, time.monotonic())
        if eldest is not None:
            self._drop(eldest)
        return connection

    def _patience(self) -> float | None:
        """Turn away the guests whose time is over; return the time until the next one's is."""
        now = time.monotonic()
        for guest in self._guests.late(now):
            self._drop(guest)
        patience = self._guests.patience(now)
        return None if patience is None else patience * self._second

    def _read(self, connection: Connection) -> None:
        assert isinstance(connection, AuthConnection)
        if connection in self._guests:
            self._greet(connection)
        else:
            super()._read(connection)

    def _greet(self, guest: AuthConnection) -> None:
        answerer = guest.answerer
        try:
            data = guest.recv(answerer.wants)
            answer = answerer.feed(data) if data else b""
            # A few bytes to somebody who has sent us as much: there is room.
            gone = not data or (answer and guest.send(answer) != len(answer))
        except BlockingIOError:
            return
        except (OSError, BadHandshake):
            gone = True
        if gone:
            self._drop(guest)
        elif answerer.keys is not None:
            guest.sealer = Sealer(answerer.keys.sending)
            guest.opener = Opener(answerer.keys.taking)
            self._guests.leave(guest)

    def _take(self, connection: Connection, data: bytes) -> None:
        assert isinstance(connection, AuthConnection)
        try:
            opened = connection.opener.feed(data)
        except BadSeal:
            self._drop(connection)
            return
        if opened:
            super()._take(connection, opened)

    def _send(self, connection: Connection, data: bytes | None) -> None:
        assert isinstance(connection, AuthConnection)
        super()._send(connection, None if data is None else connection.sealer.seal(data))

    def _drop(self, connection: Connection) -> None:
        self._guests.leave(connection)
        super()._drop(connection)
