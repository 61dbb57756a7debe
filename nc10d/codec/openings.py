"""A call's openings, in memory that is kept between calls.

A small plain object is written, checked and read there: by `put` and `objects`, or by the hooks of
the operation that carries the object (nc10d.codec.compiled_openings).

Contract: `take` returns Openings that no other code has. `give_back` ends their use; they are left
to the garbage collector instead if anything may still refer to their memory.
"""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np

from nc10d.base.deadline import monotonic
from nc10d.base.signal_errors import raised_here
from nc10d.codec import compiled_openings as compiled
from nc10d.codec.compiled_openings import START
from nc10d.codec.decoder import Bytes
from nc10d.codec.messages import NUMBER, NUMBER_AT, OPENING, PIECE, cut, pieces_used
from nc10d.codec.opcodes import ITEM_WORDS
from nc10d.codec.plain import PlainWriter, is_plain
from nc10d.kernels.hooks import H_RAN, H_TAG, H_WORDS, REFUSED, UNFINISHED

_END, _DIRTY = compiled.O_END // 8, compiled.O_DIRTY // 8
_RAN, _ROWS = H_RAN // 8, compiled.O_ROWS // 8
_TAG, _NUMBER = H_TAG // 8, compiled.O_NUMBER // 8
_KEPT = 1 << 16
"""The longest stream, in bytes, whose memory is kept for later calls."""
_made = itertools.count()
"""Counts Openings: each has 2**32 numbers for messages."""
ALL_ROWS, NO_ROWS = slice(None), slice(0)
"""Table rows."""


