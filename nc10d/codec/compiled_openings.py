"""Openings of small plain objects in compiled code: complete one, check a table, read its objects.

The hooks are those of the operation that carries openings (nc10d.kernels.hooks): `before` writes
this rank's object into its own opening, and `after` reads those that have come.
What they have to do is a set of bits, the task:

    WRITES   write the object H_VALUE
    READS    read the objects of the table into the list H_PLACES
    EACH     each opening has the object of a place; else the single opening has a list of them all
    MESSAGE  the operation is messages, one for each piece of an opening that is used

With EACH and no READS, `after` only looks whether the openings are whole. `before` answers REFUSED
for an object that is not plain or does not fit, and for places that are no list of the right
length; `after` answers UNFINISHED unless it has done all of its task, and then has changed nothing.
"""

from __future__ import annotations

from typing import Any

from numba import njit, types

from nc10d.codec.messages import OPENING, PIECE, WORDS, MessageKind
from nc10d.codec.opcodes import nc10d_bytes, nc10d_plain, nc10d_rows
from nc10d.kernels import python_api as py
from nc10d.kernels.cache import address_of, compiled_callback, entry_points, on_demand
from nc10d.kernels.hooks import (
    H_AFTER,
    H_BEFORE,
    H_COUNT,
    H_PLACES,
    H_TASK,
    H_VALUE,
    H_WORDS,
    RAISED,
    REFUSED,
    UNFINISHED,
)
from nc10d.kernels.words import load, store

WRITES, READS, EACH, MESSAGE = 1, 2, 4, 8
START = WORDS.size
"""The byte of an opening at which the stream begins."""
_PLAIN = int(MessageKind.PLAIN)
_FIRST = 8 * H_WORDS
(
    O_OWN,  # address of this rank's opening
    O_TABLE,  # address of the openings that come
    O_COUNT,  # their number
    O_ROWS,  # address of the memory of a check
    O_END,  # where the latest stream in O_OWN ends; 0: none is there
    O_DIRTY,  # where the longest stream since then may have ended
    O_SEEK,  # functions of the file and of the pickler that write a stream, and of pickle
    O_DUMP,
    O_FORGET,
    O_TELL,
    O_LOADS,
    O_START,  # START as an object
    O_LIST,  # the type list
) = range(_FIRST, _FIRST + 13 * 8, 8)
BLOCK_WORDS = H_WORDS + 13
_made: dict[str, Any] = {}


@njit(nogil=True)
def nc10d_end(opening: int) -> int:
    """Return where the stream of an opening ends; 0 unless it may be all of a plain object."""
    size = load(opening + 8)
    if load(opening) != _PLAIN or load(opening + 16) != 0 or size <= 0 or size > OPENING - START:
        return 0
    return START + size


@njit(nogil=True)
def nc10d_whole(table: int, count: int, rows: int) -> bool:
    """Return whether each opening has the whole message of a plain object.

    `table` and `rows` are addresses of the openings and of ROWS x OPENING words.
    """
    places = nc10d_rows(rows, OPENING)
    for row in range(count):
        opening = table + row * OPENING
        end = nc10d_end(opening)
        if end == 0 or not nc10d_plain(nc10d_bytes(opening + START, end - START), places):
            return False
    return True


@njit(nogil=True)
def nc10d_seal(opening: int, end: int, dirty: int, rows: int) -> bool:
    """Complete the opening of a stream that lies in it; return whether it builds a plain object.

    The stream is at bytes START to `end`, and bytes up to `dirty` have been used before.
    """
    content = nc10d_bytes(opening, OPENING)
    content[end : min(dirty, OPENING)] = 0  # peers get no byte of earlier objects
    store(opening, _PLAIN)
    store(opening + 8, end - START)
    store(opening + 16, 0)
    return nc10d_plain(content[START:end], nc10d_rows(rows, OPENING))


@on_demand("boolean(int64, int64, int64)")
def _whole(table: int, count: int, rows: int) -> bool:
    """Check a table of openings; see `nc10d_whole`."""
    return nc10d_whole(table, count, rows)


@on_demand("boolean(int64, int64, int64, int64)")
def _seal(opening: int, end: int, dirty: int, rows: int) -> bool:
    """Complete an opening; see `nc10d_seal`."""
    return nc10d_seal(opening, end, dirty, rows)


