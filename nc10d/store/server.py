"""The I/O of a store's server: one loop that moves bytes between sockets and a Table.

The Table makes all decisions; auth_server.py adds authentication.

The owner has gone when its descriptor reads end-of-file, which the kernel ensures however the owner
dies. The server then gives up its port, tells its clients (OWNER_LEFT), and closes the descriptor,
for which an owner that lives waits. The server ends once the last client has disconnected. If a
connection breaks the protocol or a bound, only that connection is closed. Nothing blocks except the
wait for events.

A client's requests are executed one by one, and the replies to each are sent, or counted as
unsent, before the next. After TURN_SECONDS, or with too many unsent bytes, the client is `pending`:
the server neither reads from the client nor executes its other requests until the other clients
have had their turn and the client has read its replies.

A connection must begin with VALIDATE within UNPROVEN_SECONDS. Of those that have not, the oldest is
closed when there are more than MOST_UNPROVEN. An incomplete request must not stand still for
STALL_SECONDS.

Not done: polling for some microseconds before the wait for events, which gained nothing for bursts
and made calls up to twice as slow; SOCK_SEQPACKET, whose single message is faster and whose bursts
are slower; a client that sends several sets at once, whose set returns before it is sent.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import sys
from collections import deque
from collections.abc import Generator

from nc10d.auth.admission import UNPROVEN_SECONDS, Admission
from nc10d.base.deadline import monotonic
from nc10d.store import wire as m
from nc10d.store.table import Table
from nc10d.store.wire import OWNER_LEFT, REFUSED, SET, BadFrame, Limits, Parser, Request

STALL_SECONDS, TURN_SECONDS = 60.0, 0.005
MOST_UNPROVEN = 1024

_BACKLOG = 4096
_READ = 1 << 16
_READ_LARGE = 1 << 20
_MOST_UNSENT = 1 << 20
_ACCEPTED_AT_ONCE = 64
_PIECE_BYTES = 200  # the memory of an unsent reply, besides its bytes
_HANDSHAKE = b"nc10d-"  # the beginning of a client that has a token
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
    system, so the name disappears with the process.
    """
    if sys.platform != "linux":
        return None
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):  # a sandbox may forbid that
        unix = stack.enter_context(socket.socket(socket.AF_UNIX))
        unix.bind(b"\0nc10d-store-" + os.urandom(16).hex().encode())
        unix.listen(_BACKLOG)
        stack.pop_all()
        return unix
    return None


class Connection:
    """A client's socket, the received part of the next request, and unsent replies."""

    __slots__ = (
        *("copied", "counted", "events", "parser", "pending", "proven", "recv", "send", "sock"),
        *("unsent", "unsent_bytes"),
    )

    def __init__(self, sock: socket.socket, limits: Limits) -> None:
        self.sock = sock
        self.recv, self.send = sock.recv, sock.send
        self.parser = Parser(limits)
        self.unsent: deque[memoryview] = deque()
        self.unsent_bytes = 0
        self.copied = 0  # bytes of unsent replies that are copies; too many until all are sent
        self.counted = 0  # bytes of requests and replies that the server's total includes
        self.pending = False  # whether the client may have requests that can be executed
        self.proven = False  # whether it is a client's
        self.events = IN


