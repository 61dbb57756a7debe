"""Openings of small plain objects in compiled code: write one, check a table, read its objects.

The hooks are those in nc10d.kernels.hooks: `before` writes openings before the operation that
carries them, and `after` checks and reads the openings that the operation has brought. Their task
is the call and this rank's part in it, a sum of bits:

    task                bits                    `before` writes              `after` fills
    SEND                WRITES MESSAGE          its opening, with a number   nothing
    RECEIVE             READS MESSAGE           nothing                      all places
    BROADCAST_ROOT      WRITES                  its opening                  nothing
    BROADCAST_OTHER     READS                   nothing                      all places
    GATHER_HERE         WRITES READS EACH       its opening                  all places
    GATHER_ELSEWHERE    WRITES EACH             its opening                  nothing, but checks
    SCATTER_ROOT        WRITES READS SCATTER    the table, from a list       the first place
    SCATTER_OTHER       READS SCATTER           nothing                      the first place

With EACH or SCATTER an opening has the object for one place, else a list with the objects for all.
`before` refuses an object that is not plain or does not fit, and lists with another type or length.
"""

from __future__ import annotations

from typing import Any

from numba import njit, types

from nc10d.codec.messages import FIRST_LATER_TAG, NUMBER_AT, OPENING, PIECE, WORDS, MessageKind
from nc10d.codec.opcodes import nc10d_bytes, nc10d_is_plain_pickle, nc10d_items
from nc10d.kernels import python_api as py
from nc10d.kernels.cache import address_of, compiled_callback, entry_points, on_demand
from nc10d.kernels.hooks import (
    H_AFTER,
    H_BEFORE,
    H_COUNT,
    H_PLACES,
    H_TAG,
    H_TASK,
    H_VALUE,
    H_WORDS,
    RAISED,
    REFUSED,
    UNFINISHED,
)
from nc10d.kernels.words import load, store

WRITES, READS, EACH, MESSAGE, SCATTER = 1, 2, 4, 8, 16
SEND, RECEIVE = WRITES | MESSAGE, READS | MESSAGE
BROADCAST_ROOT, BROADCAST_OTHER = WRITES, READS
GATHER_HERE, GATHER_ELSEWHERE = WRITES | READS | EACH, WRITES | EACH
SCATTER_ROOT, SCATTER_OTHER = WRITES | READS | SCATTER, READS | SCATTER
START = WORDS.size
"""The byte at which an opening's stream begins."""
_KIND, _HEADER, _PAYLOAD, _NUMBER = 0, 8, 16, NUMBER_AT
"""An opening's words; the stream is the header."""
_PLAIN = int(MessageKind.PLAIN)
OWN_WORDS = 15
"""Words in a block behind those for every hook."""
(
    O_OWN,  # address of this rank's opening
    O_TABLE,  # address of the received openings; on a scatter's root, of those to send
    O_COUNT,  # their number
    O_SCRATCH,  # address of a check's memory
    O_END,  # where the stream in O_OWN ends that is to be sent; 0: none is there
    O_DIRTY,  # where the bytes of O_OWN end that may be from an earlier object
    O_SEEK,  # `seek` of the file that the pickler writes
    O_DUMP,  # the pickler's `dump`
    O_CLEAR_MEMO,  # the pickler's `clear_memo`
    O_TELL,  # `tell` of that file
    O_LOADS,  # pickle.loads
    O_START,  # START as an object
    O_LIST,  # the type list
    O_ROWS,  # how many table rows are written; 0 between calls
    O_NUMBER,  # the number of the latest message between two ranks
) = range(8 * H_WORDS, 8 * (H_WORDS + OWN_WORDS), 8)
_made: dict[str, Any] = {}


@njit(nogil=True)
def nc10d_stream_end(opening: int) -> int:
    """Return where the stream ends; 0 if the words announce no plain object that fits."""
    size = load(opening + _HEADER)
    plain = load(opening + _KIND) == _PLAIN and load(opening + _PAYLOAD) == 0
    return START + size if plain and 0 < size <= OPENING - START else 0


