"""The product's own store, client and server, over the virtual network.

Server, table, parser, client, deadlines and reconnection are the product's. This module replaces
only the methods that touch sockets. A server may freeze, or die.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from nc10d.auth.admission import UNPROVEN_SECONDS, Admission
from nc10d.base.deadline import Timeout, seconds
from nc10d.errors import StoreError
from nc10d.store import wire as m
from nc10d.store.auth_server import AuthServer
from nc10d.store.connection import StoreConnection
from nc10d.store.sealed_connection import SealedConnection
from nc10d.store.server import IN, MOST_UNPROVEN, OUT, STALL_SECONDS, Connection, Server
from nc10d.store.session import StoreSession
from nc10d.store.table import Table
from nc10d.store.tcp import TCPStore
from simulation.network import End, Network

T = TypeVar("T")
TOKEN = b"t" * 32
_KINDS = (
    *("SET", "COMPARE_SET", "GET", "ADD", "CHECK", "WAIT", "DELETE_KEY", "APPEND", "MULTI_GET"),
    *("MULTI_SET", "QUEUE_PUSH", "QUEUE_POP", "QUEUE_LEN", "QUEUE_TAKE", "LIST_KEYS"),
    *("GETNUMKEYS", "BARRIER"),
)
_NAMES = {getattr(m, name): name for name in _KINDS}


class FakePoll:
    """A poller that stores in each end the events that the server waits for."""

    def register(self, end: End, events: int) -> None:
        """Wait for events."""
        self.modify(end, events)

    def modify(self, end: End, events: int) -> None:
        """Wait for other events."""
        end.events = events
        end.on_event()

    def unregister(self, number: int) -> None:
        """Do nothing: the caller closes the end."""


class VirtualServer(Server):
    """The server without sockets."""

    def __init__(
        self,
        listener: Any = None,
        owner: int | None = None,
        limits: m.Limits = m.Limits(),  # noqa: B008 (an immutable tuple)
    ) -> None:
        self._listeners = {}
        self._owner, self._owned = None, False
        self._limits, self._table = limits, Table(limits)
        self._connections = {}
        self._unproven = Admission[Connection](MOST_UNPROVEN, self._proof_seconds)
        self._stalled = Admission[Connection](MOST_UNPROVEN, STALL_SECONDS)
        self._ready = {}
        self._accepting = True
        self._poll = FakePoll()  # type: ignore[assignment]
        self._second = 1.0

    def accept(self, end: End) -> None:
        """Accept a client's connection."""
        self._admit(end)  # type: ignore[arg-type]

    def serve_end(self, end: End) -> bool:
        """Serve an end; return whether it has more to do."""
        connection = self._connections.get(end.fileno())
        if connection is None:
            return False
        event = IN * (end.readable() and end.events & IN > 0)
        event |= OUT * (end.writable() and end.events & OUT > 0)
        if event == IN:
            self._read(connection)
        elif event:
            self._serve(connection, event)
        while self._ready:
            self._serve_pending()
        if end.fileno() < 0:
            return False
        return (end.readable() and end.events & IN > 0) or (end.writable() and end.events & OUT > 0)

    def held(self, key: str) -> bytes | None:
        """Return the value of a key, or None."""
        values, name = self._table.values, b"/" + key.encode()
        return values.get(name) if values.exists(name) else None

    def close_late_clients(self) -> None:
        """Close connections whose client has not proved the token in time."""
        self._poll_timeout()


class VirtualAuthServer(AuthServer, VirtualServer):
    """The server that requires a token."""


