"""Why a group failed, as all of its ranks will say it: the first cause wins, everywhere.

The rank that learns a cause writes it into its own shared part, and then competes for one word,
the first rank's: whoever sets it decides. The winner's number is copied into everyone's word,
which is what every wait looks at. Memory outlives its owner, so dead ranks do not matter.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nc10d import retold
from nc10d.backend.cpu.native import engine
from nc10d.backend.cpu.native import layout as at
from nc10d.errors import DistError

if TYPE_CHECKING:
    from nc10d.backend.cpu.area import Areas
    from nc10d.backend.cpu.mates import Mate

# How long a process may take to end after the kernel has taken its memory away.
_DYING_MS = 500


def publish(areas: Areas, error: DistError) -> None:
    """Make `error` the group's cause unless there is one already; every rank wakes up."""
    first = areas.address(0) + at.AREA_ABORT
    with areas.reporting:
        # Peers may be reading what this rank reported first: it is never written again.
        if not areas.reported and engine.load_word(first) == 0:
            areas.write_cause(retold.written(error, at.CAUSE_BYTES))
            areas.reported = True
    winner = engine.load_word(first)
    if winner == 0:
        winner = engine.compare_and_swap(first, 0, areas.rank + 1) or areas.rank + 1
    for rank in range(areas.size):
        engine.compare_and_swap(areas.address(rank) + at.AREA_ABORT, 0, winner)


def read(areas: Areas) -> DistError | None:
    """Return the group's cause as an error of this rank, or None."""
    winner = engine.load_word(areas.address(areas.rank) + at.AREA_ABORT)
    return retold.read(areas.read_cause(winner - 1)) if winner else None


def known(areas: Areas) -> bool:
    """Say whether the group has a cause to fail."""
    return bool(engine.load_word(areas.address(areas.rank) + at.AREA_ABORT))


def ended(mate: Mate) -> bool:
    """Say whether a mate's process has ended; waits a moment for one that is being killed."""
    if mate.pidfd < 0:
        return False
    poller = select.poll()
    poller.register(mate.pidfd, select.POLLIN)
    return bool(poller.poll(_DYING_MS))


def death(mate: Mate) -> str:
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


def listing(words: Sequence[str]) -> str:
    """Join words for a sentence."""
    return ", ".join(words[:-1]) + (" and " if len(words) > 1 else "") + words[-1] if words else ""
