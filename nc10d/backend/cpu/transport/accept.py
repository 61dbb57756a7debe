"""The acceptor: a rank's handshakes with the ranks on other hosts, all at once in an event loop.

| a handshake's state | next |
|---|---|
| connecting (calls only) | greeted, when the socket is connected: the hello is sent |
| greeted | finished or failed, as each answer from the other side arrives |
| finished | the socket is in `made`; a second connection for the same purpose is closed |
| failed: a call | `turn` raises ConnectionError: the rank that was called is at fault |
| failed: an accepted connection | closed; a stranger must not harm the ranks |

Invariant: no handshake blocks another, so neither a slow rank nor a stranger delays the others. A
stranger is closed at the first wrong byte or after UNPROVEN_SECONDS. At most MOST_STRANGERS
accepted connections are unproven at a time; beyond that the oldest is closed.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass

from nc10d.auth.admission import Admission
from nc10d.auth.handshake import BadHandshake, HandshakeAnswerer, HandshakeCaller, Introduction
from nc10d.backend.cpu.transport.addresses import tcp_socket
from nc10d.base.deadline import monotonic

MOST_STRANGERS = 256
# Below MOST_STRANGERS: connections accepted in a batch must be read before a later batch may
# close them as the oldest. Otherwise a flood of strangers would keep the ranks out.
_BATCH = 64
_SLICE = 0.05
_IN_PROGRESS = (0, errno.EINPROGRESS)


@dataclass(slots=True, eq=False)
class PendingHandshake:
    """A handshake in progress; a call knows `peer` and `purpose` from the start."""

    wire: socket.socket
    side: HandshakeCaller | HandshakeAnswerer
    peer: int = -1
    purpose: int = -1
    greeted: bool = True


class Acceptor:
    """Calls ranks, and accepts connections from the `awaited` ranks on a listening socket."""

    # `awaited` holds (rank, purpose) pairs, and `made` the finished sockets by such pairs. A caller
    # proves with `key` that it belongs to the job; the introduction must match `me` and `group`.

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

    def call(self, address: tuple[str, int], key: bytes, introduction: Introduction) -> None:
        """Begin to call the rank `introduction.peer`; OSError if that fails at once."""
        wire = tcp_socket(address[0])
        wire.setblocking(False)
        side = HandshakeCaller(key, introduction)
        handshake = PendingHandshake(
            wire, side, introduction.peer, introduction.purpose, greeted=False
        )
        self._calling += 1
        # Registered before connecting, so that `close` finds the socket if that fails.
        self._selector.register(wire, selectors.EVENT_WRITE, handshake)
        answer = wire.connect_ex(address)
        if answer not in _IN_PROGRESS:
            raise OSError(answer, os.strerror(answer))

    def run(self, check: Callable[[], None]) -> None:
        """Block until all connections are made; `check` may raise in order to end the wait."""
        while self._calling or self._awaited:
            self.turn(_SLICE)
            check()

    def turn(self, patience: float) -> None:
        """Process all ready sockets; block for at most `patience` seconds until any is ready."""
        for key, _ in self._selector.select(patience):
            if key.data is None:
                self._accept()
            elif key.data.wire.fileno() >= 0:  # another event of this round may have closed it
                self._continue(key.data)
        for handshake in self._strangers.overdue(monotonic()):
            self._cut_off(handshake)

    def close(self, *, keep: bool) -> dict[tuple[int, int], socket.socket]:
        """Return `made`; close unfinished connections, and all if one is missing or not `keep`."""
        # Failed calls and strangers are still registered; finished connections are not.
        unfinished = [key.data.wire for key in self._selector.get_map().values() if key.data]
        # An incomplete set does not help the caller, which raises: the sockets must not leak.
        if not keep or self._calling or self._awaited:
            unfinished += self.made.values()
        for wire in unfinished:
            wire.close()
        self._selector.close()
        return self.made

    def _accept(self) -> None:
        # Bounded, so that a flood of connections can't keep this loop from the pending handshakes.
        for _ in range(_BATCH):
            try:
                wire, _ = self._listener.accept()
            except OSError:  # no connection waits, or the caller has gone meanwhile
                return
            self._await_hello(wire)

    def _await_hello(self, wire: socket.socket) -> None:
        wire.setblocking(False)
        handshake = PendingHandshake(wire, HandshakeAnswerer(self._key, self._expects))
        self._selector.register(wire, selectors.EVENT_READ, handshake)
        oldest = self._strangers.admit(handshake, monotonic())
        if oldest is not None:
            self._cut_off(oldest)

    def _expects(self, caller: Introduction) -> bool:
        expected = (caller.rank, caller.purpose) in self._awaited
        return expected and caller.peer == self._me and caller.group == self._group

    def _continue(self, handshake: PendingHandshake) -> None:
        try:
            self._step(handshake)
        except BlockingIOError:
            return
        except (OSError, BadHandshake) as error:
            # A wrong answer to a call is an error in the job; a wrong caller may be anybody.
            if isinstance(handshake.side, HandshakeCaller):
                raise _refused(handshake, error) from error
            self._cut_off(handshake)
            return
        if not handshake.side.wants:
            self._finish(handshake)

    def _step(self, handshake: PendingHandshake) -> None:
        wire, side = handshake.wire, handshake.side
        if isinstance(side, HandshakeCaller) and not handshake.greeted:
            # A writable socket has either connected or failed: SO_ERROR distinguishes the two.
            failed = wire.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if failed:
                raise OSError(failed, os.strerror(failed))
            wire.sendall(side.hello)
            handshake.greeted = True
            self._selector.modify(wire, selectors.EVENT_READ, handshake)
            return
        # Never more than the handshake wants: later bytes belong to the connection's user.
        data = wire.recv(side.wants)
        if not data:
            raise ConnectionResetError("it closed the connection")
        # The send buffer of a new connection has room for these few bytes, so this can't block.
        wire.sendall(side.feed(data))

    def _finish(self, handshake: PendingHandshake) -> None:
        # Before the socket is handed out: the next bytes belong to the group's channels.
        self._selector.unregister(handshake.wire)
        side = handshake.side
        if isinstance(side, HandshakeAnswerer):
            self._strangers.remove(handshake)
            assert side.introduction is not None
            handshake.peer, handshake.purpose = side.introduction.rank, side.introduction.purpose
            # Checked again: a second connection may have finished since the introduction.
            if (handshake.peer, handshake.purpose) not in self._awaited:
                handshake.wire.close()
                return
            self._awaited.discard((handshake.peer, handshake.purpose))
        else:
            self._calling -= 1
        self.made[handshake.peer, handshake.purpose] = handshake.wire

    def _cut_off(self, handshake: PendingHandshake) -> None:
        self._strangers.remove(handshake)
        self._selector.unregister(handshake.wire)
        handshake.wire.close()


def _refused(handshake: PendingHandshake, error: Exception) -> OSError:
    reason = getattr(error, "strerror", None) or str(error)
    if isinstance(error, BadHandshake):
        reason += (
            " (do all processes of the job have the same token, NC10D_TOKEN_FILE or NC10D_TOKEN?)"
        )
    return ConnectionError(f"rank {handshake.peer}: {reason}")