@njit(nogil=True)
def nc10d_all_whole(table: int, count: int, scratch: int) -> bool:
    """Return whether each opening has a plain object's whole message.

    `table` is the openings' address, `scratch` that of OPENING x ITEM_WORDS int64 words.
    """
    items = nc10d_items(scratch, OPENING)
    for row in range(count):
        opening = table + row * OPENING
        end = nc10d_stream_end(opening)
        if end == 0 or not nc10d_is_plain_pickle(nc10d_bytes(opening + START, end - START), items):
            return False
    return True


@njit(nogil=True)
def nc10d_seal(opening: int, end: int, dirty: int, scratch: int) -> bool:
    """Complete the opening around a stream; return whether the stream builds a plain object.

    The stream is at bytes START to `end`, and bytes up to `dirty` may be from an earlier object.
    """
    content = nc10d_bytes(opening, OPENING)
    content[end : min(dirty, OPENING)] = 0  # peers get no byte of earlier objects
    store(opening + _KIND, _PLAIN)
    store(opening + _HEADER, end - START)
    store(opening + _PAYLOAD, 0)
    store(opening + _NUMBER, 0)
    return nc10d_is_plain_pickle(content[START:end], nc10d_items(scratch, OPENING))


@on_demand("boolean(int64, int64, int64)")
def _whole(table: int, count: int, scratch: int) -> bool:
    """Check a table of openings; see `nc10d_all_whole`."""
    return nc10d_all_whole(table, count, scratch)


@on_demand("boolean(int64, int64, int64, int64)")
def _seal(opening: int, end: int, dirty: int, scratch: int) -> bool:
    """Complete an opening; see `nc10d_seal`."""
    return nc10d_seal(opening, end, dirty, scratch)


# The hooks


@njit
def nc10d_drop(result: int) -> bool:
    """Release an object; return whether there is one."""
    if result == 0:
        return False
    py.release(result)
    return True


@njit
def nc10d_write_object(block: int, value: int) -> int:
    """Write an object into O_OWN; return the stream's end, 0 if an exception is set."""
    if not nc10d_drop(py.call_one(load(block + O_SEEK), load(block + O_START))):
        return 0
    if not nc10d_drop(py.call_one(load(block + O_DUMP), value)):
        return 0
    if not nc10d_drop(py.call_none(load(block + O_CLEAR_MEMO))):
        return 0
    place = py.call_none(load(block + O_TELL))
    if place == 0:
        return 0
    end = py.int_value(place)
    py.release(place)
    return end


@njit
def nc10d_is_list(block: int, value: int) -> bool:
    """Return whether an object's type is exactly list."""
    return load(value + py.TYPE_OFFSET) == load(block + O_LIST)


@njit
def nc10d_accepts(block: int) -> bool:
    """Return whether the lists among the arguments have the type and length that hooks need."""
    task, places = load(block + H_TASK), load(block + H_PLACES)
    if task & READS != 0:
        if not nc10d_is_list(block, places):
            return False
        size = load(places + py.SIZE_OFFSET)
        if task & SCATTER != 0 and size == 0:
            return False
        if task & EACH != 0 and size != load(block + O_COUNT):
            return False
    list_sent = task & WRITES != 0 and task & EACH == 0
    return not list_sent or nc10d_is_list(block, load(block + H_VALUE))


@njit
def nc10d_put_object(block: int, value: int) -> int:
    """Make O_OWN the opening of an object; return the answer of `before`."""
    dirty = load(block + O_DIRTY)
    store(block + O_DIRTY, OPENING)  # a write that fails may leave any bytes
    end = nc10d_write_object(block, value)
    if end == 0:
        return RAISED
    store(block + O_END, end)
    store(block + O_DIRTY, end)
    if end > OPENING:
        return REFUSED
    plain = nc10d_seal(load(block + O_OWN), end, dirty, load(block + O_SCRATCH))
    return 0 if plain else REFUSED


@njit
def nc10d_put_message(block: int) -> int:
    """Make O_OWN the opening of a message with a new number; return the answer of `before`."""
    answer = nc10d_put_object(block, load(block + H_VALUE))
    number = load(block + O_NUMBER) + 1
    store(block + O_NUMBER, number)
    store(load(block + O_OWN) + _NUMBER, number)
    return answer


