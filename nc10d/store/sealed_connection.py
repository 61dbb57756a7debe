"""A connection to a server that serves only clients that know the job's token."""

# ruff: noqa: D102  (StoreConnection documents the methods)
from __future__ import annotations

import socket

from nc10d.auth.handshake import BadHandshake, BadSeal, HandshakeCaller, Opener, Sealer
from nc10d.store.auth_server import STORE_INTRODUCTION
from nc10d.store.connection import StoreConnection
from nc10d.store.store_errors import OTHER_TOKEN, Disconnected, Refused


class SealedConnection(StoreConnection):
    """A StoreConnection that begins with the handshake; afterwards both directions are sealed."""

    __slots__ = ("_opener", "_sealer", "_token")

    def __init__(self, sock: socket.socket, deadline: float, token: bytes) -> None:
        self._token = token
        self._opener: Opener | None = None
        super().__init__(sock, deadline)

    def _shake_hands(self) -> int:
        caller = HandshakeCaller(self._token, STORE_INTRODUCTION)
        super().send(caller.hello)
        try:
            first = self.take_first()
            super().send(caller.feed(first + self.take(caller.wants - len(first))))
        except BadHandshake as error:
            raise Refused(OTHER_TOKEN) from error
        except Disconnected as error:
            raise Disconnected("the server closed the connection at the handshake") from error
        assert caller.keys is not None
        self._sealer = Sealer(caller.keys.sending)
        self._opener = Opener(caller.keys.taking)
        return super()._shake_hands()

    def send(self, data: bytes) -> None:
        super().send(self._sealer.seal(data))

    def post(self, data: bytes, limit: float) -> None:
        super().post(self._sealer.seal(data), limit)

    def _some(self, most: int) -> bytes:
        opener = self._opener
        while True:
            data = super()._some(most)
            if opener is None:
                return data
            try:
                data = opener.feed(data)
            except BadSeal as error:
                raise Disconnected(f"what came is not from the server: {error}") from error
            if data:
                return data
