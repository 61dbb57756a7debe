"""The openings of a call, in memory that is kept between calls.

A small plain object is written, checked and read there.

Contract: `take` returns Openings that no other code has. `give_back` ends their use; they are left
to the garbage collector instead if anything may still refer to their memory.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from typing import Any

import numpy as np

from nc10d.base.signal_errors import raised_here
from nc10d.codec import opcodes
from nc10d.codec.decoder import Bytes
from nc10d.codec.messages import OPENING, WORDS, MessageKind
from nc10d.codec.plain import MALFORMED, PlainWriter, is_plain

_PLAIN = int(MessageKind.PLAIN)
_START = WORDS.size
"""The byte of an opening at which the stream begins."""
_KEPT = 1 << 16
"""The bytes of the longest stream whose memory is kept for later calls."""
ALL_ROWS, NO_ROWS = slice(None), slice(0)
"""Rows of a table."""
_spare: defaultdict[tuple[int, int], list[Openings]] = defaultdict(list)
"""What no call uses now, by count and bytes."""


class Openings:
    """This rank's opening, `own`, and a `table` with the openings of `count` messages.

    An opening has `nbytes`.
    """

    __slots__ = ("_dirty", "_end", "_rows", "_streams", "_writer", "own", "table")

    def __init__(self, count: int, nbytes: int = OPENING) -> None:
        self._writer = PlainWriter(_START)
        self.own: Bytes = self._writer.memory[:nbytes]
        self.table: Bytes = np.zeros((count, nbytes), np.uint8)
        self._streams = [row.data[_START:] for row in self.table]
        self._rows = np.empty((opcodes.ROWS, nbytes + 1), np.int64)
        self._dirty = self._end = _START

    def put(self, value: Any) -> bool:
        """Write an object; return whether `own` has its message: it is plain, and small."""
        own = self.own
        self._end = end = self._writer.write(value)
        dirty, self._dirty = self._dirty, abs(end)
        if 0 < end <= len(own):
            return bool(opcodes.seal(own, end, dirty, _PLAIN, _START, self._rows))
        own[abs(end) :] = 0
        return False

    def stream(self) -> Bytes | None:
        """Return the stream of the object of the latest `put`, None if that is not plain."""
        stream = self._writer.memory[_START : max(_START, self._end)]
        return stream if is_plain(stream) else None

    def objects(self, rows: slice = ALL_ROWS) -> list[Any] | None:
        """Return the objects of some rows; None unless each message is that of a plain object."""
        if not opcodes.check_openings(self.table, _PLAIN, _START, self._rows):
            return None
        try:
            return list(map(pickle.loads, self._streams[rows]))
        except raised_here(*MALFORMED):
            return None


def take(count: int, nbytes: int = OPENING) -> Openings:
    """Return Openings of `nbytes` for `count` messages."""
    try:
        return _spare[count, nbytes].pop()
    except IndexError:
        return Openings(count, nbytes)


def give_back(openings: Openings) -> None:
    """Keep Openings for a later call."""
    if openings._dirty <= _KEPT:
        _spare[openings.table.shape].append(openings)
