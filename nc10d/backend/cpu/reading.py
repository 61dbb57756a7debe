"""Whether and how the ranks of a group read and write each other's memory where it lies.

Ranks that are threads of one process share all of it, and every mate has mapped a rank's arena.
Whether the kernel copies from one process to another (CMA) depends on users, containers and
ptrace rules: each rank tries it once with each mate. A group uses it if all of its ranks can.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from nc10d.backend.cpu.arena import Arena
from nc10d.backend.cpu.mates import Mate
from nc10d.backend.cpu.native import arrays as plain
from nc10d.backend.cpu.native import engine
from nc10d.backend.cpu.native import layout as at

Words = npt.NDArray[np.int64]
# In the page of a rank's doorbell: the address and the value of a word of its private memory.
PROBE = 64
BUSY = "RD"
"""A thread's states, as the kernel tells them, amid a copy; a signal stops it before or after."""


class Probe:
    """A word of private memory for mates to try to read; keeps it alive."""

    def __init__(self, arena: Arena) -> None:
        self._word: Words = np.array([secrets.randbits(62)], np.int64)
        arena.mapping.words(PROBE, 2)[:] = plain.address(self._word), self._word[0]


def can_reach(mate: Mate) -> int:
    """Say whether the kernel READS a mate's private memory, or WRITES there too; 0 if neither.

    NC10D_CMA=0 says 0 without trying.
    """
    if mate.pid == os.getpid():
        return at.WRITES
    if os.environ.get("NC10D_CMA") == "0":
        return 0
    place, value = mate.mapping.words(PROBE, 2).tolist()
    got: Words = np.zeros(1, np.int64)
    mine = plain.address(got)
    if engine.read_process(mate.pid, mine, place, 8) != 0 or int(got[0]) != value:
        return 0
    there: Words = np.array([place, 8, 0], np.int64)
    iovec = plain.address(there)
    writes = engine.write_process(mate.pid, mine, 8, iovec, iovec + 16) == 8
    # What is lent has to be taken back, for which one looks whether a mate's thread runs.
    return at.WRITES if writes and _may_be_writing(mate.pid, mate.pid) is not None else at.READS


def take_back(area: int, mates: Iterable[int]) -> None:
    """Return when no mate (a process) writes into private memory any more that my area lends.

    A writer that has begun is waited for, as long as it runs or the kernel works for it. One that
    is stopped has not begun, or has ended.
    """
    nbytes = area + at.AREA_LOAN_BYTES
    while (seen := engine.load_word(nbytes)) != 0:
        engine.compare_and_swap(nbytes, seen, 0)
    while (writer := engine.load_word(area + at.AREA_WRITER)) != 0:
        if not any(_may_be_writing(mate, writer) for mate in mates):
            return
        os.sched_yield()


def _may_be_writing(pid: int, thread: int) -> bool | None:
    """Say whether a thread runs or is busy in the kernel; None if nobody tells."""
    try:
        status = Path(f"/proc/{pid}/task/{thread}/stat").read_text()
    except OSError:
        return None
    return status.rpartition(")")[2].split()[0] in BUSY


def reach_block(mates: Sequence[Mate], areas: Sequence[int], span: int, cma: int) -> Words:
    """Return the block that tells the engine how to read what `mates` expose; see layout.py.

    `areas` are the addresses of their areas in the group.
    """
    head = at.R_ARENAS // 8
    words: Words = np.zeros(head + at.R_ROW // 8 * len(mates), np.int64)
    words[:head] = cma, span
    rows = words[head:].reshape(len(mates), -1)
    for row, mate, area in zip(rows, mates, areas, strict=True):
        row[:] = mate.mapping.base, 0 if mate.pid == os.getpid() else mate.pid, area
    return words
