"""A store's server that serves only clients that know the job's token.

A new connection is unproven. The server reads at most 116 bytes, and closes the connection unless
the client proves within 10 seconds that the client knows the token. A client that begins without a
token is told so. After the handshake, requests and replies travel in sealed frames.

With `same_user`, a client that speaks torch's protocol is served too, without token and seals, if
the kernel says that a process of this server's user on this machine is at the other end.
"""

from __future__ import annotations

import os
import socket

from nc10d.auth import handshake
from nc10d.store.peer_user import peer_uid
from nc10d.store.server import Connection, Server
from nc10d.store.wire import NEEDS_TOKEN, VALIDATE, Limits

STORE_INTRODUCTION = handshake.Introduction(0, 0, 0, handshake.group_digest("store"))
"""The introduction of every client of a store: the server knows no ranks."""


class AuthConnection(Connection):
    """A client's connection; unproven until the handshake has ended. A plain one has no seals."""

    __slots__ = ("answerer", "opener", "sealer")
    opener: handshake.Opener | None
    sealer: handshake.Sealer | None

    def __init__(self, sock: socket.socket, limits: Limits, token: bytes) -> None:
        super().__init__(sock, limits)
        self.answerer = handshake.HandshakeAnswerer(token, STORE_INTRODUCTION.__eq__)


class AuthServer(Server):
    """A Server whose clients must know `token`; the other arguments are Server's."""

    def __init__(
        self,
        listener: socket.socket,
        owner: int | None,
        limits: Limits,
        token: bytes,
        same_user: bool = False,
    ) -> None:
        super().__init__(listener, owner, limits)
        self._same_user = same_user
        self._token = token

    def _connection(self, sock: socket.socket) -> Connection:
        return AuthConnection(sock, self._limits, self._token)

    def _read(self, connection: Connection) -> None:
        assert isinstance(connection, AuthConnection)
        if connection.proven:
            super()._read(connection)
        else:
            self._continue_handshake(connection)

    def _continue_handshake(self, connection: AuthConnection) -> None:
        answerer, data = connection.answerer, b""
        begins = answerer.wants == handshake.HELLO.size
        try:
            data = connection.recv(answerer.wants)
            if begins and self._is_plain(connection, data):
                self._serve_plainly(connection, data)
                return
            answer = answerer.feed(data) if data else b""
            # The answer is short and the first that is sent: the socket's buffer has room for it.
            failed = not data or (answer and connection.send(answer) != len(answer))
        except BlockingIOError:
            return
        except (OSError, handshake.BadHandshake):
            failed = True
        if failed and answerer.introduction is None and data[:1] == bytes((VALIDATE,)):
            self._refuse(connection, NEEDS_TOKEN)
        elif failed:
            if answerer.introduction is not None:  # a client with another token leaves there
                self._note_refused(connection)
            self._drop(connection)
        elif answerer.keys is not None:
            connection.sealer = handshake.Sealer(answerer.keys.sending)
            connection.opener = handshake.Opener(answerer.keys.taking)
            connection.proven = True
            self._unproven.remove(connection)

    def _is_plain(self, connection: AuthConnection, data: bytes) -> bool:
        """Return whether a connection that begins with `data` needs no token."""
        asks = self._same_user and data[:1] == bytes([VALIDATE])
        return asks and peer_uid(connection.sock) == os.geteuid()

    def _serve_plainly(self, connection: AuthConnection, data: bytes) -> None:
        connection.opener = connection.sealer = None
        connection.proven = True
        self._unproven.remove(connection)
        super()._take(connection, data)

    def _take(self, connection: Connection, data: bytes) -> None:
        assert isinstance(connection, AuthConnection)
        if connection.opener is None:
            super()._take(connection, data)
            return
        try:
            opened = connection.opener.feed(data)
        except handshake.BadSeal:
            self._drop(connection)
            return
        if opened:
            super()._take(connection, opened)

    def _send(self, connection: Connection, data: bytes | memoryview | None) -> None:
        assert isinstance(connection, AuthConnection)
        sealer = connection.sealer
        super()._send(connection, data if data is None or sealer is None else sealer.seal(data))