class Openings:
    """This rank's opening, `own`, and a `table` with the openings of `count` messages, as bytes.

    In a scatter, the table is what the root sends, and `own` is what a rank receives. `first` is
    the first piece in the table's first row. `arrays[task]` are the arguments x and y of a prepared
    call: all pieces and a message's tag, else two arrays.
    """

    def __init__(self, count: int) -> None:
        self._writer = PlainWriter(START)
        self.own: Bytes = self._writer.memory[:OPENING]
        self.table: Bytes = np.zeros((count, OPENING), np.uint8)
        # The same arrays for each message: a call on known arrays is prepared.
        self._own_pieces, self._pieces = cut(self.own), cut(self.table[0])
        self.first = self._pieces[0]
        self.arrays: dict[int, tuple[object, object]] = {
            compiled.SEND: (tuple(self._own_pieces), 0),
            compiled.RECEIVE: (tuple(self._pieces), 0),
            compiled.BROADCAST_ROOT: (self.own, self.own),
            compiled.BROADCAST_OTHER: (self.table, self.table),
            compiled.GATHER_HERE: (self.own, self.table),
            compiled.GATHER_ELSEWHERE: (self.own, self.table),
            compiled.SCATTER_ROOT: (self.own, self.table),
            compiled.SCATTER_OTHER: (self.own, None),
        }
        self._streams = [row.data[START:] for row in self.table]
        self._scratch = np.empty((OPENING, ITEM_WORDS), np.int64)
        self._own_address, self._table_address, self._scratch_address = (
            x.ctypes.data for x in (self.own, self.table, self._scratch)
        )
        self._words = np.zeros(H_WORDS + compiled.OWN_WORDS, np.int64)
        self._state = self._words.data
        self._state[_DIRTY] = START
        self._state[_NUMBER] = next(_made) << 32
        # The block has only addresses: this dict keeps the objects alive.
        self._objects = dict[int, Any]()
        self.block: Any = None
        self.ran = 0
        """How many operations this call has completed: pieces of a message, or 1."""
        self.rows = 0
        """How many of the table's rows a scatter's hooks have written."""
        self.since = 0.0
        """When the call began, by monotonic(), or when its hooks had stopped."""
        self._written = 0
        """PlainWriter.write's result if the hook `before` has written the object, else 0."""

    def make_block(self) -> Any:
        """Return a new block for the hooks; blocks to compile them."""
        self._objects = {
            compiled.O_SEEK: self._writer.seek,
            compiled.O_DUMP: self._writer.dump,
            compiled.O_CLEAR_MEMO: self._writer.clear_memo,
            compiled.O_TELL: self._writer.tell,
            compiled.O_LOADS: pickle.loads,
            compiled.O_START: START,
            compiled.O_LIST: list,
        }
        words = {place: id(value) for place, value in self._objects.items()} | compiled.prepare()
        words |= {
            compiled.O_OWN: self._own_address,
            compiled.O_TABLE: self._table_address,
            compiled.O_COUNT: len(self.table),
            compiled.O_SCRATCH: self._scratch_address,
        }
        for place, word in words.items():
            self._state[place // 8] = word
        self.block = self._words
        return self.block

    def answer_to(self, error: Exception) -> int:
        """Clean up after a hook has raised an error; return what the call answers."""
        if self._state[_RAN]:
            return UNFINISHED  # `objects` finds the same error
        self._written = self._writer.clean_up(error)
        return REFUSED

    def begin_fallback(self, answer: int | None) -> None:
        """Prepare for the caller, who goes on where the hooks have stopped; None: none has run."""
        self.since = monotonic()
        self.ran, self._state[_RAN] = self._state[_RAN], 0
        self.rows, self._state[_ROWS] = self._state[_ROWS], 0
        if answer is not None:
            self._written = self._written or self._state[_END]

    def put(self, value: object) -> bool:
        """Write an object; return whether `own` has its message: the object is plain, and fits.

        The object is `value`, unless the hook `before` has written it already.
        """
        state = self._state
        dirty, state[_DIRTY] = state[_DIRTY], OPENING  # a write that fails may leave any bytes
        end = self._written or self._writer.write(value)
        self._written = 0
        state[_END], state[_DIRTY] = end, abs(end)
        if 0 < end <= OPENING:
            return bool(compiled.seal(self._own_address, end, dirty, self._scratch_address))
        self.own[abs(end) :] = 0  # peers get no byte of earlier objects
        return False

    def receive_own(self) -> Bytes:
        """Return `own` as memory for a received opening, after the last `put`."""
        self._state[_DIRTY] = max(self._state[_DIRTY], OPENING)
        return self.own

    @property
    def tag(self) -> int:
        """The tag for the messages behind the first, once that has ended."""
        return self._state[_TAG]

    def number(self, opening: Bytes) -> None:
        """Give a message to send a number that no other message from this rank has."""
        self._state[_NUMBER] += 1
        NUMBER.pack_into(opening.data, NUMBER_AT, self._state[_NUMBER])

    def pieces(self) -> Sequence[Bytes]:
        """Return the pieces of `own` that are used, without the first `ran`."""
        return self._own_pieces[self.ran : -(-self._state[_END] // PIECE)]

    def later_pieces(self) -> Sequence[Bytes]:
        """Return the pieces in the table's first row that are still to be received.

        `first` has come, by the hooks or without them.
        """
        return self._pieces[max(1, self.ran) : pieces_used(self.first)]

    def stream(self) -> Bytes | None:
        """Return the stream of the last object that was put; None if it is not plain, or long."""
        stream = self._writer.memory[START : max(START, self._state[_END])]
        return stream if is_plain(stream) else None

    def objects(self, rows: slice = ALL_ROWS) -> list[Any] | None:
        """Return some rows' objects; None unless each message is a plain object's."""
        streams = self._streams
        if not compiled.whole(self._table_address, len(streams), self._scratch_address):
            return None
        try:
            return [pickle.loads(stream) for stream in streams[rows]]
        except raised_here(Exception):
            return None


class OpeningsPool(list[Openings]):
    """Openings for `count` messages that no call uses now."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count

    def make(self) -> Openings:
        """Return new Openings."""
        return Openings(self._count)


class _Pools(dict[int, OpeningsPool]):
    def __missing__(self, count: int) -> OpeningsPool:
        return self.setdefault(count, OpeningsPool(count))


pools = _Pools()
"""By the number of messages: Openings for Dispatcher.run_hooked, which takes them."""


def take(count: int) -> Openings:
    """Return Openings for `count` messages in a call that begins now."""
    pool = pools[count]
    try:
        openings = pool.pop()
    except IndexError:
        openings = pool.make()
    openings.begin_fallback(None)
    return openings


def give_back(openings: Openings) -> None:
    """Keep Openings for a later call."""
    openings._written = openings._state[_END] = 0
    if openings._state[_DIRTY] <= _KEPT:
        pools[len(openings.table)].append(openings)
