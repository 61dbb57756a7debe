"""Wires to other hosts as the engine uses them, and the thread that waits for all of them.

The engine runs without the GIL and uses plain sockets. When it blocks, the poller's thread waits in
epoll for all the process's wires, and wakes the channels that wait for a ready wire.
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native import prepared_calls as plain
from nc10d.backend.cpu.native import sockets
from nc10d.backend.cpu.native.offsets import PAGE, Words
from nc10d.backend.cpu.native.tcp_streams import FUNCTIONS
from nc10d.base.call_site import called
from nc10d.base.signal_errors import Thread

SLICE_MS = 1000
PAGE_WORDS = PAGE // 8


@dataclass(slots=True)
class HostSocket:
    """A socket to a rank; `address` is the block of words by which the engine knows the socket."""

    rank: int
    sock: socket.socket
    address: int


class Streams:
    """A channel's wires, by rank, and the block on which programs wait."""

    def __init__(self, poller: Poller, wires: Mapping[int, HostSocket], size: int) -> None:
        self.wires = wires
        self._table: Words = np.zeros(size, np.int64)
        for rank, wire in wires.items():
            self._table[rank] = wire.address
        # The arrays belong to this object, and the engine has their addresses: keep them alive.
        self._waiting: Words = np.zeros(4 * size, np.int64)
        self._poll: Words = np.zeros(2 * size, np.int64)
        self._words: Words = np.zeros(at.STREAMS_BYTES // 8, np.int64)
        self.address: int = plain.address(self._words)
        fields = {
            at.S_READY: poller.block(),
            at.S_EPOLL: poller.epoll.fileno(),
            at.S_WIRES: plain.address(self._table),
            at.S_WAITING: plain.address(self._waiting),
            at.S_POLL: plain.address(self._poll),
        }
        fields |= {offset: function.address for offset, function in FUNCTIONS.items()}
        for offset, value in fields.items():
            self._words[offset // 8] = value

    def remote_call(self) -> str:
        """Return a remote rank's call that differs from this rank's, and its source line."""
        call = self._remote_text(at.RECORD_TEXT, at.TEXT_BYTES)
        return called(call, self._remote_text(at.RECORD_SITE, at.SITE_BYTES))

    def _remote_text(self, start: int, count: int) -> str:
        raw = self._words.view(np.uint8)[at.S_SEEN + start : at.S_SEEN + start + count]
        return raw.tobytes().partition(b"\0")[0].decode(errors="replace")

    def error(self) -> str:
        """Return the reason why a wire has failed."""
        number = int(self._words[at.S_ERROR // 8])
        return os.strerror(number) if number else "the connection was closed"


class Poller:
    """All of a process's wires, and the thread that polls them."""

    # Blocks are never freed: the thread may still read the block of a wire that has been closed.

    def __init__(self, rank_block: int) -> None:
        self._rank_block = rank_block
        # An epoll instance for all groups: a single thread sleeps for every wire in the process.
        self.epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        sockets.add_to_epoll(self.epoll.fileno(), self._wake, select.EPOLLIN, 0)
        self._events: Words = np.zeros(sockets.EVENTS * sockets.EVENT_BYTES // 8, np.int64)
        self._pages: list[Words] = []
        self._used = PAGE_WORDS
        self._lock = threading.Lock()
        self._thread = Thread(target=self._run, name="nc10d-poller", daemon=True)
        self._thread.start()

    def block(self) -> int:
        """Return the address of a zeroed block for a wire or for a channel's wait."""
        with self._lock:
            if self._used == PAGE_WORDS:
                # Pages never move, since the engine and the thread hold addresses into them.
                self._pages.append(np.zeros(PAGE_WORDS, np.int64))
                self._used = 0
            start = self._used
            self._used += at.WIRE_BYTES // 8
            return int(plain.address(self._pages[-1][start:]))

    def wire(self, rank: int, sock: socket.socket) -> HostSocket:
        """Make a wire from a connected, non-blocking socket."""
        address = self.block()
        words = _words(address)
        words[at.W_FD // 8], words[at.W_RANK // 8] = sock.fileno(), rank
        # ONESHOT, and disarmed at first: the engine arms only wires that programs wait for. So
        # other data does not wake the thread.
        sockets.add_to_epoll(self.epoll.fileno(), sock.fileno(), select.EPOLLONESHOT, address)
        return HostSocket(rank, sock, address)

    def streams(self, wires: Mapping[int, HostSocket], size: int) -> Streams:
        """Return a channel's streams; ranks are below `size`."""
        return Streams(self, wires, size)

    def close(self) -> None:
        """Join the thread, which ends when the process's stop word is set; idempotent."""
        # The thread sleeps in epoll for up to a slice; the event makes it see the stop word now.
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            self.disown()

    def disown(self) -> None:
        """Close the descriptors."""
        wake, self._wake = self._wake, -1
        if wake >= 0:
            os.close(wake)
        self.epoll.close()

    def _run(self) -> None:
        sockets.poll(self._rank_block, self.epoll.fileno(), plain.address(self._events), SLICE_MS)


def _words(address: int) -> Words:
    kind = ctypes.c_int64 * (at.WIRE_BYTES // 8)
    return np.ctypeslib.as_array(kind.from_address(address))
