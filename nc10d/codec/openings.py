"""The openings of a call, in memory that is kept between calls.

A small plain object is written, checked and read there: by `put` and `objects`, or by the hooks of
the operation that carries it (nc10d.codec.compiled_openings).

Contract: `take` returns Openings that no other code has. `give_back` ends their use; they are left
to the garbage collector instead if anything may still refer to their memory.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from time import monotonic
from typing import Any

import numpy as np

from nc10d.base.signal_errors import raised_here
from nc10d.codec import compiled_openings as at
from nc10d.codec import opcodes
from nc10d.codec.compiled_openings import EACH, MESSAGE, READS, START, WRITES
from nc10d.codec.decoder import Bytes
from nc10d.codec.messages import OPENING, PIECE, cut, pieces_used
from nc10d.codec.plain import PlainWriter, is_plain
from nc10d.kernels.hooks import H_RAN, REFUSED, UNFINISHED

_END, _DIRTY, _RAN = at.O_END // 8, at.O_DIRTY // 8, H_RAN // 8
_FUNCTIONS = at.O_SEEK, at.O_DUMP, at.O_FORGET, at.O_TELL
_KEPT = 1 << 16
"""The bytes of the longest stream whose memory is kept for later calls."""
ALL_ROWS, NO_ROWS = slice(None), slice(0)
"""Rows of a table."""
SENDS, RECEIVES = WRITES | MESSAGE, READS | MESSAGE
"""Tasks of hooks: a message's."""
SPREADS, GETS = WRITES, READS
"""Those of a broadcast, on the root and on other ranks."""
GATHERS, GIVES = WRITES | READS | EACH, WRITES | EACH
"""Those of an all_gather, on ranks that get the objects and on others."""


class Openings:
    """This rank's opening, `own`, and a `table` with the openings of `count` messages.

    `first` is the first piece of the table's first row. `arrays` has, by task of the hooks, what
    the operation between them carries: an array to send or receive and its tag, or two arrays.
    """

    def __init__(self, count: int) -> None:
        self._writer = PlainWriter(START)
        self.own: Bytes = self._writer.memory[:OPENING]
        self.table: Bytes = np.zeros((count, OPENING), np.uint8)
        # The same arrays for each message: a call of known arrays is prepared.
        self._own_pieces, self._pieces = cut(self.own), cut(self.table[0])
        self.first = self._pieces[0]
        self.arrays: dict[int, tuple[Any, Any]] = {
            SENDS: (tuple(self._own_pieces), 0),
            RECEIVES: (tuple(self._pieces), 0),
            SPREADS: (self.own, self.own),
            GETS: (self.table, self.table),
            GATHERS: (self.own, self.table),
            GIVES: (self.own, self.table),
        }
        self._streams = [row.data[START:] for row in self.table]
        self._rows = np.empty((opcodes.ROWS, OPENING), np.int64)
        self._own_at, self._table_at, self._rows_at = (
            x.ctypes.data for x in (self.own, self.table, self._rows)
        )
        words = np.zeros(at.BLOCK_WORDS, np.int64)
        self._state = words.data
        self._state[_DIRTY] = START
        self.block: Any = None
        self.ran = 0
        """How many operations of a call have run between its hooks; set by `go_on`."""
        self.since = 0.0
        """When the call began, by time.monotonic(); some ms late if hooks have run."""
        self._written = 0
        """What `put` finds written, as PlainWriter.write tells it; 0: nothing."""

    def make_block(self) -> Any:
        """Return the block of the hooks; blocks to compile them."""
        words = {
            at.O_OWN: self._own_at,
            at.O_TABLE: self._table_at,
            at.O_COUNT: len(self.table),
            at.O_ROWS: self._rows_at,
        }
        self._functions: dict[int, Any] = dict(zip(_FUNCTIONS, self._writer.functions, strict=True))
        self._functions |= {at.O_LOADS: pickle.loads, at.O_START: START, at.O_LIST: list}
        words |= {offset: id(value) for offset, value in self._functions.items()} | at.prepare()
        for offset, word in words.items():
            self._state[offset // 8] = word
        self.block = self._state.obj
        return self.block

    def failed(self, error: Exception) -> int:
        """Return the answer of a call whose hook has raised an error."""
        if self._state[_RAN]:
            return UNFINISHED  # `objects` finds the same error
        self._written = self._writer.failed(error)
        return REFUSED

    def go_on(self, answer: int | None) -> None:
        """Begin the rest of a call whose hooks have not done all; None: they have not run."""
        self.since, self.ran = monotonic(), 0
        if answer is not None:
            self.ran = self._state[_RAN]
            self._written = self._written or self._state[_END]

    def put(self, value: Any) -> bool:
        """Write an object; return whether `own` has its message: it is plain, and small."""
        state = self._state
        dirty, state[_DIRTY] = state[_DIRTY], OPENING  # should writing fail
        end, self._written = self._written or self._writer.write(value), 0
        state[_END], state[_DIRTY] = end, abs(end)
        if 0 < end <= OPENING:
            return bool(at.seal(self._own_at, end, dirty, self._rows_at))
        self.own[abs(end) :] = 0
        return False

    def pieces(self) -> Sequence[Bytes]:
        """Return the pieces of `own` that have its message, but for those that have gone."""
        return self._own_pieces[self.ran : -(-self._state[_END] // PIECE)]

    def later_pieces(self) -> Sequence[Bytes]:
        """Return the pieces of the table's first row that have to come after `first`."""
        return self._pieces[max(1, self.ran) : pieces_used(self.first)]

    def stream(self) -> Bytes | None:
        """Return the stream of the object of the latest `put`, None if that is not plain."""
        stream = self._writer.memory[START : max(START, self._state[_END])]
        return stream if is_plain(stream) else None

    def objects(self, rows: slice = ALL_ROWS) -> list[Any] | None:
        """Return the objects of some rows; None unless each message is that of a plain object."""
        streams = self._streams
        if not at.whole(self._table_at, len(streams), self._rows_at):
            return None
        try:
            return [pickle.loads(stream) for stream in streams[rows]]
        except raised_here(Exception):
            return None


class _Pool(list[Openings]):
    """Openings for `count` messages that no call uses now."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def make(self) -> Openings:
        """Return new Openings."""
        return Openings(self._count)


class _Pools(dict[int, _Pool]):
    def __missing__(self, count: int) -> _Pool:
        return self.setdefault(count, _Pool(count))


pools = _Pools()
"""By the number of messages: Openings for Dispatcher.run_hooked, which takes them."""


def take(count: int) -> Openings:
    """Return Openings for `count` messages of a call that begins now."""
    pool = pools[count]
    try:
        openings = pool.pop()
    except IndexError:
        openings = pool.make()
    openings.go_on(None)
    return openings


def give_back(openings: Openings) -> None:
    """Keep Openings for a later call."""
    openings._written = 0
    if openings._state[_DIRTY] <= _KEPT:
        pools[len(openings.table)].append(openings)
