"""Another rank on this host: mapped memory, pidfd, and how the process ended."""

from __future__ import annotations

import fcntl
import functools
import os
import select
import socket
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from nc10d.backend.cpu.memory import proc
from nc10d.backend.cpu.memory.arena import ArenaMapping
from nc10d.base.run_to_end import off_main


@functools.cache  # first called while a group forms, which is never in the main thread
def process() -> str:
    """Return a name for this process that is unique on its host; pids repeat in containers."""
    return f"{proc.namespace('pid')}/{os.getpid()}"


os.register_at_fork(after_in_child=process.cache_clear)


# A killed process loses memory and sockets first; the pidfd becomes ready within this time.
_DYING_MS = 500


def ended(peer: HostPeer, patience_ms: int = _DYING_MS) -> bool:
    """Return whether a peer's process has ended; for a live one blocks for `patience_ms`."""
    if peer.pidfd < 0:
        return False
    poller = select.poll()
    poller.register(peer.pidfd, select.POLLIN)
    return bool(poller.poll(patience_ms))


@off_main
def death(peer: HostPeer) -> str:
    """Return for an error text how a process ended: by a signal, or with a code, if known."""
    status = _status_of_zombie(peer.pid)
    if status is None:
        status = _status_by_pidfd(peer.pidfd)
    if status is None:
        return "it has ended"
    if os.WIFSIGNALED(status):
        return f"killed by signal {os.WTERMSIG(status)}"
    return f"it exited with code {os.WEXITSTATUS(status)}"


def _status_of_zombie(pid: int) -> int | None:
    try:
        # The line holds the process's name, which may end in the middle of a UTF-8 character.
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    # proc(5): the state is field 3, the exit status field 52 (0 without permission to read it).
    return int(fields[49]) if fields[0] in "ZX" else None


# linux/pidfd.h: PIDFD_GET_INFO = _IOWR(0xFF, 11, 64 bytes); the status is there once it is reaped.
_GET_INFO = 0xC040FF0B
_INFO_EXIT = 1 << 3


def _status_by_pidfd(pidfd: int) -> int | None:
    info = bytearray(64)
    struct.pack_into("<Q", info, 0, _INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, _GET_INFO, info)
    except OSError:
        return None
    (mask,) = struct.unpack_from("<Q", info, 0)
    (status,) = struct.unpack_from("<i", info, 60)
    return int(status) if mask & _INFO_EXIT else None


def mask(ranks: Iterable[int]) -> int:
    """Return local ranks as bits in an int64; rank 63 is the sign."""
    bits = sum(1 << rank for rank in ranks)
    return bits - (1 << 64) if bits >> 63 else bits


@dataclass(slots=True)
class HostPeer:
    """A rank on this host (a peer or this rank itself): the arena, mapped here, and the process.

    `number` is the rank in the job, `rank` the number on the host. `pid` is the pid in the
    process's own namespace. `pidfd` becomes readable when the process ends; -1 for none. `wire` is
    the control connection to the peer.
    """

    rank: int
    number: int
    pid: int
    process: str
    host: str
    mapping: ArenaMapping
    pidfd: int
    wire: socket.socket | None = None

    def close(self) -> None:
        """Close the descriptors; idempotent."""
        pidfd, self.pidfd = self.pidfd, -1
        if pidfd >= 0:
            os.close(pidfd)
        if self.wire is not None:
            self.wire.close()