class Site:
    """A server in the network, and a way to connect to it."""

    def __init__(self, net: Network, token: bytes | None = None) -> None:
        self.net, self.sim, self.token = net, net.sim, token
        self.server: VirtualServer
        if token is None:
            self.server = VirtualServer()
        else:
            self.server = VirtualAuthServer(None, None, m.Limits(), token)  # type: ignore[arg-type]
        self.frozen_until = 0.0
        self.dead = False

    def dial(self, owner: str) -> End:
        """Return a client's end of a new connection."""
        if self.dead:
            raise ConnectionRefusedError("connection refused")
        client_end, server_end = self.net.stream(owner, "server")
        self.server.accept(server_end)
        scheduled = False

        def look() -> None:
            nonlocal scheduled
            scheduled = False
            if self.dead:
                return
            if self.sim.now < self.frozen_until:
                later(self.frozen_until - self.sim.now)
            elif self.server.serve_end(server_end):
                later(1e-6)

        def later(delay: float = 1e-6) -> None:
            nonlocal scheduled
            if not scheduled:
                scheduled = True
                self.sim.after(delay, look)

        server_end.on_event = later
        if self.token is not None:
            self.sim.after(UNPROVEN_SECONDS + 0.1, self.server.close_late_clients)
        return client_end

    def die(self) -> None:
        """End the server as kill -9 does."""
        self.sim.note("the server dies")
        self.dead = True
        self.net.close_all_of("server")

    def fail(self, delay: float) -> bool:
        """Die or freeze for good after `delay`; return whether it dies."""
        dies = self.sim.random.random() < 0.5
        self.sim.after(delay, self.die if dies else lambda: self.freeze(1000.0))
        return dies

    def freeze(self, seconds: float) -> None:
        """Stop the server for `seconds`."""
        self.sim.note(f"the server freezes for {seconds:g} s")
        self.frozen_until = self.sim.now + seconds


class VirtualConnection(StoreConnection):
    """A client's connection without a socket."""

    __slots__ = ()

    def __init__(self, sock: Any, deadline: float) -> None:
        self.sock, self.deadline, self.waits = sock, deadline, False
        self._recv = self._received
        self._got, self._at = b"", 0
        self.is_nc10d = self._shake_hands() & m.IS_NC10D != 0
        self.has_unix = False

    def _received(self, most: int, flags: int = 0) -> bytes:
        try:
            return self._end.recv(most)
        except BlockingIOError:
            raise TimeoutError from None

    @property
    def _end(self) -> End:
        end: Any = self.sock
        assert isinstance(end, End)
        return end

    def send(self, data: bytes) -> None:
        """Send all of `data`."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self._end.send(rest) :]
            except BlockingIOError:
                self._ready(select.POLLOUT)

    def post(self, data: bytes, limit: float) -> None:
        """Send a request without an answer, within `limit` seconds."""
        self.deadline, self.waits = self._end.net.sim.now + limit, False
        VirtualConnection.send(self, data)

    def _ready(self, event: int) -> None:
        end, sim = self._end, self._end.net.sim
        ready = end.writable if event == select.POLLOUT else end.readable
        if not sim.wait(ready, self.deadline, end.changed):
            raise TimeoutError


class VirtualSealedConnection(SealedConnection, VirtualConnection):
    """A client's connection with a token."""

    __slots__ = ()


class VirtualSession(StoreSession):
    """A client's session whose server is in the virtual network."""

    def __init__(self, site: Site, owner: str, limit: float, token: bytes | None) -> None:
        super().__init__("server", 1, limit, "store server:1", token)
        self._site, self._owner = site, owner
        self.is_nc10d = True

    def call(
        self,
        packet: bytes,
        take: Callable[[StoreConnection], T],
        keys: Sequence[str],
        timeout: Timeout = None,
        waits: bool = False,
    ) -> T:
        """Call, and add a line to the trace."""
        self._note(packet, keys)
        return super().call(packet, take, keys, timeout, waits)

    def post(self, packet: bytes, keys: Sequence[str]) -> None:
        """Send a request without an answer, and add a line to the trace."""
        self._note(packet, keys)
        super().post(packet, keys)

    def _note(self, packet: bytes, keys: Sequence[str]) -> None:
        sim = self._site.sim
        if sim.verbose:
            sim.note(f"{self._owner}: {_NAMES[packet[0]]} {', '.join(keys)}")

    def _reconnect(self, deadline: float) -> StoreConnection:
        if self._closed:
            raise StoreError(f"{self.name} is closed on this rank")
        end: Any = self._site.dial(self._owner)
        token = self._token
        made = (
            VirtualSealedConnection(end, deadline, token)
            if token
            else VirtualConnection(end, deadline)
        )
        self._connection = made
        return made


class VirtualStore(TCPStore):
    """A rank's store: a TCPStore whose server is a Site."""

    def __init__(
        self, site: Site, owner: str, timeout: Timeout = 5.0, token: bytes | None = None
    ) -> None:
        self._seconds = seconds(timeout)
        self._token = token or site.token
        self._hosting = None
        self._host, self._port = "server", 1
        self._session = VirtualSession(site, owner, self._seconds, self._token)
        self._call, self._post = self._session.call, self._session.post
        self._wait_then = self._session.wait_then
