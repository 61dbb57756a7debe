"""Call sites: a table from bytecode instructions' addresses to lines in the user's program.

Compiled code looks its caller up in the table by the current instruction's address
(native/sites.py). If the address is missing, the engine answers NEW_SITE and Python calls `learn`.
Code objects in the table are kept alive, so that no other code can come to lie at their address.
When the table is full, calls from new lines have no site.
"""

from __future__ import annotations

import ctypes
import logging
import platform
import sys
import threading
from types import CodeType, FrameType

import numpy as np
import numpy.typing as npt

from nc10d.backend.cpu.native import offsets as at
from nc10d.backend.cpu.native.cpython import first_instruction
from nc10d.base.call_site import MOST_BYTES, is_users, text_at

# Entries at most: look-ups stay short while most slots are free.
LIMIT = at.SITE_SLOTS // 2
_MOST_VAIN = 64
"""Calls of `learn` in a row that add nothing, after which the engine stops asking."""


def text_in(address: int) -> str:
    """Return the site whose text lies at `address`; "" for 0."""
    raw = ctypes.string_at(address, at.SITE_BYTES) if address else b""
    return raw.partition(b"\0")[0].decode(errors="replace")


assert MOST_BYTES < at.SITE_BYTES, "the engine keeps a zero behind the text"


class CallSites:
    """One process's table; `address` is 0 on a CPython whose frames can't be read."""

    def __init__(self) -> None:
        self._table: npt.NDArray[np.int64] = np.zeros(2 + 2 * at.SITE_SLOTS, np.int64)
        self._texts: dict[str, npt.NDArray[np.uint8]] = {}
        self._alive: list[CodeType] = []
        self._lock = threading.RLock()
        self._vain = 0
        found = first_instruction()
        self.address: int = 0 if found is None else self._table.ctypes.data
        self._offset, no_code = found or (0, 0)
        if no_code:
            self._enter(no_code, at.SITE_OURS, self._enter.__code__)
        if found is None:
            python = f"{platform.python_implementation()} {platform.python_version()}"
            logging.getLogger("nc10d").warning(
                "nc10d: errors will not name the lines of calls: %s keeps its frames in a way that "
                "this version of nc10d does not know",
                python,
            )

    def learn(self) -> None:
        """Add this thread's callers: nc10d's code objects, and the line in the user's program."""
        # The frame that repeats the call to the engine must be among these callers, or in the table
        # already; else the engine asks again for ever.
        with self._lock:
            before = len(self._alive)
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and not is_users(frame.f_code.co_filename):
                self._enter(id(frame.f_code), at.SITE_OURS, frame.f_code)
                frame = frame.f_back
            if frame is not None:
                code = frame.f_code
                text = self._text(text_at(code.co_filename, frame.f_lineno or 0))
                self._enter(id(code) + self._offset + frame.f_lasti, text, code)
            # Another thread may have added the same at the same time. But a caller that the engine
            # never finds must not ask for ever.
            self._vain = self._vain + 1 if len(self._alive) == before else 0
            if self._vain > _MOST_VAIN or len(self._alive) >= LIMIT:
                self._table[at.SITE_FULL // 8] = 1

    def _text(self, text: str) -> int:
        found = self._texts.get(text)
        if found is None:
            raw = text.encode().ljust(at.SITE_BYTES, b"\0")
            found = self._texts[text] = np.frombuffer(raw, np.uint8).copy()
        return int(found.ctypes.data)

    def _enter(self, key: int, value: int, code: CodeType) -> None:
        first = at.SITE_KEYS // 8
        slot = ((key >> 4) * 0x9E3779B1 >> 12) & (at.SITE_SLOTS - 1)
        while True:
            place = first + 2 * slot
            found = int(self._table[place])
            if found == key or (found == 0 and len(self._alive) >= LIMIT):
                return
            if found == 0:
                break
            slot = (slot + 1) & (at.SITE_SLOTS - 1)
        self._alive.append(code)
        self._table[place + 1] = value
        self._table[place] = key  # last: compiled code reads without the lock


SITES = CallSites()
"""This process's table."""
learn = SITES.learn
