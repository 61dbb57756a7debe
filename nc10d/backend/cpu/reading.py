"""Whether and how the ranks of a group read each other's memory where it lies.

Ranks that are threads of one process share all of it, and every mate has mapped a rank's arena.
Whether the kernel copies from one process to another (CMA) depends on users, containers and
ptrace rules: each rank tries it once with each mate. A group uses it if all of its ranks can.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence

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


class Probe:
    """A word of private memory for mates to try to read; keeps it alive."""

    def __init__(self, arena: Arena) -> None:
        self._word: Words = np.array([secrets.randbits(62)], np.int64)
        arena.mapping.words(PROBE, 2)[:] = plain.address(self._word), self._word[0]


def can_read(mate: Mate) -> bool:
    """Say whether a mate's private memory can be read; NC10D_CMA=0 says no without trying."""
    if mate.pid == os.getpid():
        return True
    if os.environ.get("NC10D_CMA") == "0":
        return False
    place, value = mate.mapping.words(PROBE, 2).tolist()
    got: Words = np.zeros(1, np.int64)
    return bool(engine.read_process(mate.pid, plain.address(got), place, 8) == 0) and (
        int(got[0]) == value
    )


def reach_block(mates: Sequence[Mate], areas: Sequence[int], span: int, cma: bool) -> Words:
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
