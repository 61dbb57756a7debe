"""Control connections: a rank keeps a mostly idle connection to every other rank in the job.

They serve two purposes:

- Failure detection between hosts. The kernel closes a connection when its process ends. Silence
  shows that a host has vanished (silence.py).
- Group control: consensus on causes and on survivors, announcements from ranks that leave a group,
  and wait notices for deadlock detection.

A message is JSON behind the length. Only the rank's control thread reads; any thread may send.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from nc10d.backend.cpu.control.silence import DEFAULT_SECONDS, LOOKS, SilenceWatch
from nc10d.base.deadline import monotonic
from nc10d.base.signal_errors import raised_here

_LENGTH = struct.Struct("<I")
_MOST_BYTES = 1 << 16
_BROKEN = "it does not keep to the protocol"
_FIELDS: dict[str, dict[str, type]] = {
    "consensus": {"topic": str, "step": int, "value": str},
    "value": {"key": str, "value": str},
    "leave": {},
    "wait_notice": {"waiter": int, "version": int, "notice": str},
    "deadlock": {"versions": dict, "text": str},
}
"""The kinds of messages, and each kind's fields beside `kind` and `group`."""

Message = dict[str, Any]


class ControlConnection:
    """The connection to rank `number` of the job; `ended` is the reason of the end, None before."""

    # `seconds` is the longest silence for a rank on another host.

    def __init__(self, number: int, wire: socket.socket, seconds: float = DEFAULT_SECONDS) -> None:
        self.number, self.wire = number, wire
        self.ended: str | None = None
        self._lock = threading.Lock()
        self._out: deque[bytes] = deque()
        self._in = bytearray()
        # Between processes on a host the kernel reports every end.
        self._watch = None if wire.family == socket.AF_UNIX else SilenceWatch(wire, seconds)

    def send(self, data: bytes) -> bool:
        """Send a `framed` message without blocking; return False if a part waits for `flush`.

        After the connection's end nothing is sent or kept, and the result is True.
        """
        with self._lock:
            if self.ended is None:
                self._out.append(data)
        self.flush()
        return not self._out or self.ended is not None

    def flush(self) -> None:
        """Send waiting messages until the socket's buffer is full."""
        with self._lock:
            while self._out and self.ended is None:
                try:
                    sent = self.wire.send(self._out[0], socket.MSG_NOSIGNAL)
                except raised_here(OSError):
                    return  # until the socket has room again, or `receive` finds the reason
                self._out[0] = self._out[0][sent:]
                if not self._out[0]:
                    self._out.popleft()

    def backlogged(self) -> bool:
        """Return whether messages wait for `flush`."""
        return bool(self._out)

    def events(self) -> int:
        """Return the events to poll for."""
        return select.POLLIN | (select.POLLOUT if self._out else 0)

    def receive(self) -> list[Message]:
        """Return the messages that have arrived; sets `ended` when no more can follow."""
        while self.ended is None:
            try:
                data = self.wire.recv(65536)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                self._end(error.strerror or str(error))
                break
            if not data:
                self._end("its connection was closed")
                break
            self._in += data
        return list(self._messages())

    def look(self) -> bool:
        """Return whether the peer has been silent for too long; to be called in equal steps."""
        return self._watch is not None and self._watch.look()

    def give_up(self, reason: str) -> None:
        """End the connection; the poller reports it."""
        self._end(reason)
        with contextlib.suppress(OSError):
            # A reset, when the socket is closed: a peer that still hears learns of the end at once.
            # The regular end would queue behind data that the peer can't acknowledge.
            self.wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.wire.shutdown(socket.SHUT_RDWR)

    def _messages(self) -> Iterable[Message]:
        while len(self._in) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._in)
            if length > _MOST_BYTES:
                self._end(_BROKEN)
                return
            if len(self._in) < _LENGTH.size + length:
                return
            data = bytes(self._in[_LENGTH.size : _LENGTH.size + length])
            del self._in[: _LENGTH.size + length]
            message = _checked(data)
            if message is None:
                self._end(_BROKEN)
                return
            yield message

    def _end(self, reason: str) -> None:
        with self._lock:
            self.ended = reason
            self._out.clear()