# The hooks


@njit
def nc10d_dropped(result: int) -> bool:
    """Release an object; return whether there is one."""
    if result == 0:
        return False
    py.release(result)
    return True


@njit
def nc10d_write(block: int) -> int:
    """Write the object; return the end of its stream, 0 if an exception is set."""
    if not nc10d_dropped(py.call_one(load(block + O_SEEK), load(block + O_START))):
        return 0
    if not nc10d_dropped(py.call_one(load(block + O_DUMP), load(block + H_VALUE))):
        return 0
    if not nc10d_dropped(py.call_none(load(block + O_FORGET))):
        return 0
    place = py.call_none(load(block + O_TELL))
    if place == 0:
        return 0
    end = py.int_value(place)
    py.release(place)
    return end


@njit
def nc10d_is_list(block: int, value: int) -> bool:
    """Return whether an object is a list, and of no subclass."""
    return load(value + py.TYPE_OFFSET) == load(block + O_LIST)


def _before(block: int) -> int:
    task, value, places = load(block + H_TASK), load(block + H_VALUE), load(block + H_PLACES)
    store(block + O_END, 0)
    if task & READS != 0:
        if not nc10d_is_list(block, places):
            return REFUSED
        if task & EACH != 0 and load(places + py.SIZE_OFFSET) != load(block + O_COUNT):
            return REFUSED
    if task & WRITES == 0:
        return 0
    if task & EACH == 0 and not nc10d_is_list(block, value):
        return REFUSED
    dirty = load(block + O_DIRTY)
    store(block + O_DIRTY, max(dirty, OPENING))  # should writing fail
    end = nc10d_write(block)
    if end == 0:
        return RAISED
    store(block + O_END, end)
    store(block + O_DIRTY, end)
    if end > OPENING:
        return REFUSED
    plain = nc10d_seal(load(block + O_OWN), end, dirty, load(block + O_ROWS))
    return 0 if plain else REFUSED


def _count(block: int) -> int:
    end = load(block + O_END)
    if load(block + H_TASK) & READS != 0:
        end = nc10d_end(load(block + O_TABLE))
    return max(1, -(-end // PIECE))


@njit
def nc10d_read(block: int, row: int) -> int:
    """Return the object of an opening."""
    opening = load(block + O_TABLE) + row * OPENING
    stream = py.new_bytes(opening + START, load(opening + 8))
    if stream == 0:
        return 0
    value = py.call_one(load(block + O_LOADS), stream)
    py.release(stream)
    return value


@njit
def nc10d_read_each(block: int) -> int:
    """Return a list of the objects of all openings."""
    values = py.new_list(0)
    for row in range(load(block + O_COUNT)):
        value = nc10d_read(block, row) if values != 0 else 0
        if value == 0:
            nc10d_dropped(values)
            return 0
        py.append(values, value)
        py.release(value)
    return values


@njit
def nc10d_fill(block: int, values: int) -> int:
    """Put the objects of a list into the places; the answer of `after`."""
    places = load(block + H_PLACES)
    size = load(places + py.SIZE_OFFSET)
    if not nc10d_is_list(block, values) or load(values + py.SIZE_OFFSET) != size:
        return UNFINISHED
    return 0 if py.set_slice(places, 0, size, values) == 0 else RAISED


def _after(block: int) -> int:
    task = load(block + H_TASK)
    if task & (READS | EACH) == 0:
        return 0
    if not nc10d_whole(load(block + O_TABLE), load(block + O_COUNT), load(block + O_ROWS)):
        return UNFINISHED
    if task & READS == 0:
        return 0
    values = nc10d_read_each(block) if task & EACH != 0 else nc10d_read(block, 0)
    if values == 0:
        return RAISED
    answer = nc10d_fill(block, values)
    py.release(values)
    return answer


def _hook(name: str, function: Any) -> int:
    signature = types.int64(types.int64)
    return address_of(_made, name, lambda: compiled_callback(signature)(function))


def prepare() -> dict[int, int]:
    """Return the addresses of the hooks, by their place in a block; blocks to compile them."""
    hooks = {H_BEFORE: _before, H_COUNT: _count, H_AFTER: _after}
    return {place: _hook(function.__name__, function) for place, function in hooks.items()}


__getattr__ = entry_points(__name__)
