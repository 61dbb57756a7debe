"""Control lines: one quiet connection to every other rank, for as long as the job lasts.

Between hosts its end is the evidence that a rank has gone: the kernel closes it with the process,
and keepalive probes find out within seconds that a host has vanished; a stopped process still
answers them. Besides, the ranks of a group agree here on why it has failed and on who goes on, and
tell each other that they have left it. Messages are JSON behind their length. One thread reads (the
host's control thread); any thread may send.
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

# A vanished host is found out after KEEPIDLE + KEEPCNT * KEEPINTVL seconds, or when what was sent
# has not been acknowledged for USER_TIMEOUT (tcp(7)). No data line has that limit: a stopped
# process would trip it as soon as its buffers are full.
_OPTIONS = {
    socket.TCP_KEEPIDLE: 1,
    socket.TCP_KEEPINTVL: 1,
    socket.TCP_KEEPCNT: 2,
    socket.TCP_USER_TIMEOUT: 2200,
}
_LENGTH = struct.Struct("<I")
_MOST = 1 << 16
_BROKEN = "it does not keep to the protocol"
_NEEDS: dict[str, dict[str, type]] = {
    "say": {"topic": str, "step": int, "value": str},
    "part": {"topic": str, "value": str},
    "left": {},
    "waits": {"who": int, "version": int, "notice": str},
    "circle": {"version": int, "verdict": str},
}

Message = dict[str, Any]


class ControlConnection:
    """The connection to one rank (its number in the job)."""

    def __init__(self, number: int, wire: socket.socket) -> None:
        self.number = number
        self.wire = wire
        self.over: str | None = None
        self._lock = threading.Lock()
        self._out: deque[bytes] = deque()
        self._in = bytearray()
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _OPTIONS.items() if wire.family != socket.AF_UNIX else ():
            wire.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, data: bytes) -> bool:
        """Send what was `framed`, or keep what does not go until `flush`; say whether it went.

        On a line that is over nothing goes, and nothing is kept.
        """
        with self._lock:
            if self.over is None:
                self._out.append(data)
        self.flush()
        return not self._out or self.over is not None

    def flush(self) -> None:
        """Send what was kept, as far as it goes."""
        with self._lock:
            while self._out and self.over is None:
                try:
                    sent = self.wire.send(self._out[0], socket.MSG_NOSIGNAL)
                except (BlockingIOError, InterruptedError):
                    return
                except OSError:
                    return  # whoever reads learns why
                self._out[0] = self._out[0][sent:]
                if not self._out[0]:
                    self._out.popleft()

    def behind(self) -> bool:
        """Say whether something is kept that has not gone yet."""
        return bool(self._out)

    def events(self) -> int:
        """Return what to poll for."""
        return select.POLLIN | (select.POLLOUT if self._out else 0)

    def receive(self) -> list[Message]:
        """Return the messages that have come; `over` says why there will be no more."""
        while self.over is None:
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

    def _messages(self) -> Iterable[Message]:
        while len(self._in) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._in)
            if length > _MOST:
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
            self.over = reason
            self._out.clear()


def framed(message: Message) -> bytes:
    """Return a message as it travels."""
    data = json.dumps(message).encode()
    return _LENGTH.pack(len(data)) + data


def _checked(data: bytes) -> Message | None:
    """Return a message that has what its kind needs, or None."""
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(message, dict) or not isinstance(message.get("group"), str):
        return None
    needs = _NEEDS.get(str(message.get("kind")))
    if needs is None or not all(isinstance(message.get(n), kind) for n, kind in needs.items()):
        return None
    return message


class ControlConnections:
    """All control lines of a rank."""

    def __init__(
        self,
        wires: Mapping[int, socket.socket],
        on_message: Callable[[int, Message], None],
        on_end: Callable[[int, str], None],
        wake: Callable[[], object] = lambda: None,
    ) -> None:
        """`wake` has the thread that polls call `register` again."""
        self.lines = {number: ControlConnection(number, wire) for number, wire in wires.items()}
        self._by_fd = {line.wire.fileno(): line for line in self.lines.values()}
        self._ended: dict[int, str] = {}
        self._on_message = on_message
        self._on_end = on_end
        self.wake = wake

    def lost(self, number: int) -> str | None:
        """Return why the line to a rank has ended, or None; all that came before has been told."""
        return self._ended.get(number)

    def send(self, numbers: Iterable[int], message: Message) -> None:
        """Send a message to some ranks; who has gone gets none."""
        data = framed(message)
        went = [self.lines[number].send(data) for number in numbers]
        if not all(went):
            self.wake()

    def behind(self, number: int) -> bool:
        """Say whether a rank has not taken all yet that was sent to it."""
        return self.lines[number].behind()

    def register(self, poller: select.poll) -> None:
        """Have a poller watch all lines that are not over."""
        for fd, line in self._by_fd.items():
            if line.over is None:
                poller.register(fd, line.events())

    def ready(self, fd: int, poller: select.poll) -> bool:
        """Do what there is to do on a line; False if `fd` is none."""
        line = self._by_fd.get(fd)
        if line is None:
            return False
        line.flush()
        for message in line.receive():
            self._on_message(line.number, message)
        if line.over is None:
            poller.modify(fd, line.events())
        else:
            poller.unregister(fd)
            self._ended[line.number] = line.over
            self._on_end(line.number, line.over)
        return True

    def close(self, *, shared: bool = False) -> None:
        """Close all lines; `shared` ones (in a forked child) stay open at the other end."""
        for line in self.lines.values():
            if not shared:
                with contextlib.suppress(OSError):
                    line.wire.shutdown(socket.SHUT_RDWR)
            line.wire.close()
            line.over = line.over or "this rank has closed it"
            self._ended.setdefault(line.number, line.over)
