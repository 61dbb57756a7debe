"""Whether and how the ranks of a group read and write each other's memory where it lies.

Ranks that are threads of one process share all of it, and every mate has mapped a rank's arena.
Whether the kernel copies from one process to another (CMA) depends on users, containers and
ptrace rules: each rank tries it once with each mate. A group uses it if all of its ranks can.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nc10d.backend.cpu.memory.arena import Arena
from nc10d.backend.cpu.memory.host_peer import HostPeer, process
from nc10d.backend.cpu.native import entry_points
from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native import prepared_calls as plain

Words = npt.NDArray[np.int64]
# In the page of a rank's doorbell: the address and the value of a word of its private memory.
PROBE = 64
AMID_A_COPY = "RD"
"""A thread's states (proc_pid_stat(5)) in which it may be amid a copy: it runs or would like to, or
the kernel does something for it that no signal ends. A stop is taken before a copy or after it."""
GONE = "X"


class AccessProbe:
    """A word of private memory for mates to try to read; keeps it alive."""

    def __init__(self, arena: Arena) -> None:
        self._word: Words = np.array([secrets.randbits(62)], np.int64)
        arena.mapping.words(PROBE, 2)[:] = plain.address(self._word), self._word[0]


def access_to(mate: HostPeer) -> int:
    """Return what the kernel lets me do with a mate's private memory: 0, READS or WRITES.

    NC10D_CMA=0 says 0 without trying.
    """
    if mate.process == process():
        return at.WRITES
    if os.environ.get("NC10D_CMA") == "0":
        return 0
    place, value = mate.mapping.words(PROBE, 2).tolist()
    got: Words = np.zeros(1, np.int64)
    mine = plain.address(got)
    if entry_points.read_process(mate.pid, mine, place, 8) != 0 or int(got[0]) != value:
        return 0
    there: Words = np.array([place, 8, 0], np.int64)
    iovec = plain.address(there)
    writes = entry_points.write_process(mate.pid, mine, 8, iovec, iovec + 16) == 8
    # What is lent has to be taken back, for which one looks whether a mate's thread runs.
    with contextlib.suppress(OSError):
        if writes and _state(mate.pid, mate.pid) != GONE:
            return at.WRITES
    return at.READS


def take_back(area: int, mates: Iterable[int]) -> None:
    """Return when no mate (a process) writes into private memory any more that my area lends.

    A writer that has begun is waited for, as long as it runs or the kernel works for it. One that
    is stopped has not begun, or has ended.
    """
    nbytes = area + at.AREA_LOAN_BYTES
    while (seen := entry_points.load_word(nbytes)) != 0:
        entry_points.compare_and_swap(nbytes, seen, 0)
    while (writer := entry_points.load_word(area + at.AREA_WRITER)) != 0:
        if not any(_may_be_writing(mate, writer) for mate in mates):
            return
        os.sched_yield()


def _may_be_writing(pid: int, thread: int) -> bool:
    try:
        return _state(pid, thread) in AMID_A_COPY
    except OSError:  # nobody tells: no descriptor is free, say
        return True


def _state(pid: int, thread: int) -> str:
    """Return a thread's state, a letter; GONE if there is none."""
    try:
        status = Path(f"/proc/{pid}/task/{thread}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return GONE
    return status.rpartition(")")[2].split()[0]


def reach_block(mates: Sequence[HostPeer], areas: Sequence[int], span: int, access: int) -> Words:
    """Return the block that tells the engine how to read what `mates` expose; see layout.py.

    `areas` are the addresses of their areas in the group.
    """
    head = at.R_ARENAS // 8
    words: Words = np.zeros(head + at.R_ROW // 8 * len(mates), np.int64)
    words[:head] = access, span
    rows = words[head:].reshape(len(mates), -1)
    for row, mate, area in zip(rows, mates, areas, strict=True):
        row[:] = mate.mapping.base, 0 if mate.process == process() else mate.pid, area
    return words
