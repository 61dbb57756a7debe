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

from nc10d.codec import opcodes
from nc10d.codec.decoder import Bytes
from nc10d.codec.messages import OPENING, WORDS, MessageKind
from nc10d.codec.plain import MALFORMED, PlainWriter, is_plain

_PLAIN = int(MessageKind.PLAIN)
_KEPT = 1 << 16
"""The bytes of the longest stream whose memory is kept for later calls."""
_spare: defaultdict[int, list[Openings]] = defaultdict(list)
"""What no call uses now, by count."""


class Openings:
    """This rank's opening, `own`, and a `table` with the openings of `count` messages."""

    __slots__ = ("_dirty", "_own", "_rows", "_streams", "_writer", "fits", "own", "table")

    def __init__(self, count: int) -> None:
        self._writer = PlainWriter(WORDS.size)
        self._own = self._writer.memory[:OPENING].reshape(1, OPENING)
        self.own: Bytes = self._own[0]
        self.table: Bytes = np.zeros((count, OPENING), np.uint8)
        self._streams = [row.data[WORDS.size :] for row in self.table]
        self._rows = np.empty((opcodes.ROWS, OPENING + 1), np.int64)
        self._dirty = WORDS.size
        self.fits = False
        """Whether `own` has the whole message of the latest `put`."""

    def put(self, value: Any) -> Bytes | None:
        """Write a plain object and its message; return the stream, None for any other object."""
        whole, end = self._writer.write(value), self._writer.tell()
        self.fits = whole and end <= OPENING
        if end < self._dirty:  # peers get no byte of earlier objects
            self.own[end:] = 0
        self._dirty = end
        stream = self._writer.memory[WORDS.size : end]
        if not self.fits:
            return stream if whole and is_plain(stream) else None
        WORDS.pack_into(self.own.data, 0, _PLAIN, end - WORDS.size, 0)
        self.fits = self._plain(self._own)
        return stream if self.fits else None

    def plain(self) -> bool:
        """Return whether each message of the table is that of a plain object, in its opening."""
        return self._plain(self.table)

    def objects(self) -> list[Any] | None:
        """Return the objects of a table of plain objects; None if one of them is malformed."""
        try:
            return list(map(pickle.loads, self._streams))
        except MALFORMED:
            return None

    def _plain(self, table: Bytes) -> bool:
        return bool(opcodes.check_openings(table, _PLAIN, WORDS.size, self._rows))


def take(count: int) -> Openings:
    """Return Openings for `count` messages."""
    try:
        return _spare[count].pop()
    except IndexError:
        return Openings(count)


def give_back(openings: Openings) -> None:
    """Keep Openings for a later call."""
    if openings._dirty <= _KEPT:
        _spare[len(openings.table)].append(openings)
