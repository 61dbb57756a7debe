"""Call sites: find the line of the user's program that made a call, in some tens of ns.

The function that entered the engine is the thread's innermost frame. Code objects from nc10d, the
standard library and torch are in the table as SITE_OURS, and so is what stands for one in frames of
C code; the first frame with another code object is the user's. That frame's current instruction is
looked up in a table from instructions to texts ("train.py:41"), which call_sites.py fills. A thread
reads only its own frames, which stand still meanwhile.
"""

from __future__ import annotations

from numba import njit, types

from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native.atomics import load, load_acquire
from nc10d.backend.cpu.native.cpython import (
    FRAME,
    FRAME_BLOCK,
    FRAME_CODE,
    FRAME_INSTRUCTION,
    FRAME_OUTER,
)

DEEPEST = 200  # frames that are looked at, the user's included
# CPython's C interface: this thread's state, with or without the GIL.
thread_state = types.ExternalFunction("PyGILState_GetThisThreadState", types.int64())


@njit(nogil=True)
def nc10d_look_up(table: int, key: int) -> int:
    """Return the entry for an address in a table of sites, or 0."""
    slot = ((key >> 4) * 0x9E3779B1 >> 12) & (at.SITE_SLOTS - 1)
    while True:
        place = table + at.SITE_KEYS + 16 * slot
        found = load_acquire(place)
        if found == key:
            return load(place + 8)
        if found == 0:  # the table is never full
            return 0
        slot = (slot + 1) & (at.SITE_SLOTS - 1)


@njit(nogil=True)
def nc10d_site(channel: int) -> int:
    """Return the address of the caller's line as text; 0 if none, NEW_SITE if unseen."""
    table = load(channel + at.C_SITES)
    if table == 0:
        return 0
    frame = load(thread_state() + FRAME)
    if FRAME_BLOCK >= 0:
        frame = load(frame + FRAME_BLOCK)
    for _ in range(DEEPEST):
        if frame == 0:
            return 0
        if nc10d_look_up(table, load(frame + FRAME_CODE)) != at.SITE_OURS:
            text = nc10d_look_up(table, load(frame + FRAME_INSTRUCTION))
            if text != 0:
                return text
            return 0 if load(table + at.SITE_FULL) != 0 else at.NEW_SITE
        frame = load(frame + FRAME_OUTER)
    return 0
