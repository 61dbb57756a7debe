"""One connection of a client to a store's server: requests out, replies in, by a deadline.

A signal interrupts every wait (Ctrl-C raises at once). Failures are TimeoutError and OSError here;
the session, which knows the keys, turns them into StoreErrors. After a failure the next reply may
belong to an earlier request, so a connection that has failed is closed and not used again.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket

from nc10d.base.deadline import monotonic
from nc10d.base.run_to_end import off_main
from nc10d.base.signal_errors import raised_here
from nc10d.store import wire as m
from nc10d.store.store_errors import Disconnected, NotAStore, refusal

_READ = 1 << 16
_READ_LARGE = 1 << 20
_SEND_BUFFER = 1 << 20
_LONGEST_POLL = 3600.0
_FIRST_RECEIVE = 0.004
_I64, _U64, _u64_from = m.I64.unpack, m.U64.unpack, m.U64.unpack_from
_write = os.write


class StoreConnection:
    """A connected socket, and the bytes of the reply that have not been taken yet.

    The socket's timeout is short, so that a signal never restarts a long wait. The first receive
    uses that timeout, which polls in C; a longer wait polls here until the deadline.
    `socket.send` would poll before each write, though the buffer nearly always has room;
    `os.write` on the descriptor skips that poll.
    """

    __slots__ = (
        *("_at", "_fileno", "_got", "_poll", "_recv"),
        *("deadline", "has_unix", "is_nc10d", "sock", "waits"),
    )

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        sock.settimeout(_FIRST_RECEIVE)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        else:  # the default buffer is full after 300 small packets
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        self.sock = sock
        self.deadline = deadline
        self.waits = False  # whether CANCEL_WAIT can end the call in progress
        self._fileno, self._recv = sock.fileno, sock.recv
        self._got = b""
        self._at = 0
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        traits = self._shake_hands()
        self.is_nc10d = traits & m.IS_NC10D != 0
        self.has_unix = traits & m.HAS_UNIX != 0

    def _shake_hands(self) -> int:
        """Introduce this client; return the bits that the server has added to the nonce."""
        nonce = os.getpid() & (m.HAS_UNIX - 1) | m.ASKS
        self.send(m.with_u32(m.VALIDATE, m.MAGIC) + m.with_u32(m.PING, nonce))
        answer = self.take_first()
        traits: int = m.U32.unpack(answer)[0] ^ nonce
        if traits & ~m.TRAITS:
            raise NotAStore(f"what listens there is not a store: its answer begins with {answer!r}")
        return traits

    def take_first(self) -> bytes:
        """Return the first 4 bytes of the answer; Refused or NoRoom if the server refuses us."""
        answer = self.take(4)
        if answer == m.REFUSAL:
            raise refusal(self.take(1))
        return answer

    def unix_name(self) -> bytes:
        """Return the name of the server's Unix socket; empty if the server is on another host."""
        if not self.has_unix or not _same_host(self.sock) or os.environ.get("NC10D_STORE_TCP"):
            return b""
        self.send(m.with_key(m.GET, m.UNIX_NAME))
        return self.take_string()

    def send(self, data: bytes) -> None:
        """Hand all of `data` to the kernel; TimeoutError at the deadline."""
        sent = self._write_some(data)
        if sent != len(data):
            self._send_rest(memoryview(data)[sent:])

    def post(self, data: bytes, limit: float) -> None:
        """Send a request without a reply; TimeoutError if that blocks for `limit` seconds."""
        sent = self._write_some(data)
        if sent != len(data):
            self.deadline, self.waits = monotonic() + limit, False
            self._send_rest(memoryview(data)[sent:])

    def _send_rest(self, rest: memoryview) -> None:
        while rest:
            self._ready(select.POLLOUT)
            rest = rest[self._write_some(rest) :]

    def _write_some(self, data: bytes | memoryview) -> int:
        """Return how many bytes the kernel has taken."""
        try:
            return _write(self._fileno(), data)
        except raised_here(BlockingIOError):
            return 0

    def take(self, count: int) -> bytes:
        """Return the reply's next `count` bytes; TimeoutError at the deadline."""
        at = self._at
        end = at + count
        got = self._got
        if end > len(got):
            got, at, end = self._more(count), 0, count
        self._at = end
        return got if count == len(got) else got[at:end]

    def take_number(self) -> int:
        """Return the reply's next 64-bit number."""
        number: int = _I64(self.take(8))[0]
        return number

    def take_string(self) -> bytes:
        """Return the reply's next string."""
        return self.take(_U64(self.take(8))[0])

    def take_stop(self) -> None:
        """Take the end of a wait; the call behind it can't be cancelled any more."""
        answer = self.take(1)
        if answer != m.STOP_WAITING:
            raise Disconnected(f"the server ended a wait with {answer!r}")
        self.waits = False

    def take_stop_and_string(self) -> bytes:
        """Take the end of a wait, and the string that follows it.

        They nearly always arrive together, and are taken apart here without further calls:
        after a long sleep the CPU's caches are cold, and each function costs time.
        """
        if self._at < len(self._got):  # taken late
            self.take_stop()
            return self.take_string()
        got = self._more(1)
        if len(got) >= 9 and got[0] == 0 and len(got) == 9 + _u64_from(got, 1)[0]:
            self.waits = False
            self._at = len(got)
            return got[9:]
        self._at = 0
        self.take_stop()
        return self.take_string()

    def _more(self, count: int) -> bytes:
        """Return a buffer that begins with the next `count` bytes; blocks until they are here."""
        data = self._some(_READ)
        if self._at < len(self._got):
            data = self._got[self._at :] + data
        self._got = data if len(data) >= count else self._rest(data, count - len(data))
        return self._got

    def _rest(self, first: bytes, missing: int) -> bytes:
        parts = [first]
        while missing > 0:
            parts.append(self._some(_READ if missing <= _READ else _READ_LARGE))
            missing -= len(parts[-1])
        return b"".join(parts)

    def _some(self, most: int) -> bytes:
        """Return the next bytes, at most `most`; Disconnected if the server has closed."""
        while True:
            try:
                data = self._recv(most)
            except raised_here(TimeoutError):
                self._ready(select.POLLIN)
                continue
            if data:
                return data
            raise Disconnected("the server closed the connection")

    def _ready(self, event: int) -> None:
        """Block until the socket is ready; TimeoutError at the deadline. Signals may raise."""
        self._poll.modify(self.sock, event)
        while not self._poll.poll(self._slice()):
            if monotonic() >= self.deadline:
                raise TimeoutError

    def _slice(self) -> int:
        """Return the milliseconds left, rounded up so that a wait never ends early."""
        left = min(self.deadline - monotonic(), _LONGEST_POLL)
        return max(0, math.ceil(left * 1000))

    def cancel_wait(self, grace: float) -> bool:
        """Cancel the wait in progress; return whether the server has done so.

        If not, the wait had just ended: the call's reply is to be taken, and then that to the
        cancellation. TimeoutError if the server does not answer within `grace` seconds.
        """
        self.deadline = monotonic() + grace
        self.send(m.simple(m.CANCEL_WAIT))
        if self.take(1) == m.WAIT_CANCELED:
            return True
        self._at -= 1
        return False

    def take_canceled(self) -> bool:
        """Take the reply to a cancellation."""
        answer = self.take(1)
        if answer != m.WAIT_CANCELED:
            raise Disconnected(f"the server confirmed a cancellation with {answer!r}")
        return True

    @off_main
    def shut(self) -> None:
        """End the call in progress in another thread, which then closes the connection."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()


def _same_host(sock: socket.socket) -> bool:
    """Return whether the peer is on this host: then both ends have the same address."""
    here, there = sock.getsockname()[0], sock.getpeername()[0]
    return bool(here == there or (here.startswith("127.") and there.startswith("127.")))