class Server:
    """Serves one listening socket until `owner`, a descriptor, reads end-of-file.

    Clients that are connected then are served until the last disconnects. With `owner` None the
    server runs until an exception ends it.
    """

    _proof_seconds = UNPROVEN_SECONDS

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
        self._unproven = Admission[Connection](MOST_UNPROVEN, self._proof_seconds)
        self._stalled = Admission[Connection](sys.maxsize, STALL_SECONDS)
        self._ready: dict[Connection, None] = {}  # pending, and with room for replies
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
                    elif event == IN == connection.events:
                        self._read(connection)
                    else:
                        self._serve(connection, event)
                if self._ready:
                    self._serve_pending()
        finally:
            self._close()

    def _poll_timeout(self) -> float | None:
        """Close overdue connections; return the time until the next is overdue, None without."""
        waiting = [due for due in (self._unproven, self._stalled) if due]
        if not waiting:
            return 0.0 if self._ready else None
        now = monotonic()
        for due in waiting:
            for connection in due.overdue(now):
                self._drop(connection)
        if self._ready:
            return 0.0
        left = [seconds for due in waiting if (seconds := due.seconds_to_next(now)) is not None]
        return min(left) * self._second if left else None

    def _unneeded(self) -> bool:
        # A connection that sends nothing (a port scan) is no client, and keeps no server alive.
        return self._owned and self._owner is None and len(self._unproven) == len(self._connections)

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
        self._publish(OWNER_LEFT, "")

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
            self._admit(sock)

    def _admit(self, sock: socket.socket) -> None:
        connection = self._connection(sock)
        self._connections[sock.fileno()] = connection
        self._poll.register(sock, IN)
        oldest = self._unproven.admit(connection, monotonic())
        if len(self._connections) - len(self._unproven) >= self._limits.clients:
            self._refuse(connection, m.IS_FULL)
        elif oldest is not None:
            self._drop(oldest)

    def _refuse(self, connection: Connection, reason: bytes) -> None:
        """Close a new connection, whose client learns why."""
        # A few bytes, and the first that are sent: the socket's buffer has room for them.
        with contextlib.suppress(OSError):
            connection.send(m.REFUSAL + reason)
        if reason != m.IS_FULL:
            self._note_refused(connection)
        self._drop(connection)

    def _note_refused(self, connection: Connection) -> None:
        """Leave a client's address in the store, for the errors of the ranks that wait for it."""
        with contextlib.suppress(OSError):
            peer = connection.sock.getpeername()
            self._publish(REFUSED, peer[0] if isinstance(peer, tuple) else "this host")

    def _publish(self, key: str, value: str) -> None:
        """Set a user's key, if there is memory."""
        self._apply((SET, b"/" + key.encode(), value.encode()), None)

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
        elif event & ~(IN | OUT) and connection not in self._ready:
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
        if not connection.proven and data.startswith(_HANDSHAKE):
            self._refuse(connection, m.HAS_NO_TOKEN)
            return
        self._execute(connection, connection.parser.feed(data))

    def _serve_pending(self) -> None:
        """Give the pending client that has waited longest another turn."""
        connection = next(iter(self._ready))
        del self._ready[connection]
        self._execute(connection, self._requests_of(connection))

    def _requests_of(self, connection: Connection) -> Generator[Request, None, None]:
        yield from self._table.held(connection)
        yield from connection.parser.feed(b"")

    def _execute(self, connection: Connection, requests: Generator[Request, None, None]) -> None:
        """Execute requests until the client's turn is over."""
        until, over = monotonic() + TURN_SECONDS, False
        try:
            for request in requests:
                self._apply(request, connection)
                if connection.sock.fileno() < 0:
                    return
                over = connection.unsent_bytes > _MOST_UNSENT or monotonic() >= until
                if over:
                    break
        except BadFrame:
            self._drop(connection)
            return
        requests.close()
        if over or connection.pending:
            connection.pending = over
            self._watch(connection)
        if not connection.proven and connection.parser.validated:
            connection.proven = True
            self._unproven.remove(connection)
        if connection.parser.held or connection.counted:
            self._count(connection)
            self._expect_rest(connection)

    def _apply(self, request: Request, client: Connection | None) -> None:
        """Execute a request, and send the replies that are due to the client and others."""
        replies = self._table.apply(request, client)
        for connection, reply in replies:
            if connection is not None:
                self._send(connection, reply)
        while self._table.released:
            released: Connection = self._table.released.popleft()
            released.pending = True
            self._watch(released)

    def _count(self, connection: Connection) -> None:
        """Count unfinished requests and unread replies; close the connection beyond the bound."""
        if connection.sock.fileno() < 0:
            return
        held = len(connection.parser.held) + min(connection.copied, connection.unsent_bytes)
        more, connection.counted = held - connection.counted, held
        self._table.values.nbytes += more
        if more > 0 and self._table.values.nbytes > self._limits.total:
            self._drop(connection)

    def _expect_rest(self, connection: Connection) -> None:
        """Give an unfinished request time for more bytes."""
        self._stalled.remove(connection)
        if connection.parser.held and not connection.pending and connection.sock.fileno() >= 0:
            self._stalled.admit(connection, monotonic())

    def _send(self, connection: Connection, data: bytes | memoryview | None) -> None:
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
        connection.unsent_bytes += len(data_left) + _PIECE_BYTES
        connection.copied += _PIECE_BYTES + (len(data_left) if isinstance(data, bytes) else 0)
        self._watch(connection)
        self._count(connection)

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
                connection.unsent_bytes -= _PIECE_BYTES
        except BlockingIOError:
            pass
        except OSError:
            self._drop(connection)
            return
        if not unsent:
            connection.copied = 0
        self._count(connection)
        self._watch(connection)

    def _watch(self, connection: Connection) -> None:
        """Wait for output while replies are unsent, and for input or the next turn with room."""
        events = OUT if connection.unsent else 0
        self._ready.pop(connection, None)
        if connection.unsent_bytes <= _MOST_UNSENT and connection.sock.fileno() >= 0:
            if connection.pending:
                self._ready[connection] = None
            else:
                events |= IN
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
        self._ready.pop(connection, None)
        self._unproven.remove(connection)
        self._stalled.remove(connection)
        self._table.values.nbytes -= connection.counted
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
