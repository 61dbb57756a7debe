"""The I/O of a store's server: one loop that moves bytes between sockets and a Table.

The Table makes all decisions; auth_server.py adds authentication.

The owner has gone when its descriptor reads end-of-file, which the kernel ensures however the owner
dies. The server then gives up its port, tells its clients (OWNER_LEFT), and closes the descriptor,
for which an owner that lives waits. It ends once the last client has disconnected. If a connection
breaks the protocol or a bound, only that connection is closed. Nothing blocks except the wait for
events. The server stops reading from a client that does not read its replies.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import sys
from collections import deque

from nc10d.store.table import Table
from nc10d.store.wire import OWNER_LEFT, SET, BadFrame, Limits, Parser

_BACKLOG = 4096
_READ = 1 << 16
_READ_LARGE = 1 << 20
_MOST_UNSENT = 1 << 20
_ACCEPTED_AT_ONCE = 64
_OUT_OF_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
IN, OUT = select.POLLIN, select.POLLOUT  # epoll's numbers are the same


def raise_descriptor_limit() -> None:
    """Raise this process's limit of open descriptors, and so of clients, to the hard limit."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def listen_unix() -> socket.socket | None:
    """Listen on an abstract Unix socket with a random name; return None where that is impossible.

    Clients on this host learn the name over TCP and get shorter calls. The name is in no file
    system, so it disappears with the process.
    """
    if sys.platform != "linux":
        return None
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):  # a sandbox may forbid it
        unix = stack.enter_context(socket.socket(socket.AF_UNIX))
        unix.bind(b"\0nc10d-store-" + os.urandom(16).hex().encode())
        unix.listen(_BACKLOG)
        stack.pop_all()
        return unix
    return None


class Connection:
    """A client's socket, the received part of its next request, and its unsent replies."""

    __slots__ = ("counted", "events", "parser", "recv", "send", "sock", "unsent", "unsent_bytes")

    def __init__(self, sock: socket.socket, limits: Limits) -> None:
        self.sock = sock
        self.recv, self.send = sock.recv, sock.send
        self.parser = Parser(limits)
        self.unsent: deque[memoryview] = deque()
        self.unsent_bytes = 0
        self.counted = 0  # bytes of parser.held that the server's total includes
        self.events = IN


