"""Peer access: reading and writing other local ranks' arrays in place.

| the array lies in | a peer accesses it |
|---|---|
| the rank's arena | directly: every rank of the host has mapped it |
| private memory, and the peer is a thread in the same process | directly |
| another process's private memory | by process_vm_readv and _writev (cross-memory attach, CMA) |

Whether the kernel permits CMA depends on users, containers and ptrace rules, so each rank tries CMA
once with each peer. A group uses CMA only if all ranks can.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from nc10d.backend.cpu.memory.arena import Arena, ArenaMapping
from nc10d.backend.cpu.memory.host_peer import HostPeer, process
from nc10d.backend.cpu.native import entry_points
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native import prepared_calls as plain
from nc10d.backend.cpu.native.offsets import Words
from nc10d.base.run_to_end import off_main

# In the page of a rank's doorbell, behind NOTICE_VERSION (offsets.py): the address and the value
# of a word in the rank's private memory.
PROBE = 128
MAYBE_COPYING = "RD?"
"""States of a thread that may be amid a copy (proc_pid_stat(5)): running or ready to run, or asleep
in the kernel uninterruptibly. A signal stops a thread only before or after a copy."""
GONE, UNKNOWN = "X", "?"


class AccessProbe:
    """A word of private memory that peers try to read, as long as this object lives."""

    def __init__(self, arena: Arena) -> None:
        self._word: Words = np.array([secrets.randbits(62)], np.int64)
        arena.mapping.words(PROBE, 2)[:] = plain.address(self._word), self._word[0]


def arena_secret(arena: ArenaMapping) -> int:
    """Return a number that only the ranks which have mapped this arena know: its probe's value."""
    return int(arena.words(PROBE, 2)[1])


def access_to(peer: HostPeer) -> int:
    """Return how this rank may access a peer's private memory: 0 (not at all), READS or WRITES.

    WRITES includes reading. With NC10D_CMA=0 other processes' memory is not accessed.
    """
    if peer.process == process():
        return at.WRITES
    if os.environ.get("NC10D_CMA") == "0":
        return 0
    place, value = peer.mapping.words(PROBE, 2).tolist()
    got: Words = np.zeros(1, np.int64)
    buffer = plain.address(got)
    if entry_points.read_process(peer.pid, buffer, place, 8) != 0 or int(got[0]) != value:
        return 0
    there: Words = np.array([place, 8, 0], np.int64)
    iovec = plain.address(there)
    writes = entry_points.write_process(peer.pid, buffer, 8, iovec, iovec + 16) == 8
    # To withdraw exposed memory, a rank reads the states of peers' threads: that must work, too.
    known = writes and _state(peer.pid, peer.pid) not in (GONE, UNKNOWN)
    return at.WRITES if known else at.READS


@off_main
def withdraw(area: int, processes: Iterable[int]) -> None:
    """Withdraw the private memory that this rank's area exposes; then no peer writes there. Blocks.

    `processes` are the peers' pids. A peer registers the writing thread before the system call, in
    which the kernel reads the length of the exposed memory. So this call waits while a registered
    thread runs or is in the kernel; a stopped thread is not amid a write.
    """
    nbytes = area + at.AREA_WRITABLE_BYTES
    while (seen := entry_points.load_word(nbytes)) != 0:
        entry_points.compare_and_swap(nbytes, seen, 0)
    while (writer := entry_points.load_word(area + at.AREA_WRITER)) != 0:
        if not any(_state(pid, writer) in MAYBE_COPYING for pid in processes):
            return
        os.sched_yield()


def _state(pid: int, thread: int) -> str:
    """Return the letter for a thread's state; GONE if there is no such thread.

    UNKNOWN if its state can't be read, e.g. because no descriptor is free.
    """
    try:
        status = Path(f"/proc/{pid}/task/{thread}/stat").read_text()
    except OSError as error:
        return GONE if isinstance(error, FileNotFoundError | ProcessLookupError) else UNKNOWN
    return status.rpartition(")")[2].split()[0]


def peer_access_block(
    peers: Sequence[HostPeer], areas: Sequence[int], span: int, access: int
) -> Words:
    """Return the block by which the engine accesses `peers`' exposed arrays; see offsets.py.

    `areas` are the addresses of their areas in the group, `span` the bytes in this rank's arena.
    `access` is 0, READS or WRITES.
    """
    head = at.R_ARENAS // 8
    words: Words = np.zeros(head + at.R_ROW // 8 * len(peers), np.int64)
    words[:head] = access, span
    rows = words[head:].reshape(len(peers), -1)
    for row, peer, area in zip(rows, peers, areas, strict=True):
        row[:] = peer.mapping.base, 0 if peer.process == process() else peer.pid, area
    return words