def framed(message: Message) -> bytes:
    """Return a message as bytes, behind the length."""
    data = json.dumps(message).encode()
    return _LENGTH.pack(len(data)) + data


def _checked(data: bytes) -> Message | None:
    """Return a message, or None if a field that the kind needs is missing."""
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict) or not isinstance(message.get("group"), str):
        return None
    fields = _FIELDS.get(str(message.get("kind")))
    if fields is None or not all(isinstance(message.get(f), kind) for f, kind in fields.items()):
        return None
    return message


class ControlConnections:
    """A rank's control connections, by the other rank's number in the job."""

    def __init__(
        self,
        wires: Mapping[int, socket.socket],
        on_message: Callable[[int, Message], None],
        on_end: Callable[[int, str], None],
        wake: Callable[[], object] = lambda: None,
        seconds: float = DEFAULT_SECONDS,
    ) -> None:
        """`wake` makes the polling thread call `register` again; `seconds` as in peer_seconds."""
        self.connections = {
            number: ControlConnection(number, wire, seconds) for number, wire in wires.items()
        }
        self._between_hosts = any(wire.family != socket.AF_UNIX for wire in wires.values())
        self._seconds, self._next_look = seconds, 0.0
        self._by_fd = {each.wire.fileno(): each for each in self.connections.values()}
        self._ended: dict[int, str] = {}
        self._on_message, self._on_end, self.wake = on_message, on_end, wake

    def lost(self, number: int) -> str | None:
        """Return why a connection has ended, once all messages are delivered, or None."""
        return self._ended.get(number)

    def send(self, numbers: Iterable[int], message: Message) -> None:
        """Send a message to some ranks without blocking; skip ranks whose connection has ended."""
        data = framed(message)
        sent = [self.connections[number].send(data) for number in numbers]
        if not all(sent):
            self.wake()

    def backlogged(self, number: int) -> bool:
        """Return whether messages to a rank wait, since the buffers are full."""
        return self.connections[number].backlogged()

    def register(self, poller: select.poll) -> None:
        """Add all connections that have not ended to a poller."""
        for fd, connection in self._by_fd.items():
            if connection.ended is None:
                poller.register(fd, connection.events())

    def ready(self, fd: int, poller: select.poll) -> bool:
        """Send and receive on the connection with `fd`; return False if there is none."""
        connection = self._by_fd.get(fd)
        if connection is None:
            return False
        connection.flush()
        for message in connection.receive():
            self._on_message(connection.number, message)
        if connection.ended is None:
            poller.modify(fd, connection.events())
        else:
            poller.unregister(fd)
            del self._by_fd[fd]
            connection.wire.close()
            self._ended[connection.number] = connection.ended
            self._on_end(connection.number, connection.ended)
        return True

    def look(self) -> float | None:
        """End silent connections; return the seconds until the next call, None if never."""
        if not self._between_hosts:
            return None
        now = monotonic()
        if now >= self._next_look:
            self._next_look = now + self._seconds / LOOKS
            for connection in self._by_fd.values():
                if connection.ended is None and connection.look():
                    connection.give_up(f"no answer for {self._seconds:g} s")
        return self._next_look - now

    def close(self, *, shared: bool = False) -> None:
        """Close all connections; if `shared` (in a forked child), they stay open in the parent."""
        for connection in self.connections.values():
            if not shared:
                with contextlib.suppress(OSError):
                    connection.wire.shutdown(socket.SHUT_RDWR)
            connection.wire.close()
            connection.ended = connection.ended or "this rank has closed it"
            self._ended.setdefault(connection.number, connection.ended)
        self._on_message = self._on_end = self.wake = _nothing  # else a cycle with their owner


def _nothing(*_: object) -> None:
    """Take a message, or an end, after the close."""