@njit
def nc10d_put_each(block: int) -> int:
    """Make the table the openings for a list's objects; return the answer of `before`."""
    values, count = load(block + H_VALUE), load(block + O_COUNT)
    own = nc10d_bytes(load(block + O_OWN), OPENING)
    for row in range(count):
        # Looked at anew: the pickler lets other threads run, which may change the list.
        if load(values + py.SIZE_OFFSET) != count:
            return REFUSED
        value = load(load(values + py.ITEMS_OFFSET) + 8 * row)
        py.retain(value)
        answer = nc10d_put_object(block, value)
        py.release(value)
        if answer != 0:
            return answer
        nc10d_bytes(load(block + O_TABLE) + row * OPENING, OPENING)[:] = own
        store(block + O_END, 0)
        store(block + O_ROWS, row + 1)
    return 0


def _before(block: int) -> int:
    """Write this rank's object into O_OWN, or each rank's into the table."""
    store(block + O_END, 0)
    if not nc10d_accepts(block):
        return REFUSED
    task, answer = load(block + H_TASK), 0
    if task & WRITES != 0:
        if task & SCATTER != 0:
            answer = nc10d_put_each(block)
        elif task & MESSAGE != 0:
            answer = nc10d_put_message(block)
        else:
            answer = nc10d_put_object(block, load(block + H_VALUE))
    if answer == 0 and task & SCATTER != 0:  # O_OWN is about to be received
        store(block + O_DIRTY, max(load(block + O_DIRTY), OPENING))
    return answer


def _count(block: int) -> int:
    """Return how many pieces the message has, at least 1; store the later pieces' tag."""
    opening, end = load(block + O_OWN), load(block + O_END)
    if load(block + H_TASK) & READS != 0:
        opening = load(block + O_TABLE)
        end = nc10d_stream_end(opening)
    number = load(opening + _NUMBER) & (FIRST_LATER_TAG - 1)
    store(block + H_TAG, FIRST_LATER_TAG + number)
    return max(1, -(-end // PIECE))


@njit
def nc10d_read_object(block: int, opening: int) -> int:
    """Return an opening's object, 0 if an exception is set."""
    stream = py.new_bytes(opening + START, load(opening + _HEADER))
    if stream == 0:
        return 0
    value = py.call_one(load(block + O_LOADS), stream)
    py.release(stream)
    return value


@njit
def nc10d_read_each(block: int, openings: int, count: int) -> int:
    """Return a list of some openings' objects, 0 if an exception is set."""
    values = py.new_list(0)
    for row in range(count):
        value = nc10d_read_object(block, openings + row * OPENING) if values != 0 else 0
        added = value != 0 and py.append(values, value) == 0
        nc10d_drop(value)
        if not added:
            nc10d_drop(values)
            return 0
    return values


@njit
def nc10d_fill_places(block: int, values: int) -> int:
    """Put a list's objects into the places; return the answer of `after`."""
    places = load(block + H_PLACES)
    size = load(places + py.SIZE_OFFSET)
    wanted = 1 if load(block + H_TASK) & SCATTER != 0 else size
    if not nc10d_is_list(block, values) or load(values + py.SIZE_OFFSET) != wanted:
        return UNFINISHED
    return 0 if py.set_slice(places, 0, min(size, wanted), values) == 0 else RAISED


def _after(block: int) -> int:
    """Check the openings, and fill H_PLACES with their objects."""
    store(block + O_END, 0)
    store(block + O_ROWS, 0)
    task = load(block + H_TASK)
    if task & (READS | EACH) == 0:
        return 0
    scattered = task & SCATTER != 0
    openings = load(block + (O_OWN if scattered else O_TABLE))
    count = 1 if scattered else load(block + O_COUNT)
    if not nc10d_all_whole(openings, count, load(block + O_SCRATCH)):
        return UNFINISHED
    if task & READS == 0:
        return 0
    one = task & (EACH | SCATTER) == 0
    values = nc10d_read_object(block, openings) if one else nc10d_read_each(block, openings, count)
    if values == 0:
        return RAISED
    answer = nc10d_fill_places(block, values)
    py.release(values)
    return answer


def _hook(name: str, function: Any) -> int:
    signature = types.int64(types.int64)
    return address_of(_made, name, lambda: compiled_callback(signature)(function))


def prepare() -> dict[int, int]:
    """Return the hooks' addresses, by place in a block; blocks to compile the hooks."""
    hooks = {H_BEFORE: _before, H_COUNT: _count, H_AFTER: _after}
    return {place: _hook(function.__name__, function) for place, function in hooks.items()}


__getattr__ = entry_points(__name__)