class Server:
    """Serves one listening socket until `owner`, a descriptor, reads end-of-file.

    Clients that are connected then are served until the last disconnects. With `owner` None the
    server runs until an exception ends it.
    """

    def __init__(
        self,
        listener: socket.socket,
        owner: int | None = None,
        limits: Limits = Limits(),  # noqa: B008 (an immutable tuple)
    ) -> None:
        unix = listen_unix()
        self._listeners = {sock.fileno(): sock for sock in (listener, unix) if sock is not None}
        self._owner = owner
        self._owned = owner is not None
        self._limits = limits
        self._table = Table(limits)
        self._connections: dict[int, Connection] = {}
        self._pending = 0
        self._accepting = True
        # Level-triggered. poll has the same four methods, for systems without epoll.
        self._poll = select.epoll() if hasattr(select, "epoll") else select.poll()
        self._second = 1.0 if hasattr(select, "epoll") else 1000.0  # in the poller's unit of time
        if unix is not None:
            self._table.unix_name = unix.getsockname()
        for sock in self._listeners.values():
            sock.setblocking(False)
            self._poll.register(sock, IN)
        if owner is not None:
            self._poll.register(owner, IN)

    def serve(self) -> None:
        """Block and serve until owner and clients have gone."""
        try:
            while not self._unneeded():
                for fd, event in self._poll.poll(self._poll_timeout()):
                    connection = self._connections.get(fd)
                    if connection is None:
                        self._serve_other(fd)
                    elif event == IN:
                        self._read(connection)
                    else:
                        self._serve(connection, event)
        finally:
            self._close()

    def _poll_timeout(self) -> float | None:
        """Return the longest wait for events, in the poller's unit; None: no limit."""
        return None

    def _unneeded(self) -> bool:
        # A connection that sends nothing (a port scan) is no client: it keeps no server alive.
        return (
            self._owned
            and self._owner is None
            and not any(connection.parser.validated for connection in self._connections.values())
        )

    def _serve_other(self, fd: int) -> None:
        if fd == self._owner:
            self._end_of_owner(fd)
        elif fd in self._listeners:
            self._accept(self._listeners[fd])

    def _end_of_owner(self, fd: int) -> None:
        if os.read(fd, 64) != b"":
            return
        # The port must be free before the owner goes on, which waits for this descriptor.
        for listener in self._listeners.values():
            self._poll.unregister(listener)
            listener.close()
        self._listeners.clear()
        self._poll.unregister(fd)
        os.close(fd)
        self._owner = None
        self._send_all(self._table.apply((SET, b"/" + OWNER_LEFT.encode(), b""), None))

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):  # clients are served in between
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _OUT_OF_DESCRIPTORS:
                    self._set_accepting(False)
                    return
                continue  # the client has already closed the connection
            sock.setblocking(False)
            self._connections[sock.fileno()] = self._connection(sock)
            self._poll.register(sock, IN)

    def _connection(self, sock: socket.socket) -> Connection:
        return Connection(sock, self._limits)

    def _set_accepting(self, accepting: bool) -> None:
        if accepting != self._accepting:
            self._accepting = accepting
            for listener in self._listeners.values():
                self._poll.modify(listener, IN if accepting else 0)

    def _serve(self, connection: Connection, event: int) -> None:
        if event & OUT:
            self._flush(connection)
        if event & ~OUT and connection.events & IN:
            self._read(connection)
        elif event & ~(IN | OUT):
            self._drop(connection)

    def _read(self, connection: Connection) -> None:
        try:
            data = connection.recv(_READ_LARGE if connection.counted else _READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(connection)
            return
        self._take(connection, data)

    def _take(self, connection: Connection, data: bytes) -> None:
        """Execute the requests that `data` completes, and send their replies."""
        replies: list[tuple[Connection, bytes | None]] = []
        apply = self._table.apply
        try:
            for request in connection.parser.feed(data):
                apply(request, connection, replies)
                # Wake waiting clients before the next request of this client is parsed.
                if replies and replies[-1][0] is not connection:
                    self._send_all(replies)
                    if connection.sock.fileno() < 0:
                        return
        except BadFrame:
            replies.append((connection, None))
        self._send_all(replies)
        if connection.parser.held or connection.counted:
            self._count(connection)

    def _count(self, connection: Connection) -> None:
        """Close the connection if unfinished requests and values exceed the total bound."""
        if connection.sock.fileno() < 0:
            return
        held = len(connection.parser.held)
        self._pending += held - connection.counted
        connection.counted = held
        if self._pending + self._table.values.nbytes > self._limits.total:
            self._drop(connection)

    def _send_all(self, replies: list[tuple[Connection, bytes | None]]) -> None:
        for client, reply in replies:
            self._send(client, reply)
        replies.clear()

    def _send(self, connection: Connection, data: bytes | None) -> None:
        """Send as much as the kernel accepts, keep the rest; None closes the connection."""
        if data is None:
            self._drop(connection)
            return
        if not connection.unsent:
            try:
                sent = connection.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                self._drop(connection)
                return
            if sent == len(data):
                return
            data_left = memoryview(data)[sent:]
        else:
            data_left = memoryview(data)
        connection.unsent.append(data_left)
        connection.unsent_bytes += len(data_left)
        self._watch(connection)

    def _flush(self, connection: Connection) -> None:
        unsent = connection.unsent
        try:
            while unsent:
                sent = connection.sock.send(unsent[0])
                connection.unsent_bytes -= sent
                if sent < len(unsent[0]):
                    unsent[0] = unsent[0][sent:]
                    break
                unsent.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self._drop(connection)
            return
        self._watch(connection)

    def _watch(self, connection: Connection) -> None:
        """Poll for output while replies are unsent, for input unless too many bytes are unsent."""
        events = OUT if connection.unsent else 0
        events |= IN if connection.unsent_bytes <= _MOST_UNSENT else 0
        if events != connection.events and connection.sock.fileno() >= 0:
            connection.events = events
            self._poll.modify(connection.sock, events)

    def _drop(self, connection: Connection) -> None:
        fd = connection.sock.fileno()
        if fd < 0:
            return
        del self._connections[fd]
        self._poll.unregister(fd)
        connection.sock.close()
        connection.unsent.clear()
        self._pending -= connection.counted
        connection.counted = 0
        self._table.forget(connection)
        self._set_accepting(True)

    def _close(self) -> None:
        for connection in [*self._connections.values()]:
            connection.sock.close()
        for listener in self._listeners.values():
            listener.close()
        if self._owner is not None:
            with contextlib.suppress(OSError):
                os.close(self._owner)
        if hasattr(self._poll, "close"):
            self._poll.close()
