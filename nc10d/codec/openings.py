"""The openings of a call, in memory that is kept between calls.

A small plain object is written, checked and read there.

Contract: `take` returns Openings that no other code has. `give_back` ends their use; they are left
to the garbage collector instead if anything may still refer to their memory.
"""

from __future__ import annotations

import pickle
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from nc10d.base.signal_errors import raised_here
from nc10d.codec import opcodes
from nc10d.codec.decoder import Bytes
from nc10d.codec.messages import OPENING, PIECE, WORDS, MessageKind, cut, pieces_used
from nc10d.codec.plain import PlainWriter, is_plain

_PLAIN = int(MessageKind.PLAIN)
_START = WORDS.size
"""The byte of an opening at which the stream begins."""
_KEPT = 1 << 16
"""The bytes of the longest stream whose memory is kept for later calls."""
ALL_ROWS, NO_ROWS = slice(None), slice(0)
"""Rows of a table."""
_spare: defaultdict[int, list[Openings]] = defaultdict(list)
"""What no call uses now, by count."""


class Openings:
    """This rank's opening, `own`, and a `table` with the openings of `count` messages.

    `first` is the first piece of the table's first row.
    """

    __slots__ = (
        *("_dirty", "_end", "_own_at", "_own_pieces", "_pieces", "_rows", "_rows_at", "_streams"),
        *("_table_at", "_words", "_writer"),
        *("first", "own", "table"),
    )

    def __init__(self, count: int) -> None:
        self._writer = PlainWriter(_START)
        self.own: Bytes = self._writer.memory[:OPENING]
        self.table: Bytes = np.zeros((count, OPENING), np.uint8)
        # The same arrays for each message: a call of known arrays is prepared.
        self._own_pieces, self._pieces = cut(self.own), cut(self.table[0])
        self.first = self._pieces[0]
        self._words = self.table[0].data[:_START].cast("q")
        self._streams = [row.data[_START:] for row in self.table]
        self._rows = np.empty((opcodes.ROWS, OPENING), np.int64)
        self._own_at, self._table_at, self._rows_at = (
            x.ctypes.data for x in (self.own, self.table, self._rows)
        )
        self._dirty = self._end = _START

    def put(self, value: Any) -> bool:
        """Write an object; return whether `own` has its message: it is plain, and small."""
        self._end = end = self._writer.write(value)
        dirty, self._dirty = self._dirty, abs(end)
        if 0 < end <= OPENING:
            own_at, rows_at = self._own_at, self._rows_at
            return bool(opcodes.seal(own_at, OPENING, end, dirty, _PLAIN, _START, rows_at))
        self.own[abs(end) :] = 0
        return False

    def pieces(self) -> Sequence[Bytes]:
        """Return the pieces of `own` that have its message."""
        return self._own_pieces[: -(-self._end // PIECE)]

    def later_pieces(self) -> Sequence[Bytes]:
        """Return the pieces that follow `first`, which has come, in the table's first row."""
        kind, size, _ = self._words
        one = kind == _PLAIN and 0 <= size <= PIECE - _START
        return () if one else self._pieces[1 : pieces_used(self.first)]

    def stream(self) -> Bytes | None:
        """Return the stream of the object of the latest `put`, None if that is not plain."""
        stream = self._writer.memory[_START : max(_START, self._end)]
        return stream if is_plain(stream) else None

    def objects(self, rows: slice = ALL_ROWS) -> list[Any] | None:
        """Return the objects of some rows; None unless each message is that of a plain object."""
        streams, table_at, rows_at = self._streams, self._table_at, self._rows_at
        if not opcodes.check_openings(table_at, len(streams), OPENING, _PLAIN, _START, rows_at):
            return None
        try:
            return [pickle.loads(stream) for stream in streams[rows]]
        except raised_here(Exception):
            return None


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
