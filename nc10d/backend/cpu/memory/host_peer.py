"""Another rank of this host: its mapped memory, its pidfd, and how its process ended."""

from __future__ import annotations

import fcntl
import os
import select
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from nc10d.backend.cpu.memory.arena import ArenaMapping


def process() -> str:
    """Return what tells this process from all others of its host: pids repeat in containers."""
    return f"{os.stat('/proc/self/ns/pid').st_ino}/{os.getpid()}"


# How long a process may take to end after the kernel has taken its memory away.
_DYING_MS = 500


def ended(mate: HostPeer) -> bool:
    """Say whether a mate's process has ended; waits a moment for one that is being killed."""
    if mate.pidfd < 0:
        return False
    poller = select.poll()
    poller.register(mate.pidfd, select.POLLIN)
    return bool(poller.poll(_DYING_MS))


def death(mate: HostPeer) -> str:
    """Say how a process ended, as far as the kernel tells: by a signal, or with a code."""
    status = _status_of_zombie(mate.pid)
    if status is None:
        status = _status_by_pidfd(mate.pidfd)
    if status is None:
        return "it has ended"
    if os.WIFSIGNALED(status):
        return f"killed by signal {os.WTERMSIG(status)}"
    return f"it exited with code {os.WEXITSTATUS(status)}"


def _status_of_zombie(pid: int) -> int | None:
    try:
        # Its name is any bytes: one that is longer than 15 is cut, in the middle of a letter too.
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    # proc(5): the state is field 3, the exit status field 52 (0 unless we may look).
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


@dataclass(slots=True)
class HostPeer:
    """Another rank of this host (or myself): its memory here, and how to know that it lives.

    `number` is its rank in the job, `rank` its number on the host. `pid` is what it calls itself.
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
