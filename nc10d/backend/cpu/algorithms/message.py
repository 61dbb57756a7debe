"""send and recv: a link leads from a sender to a receiver and has its own staging buffer.

On a link the sender is rank 0 and the receiver rank 1. On a host every round spends TICKS ticks;
between hosts a message is one round of one tick.

In a cell: every round has one of the link's cells, in which the message's header travels, and a
small message itself. So the sender may be as many small messages ahead as the link has cells.

Over the staging buffer: the sender waits until the slot is free, copies the next piece and signals.
The receiver waits for that tick, copies the piece and signals that the slot is free again. So the
sender may be two rounds ahead. The first round is cut into segments, so that both copy at once.

In place: the sender exposes a large array and waits. If the receiver can read the array, the
receiver copies it; otherwise both end the round and continue over the staging buffer.
"""

from __future__ import annotations

from dataclasses import dataclass

from nc10d.backend.cpu.algorithms.group_shape import DEFAULTS, NEVER
from nc10d.backend.cpu.native.offsets import CELL_DATA_BYTES, CELLS, READS
from nc10d.backend.cpu.native.offsets import LINK_TICKS as TICKS
from nc10d.backend.cpu.program import steps as do
from nc10d.backend.cpu.program.program import Step, cell, line_up, staging, user

SENDER, RECEIVER = 0, 1
SEGMENTS = TICKS
"""Segments of the first round: the sender copies the next while the receiver copies this one."""


@dataclass(frozen=True, slots=True)
class Cells:
    """A link's cells: their number, and the bytes that fit into each."""

    count: int
    nbytes: int


CELLS_OF_A_LINK = Cells(CELLS, CELL_DATA_BYTES)


def send(
    slot: int,
    nbytes: int,
    direct: int = NEVER,
    read_from: int = DEFAULTS.read_from,
    cells: Cells = CELLS_OF_A_LINK,
) -> list[Step]:
    """Return the sender's steps for user array 0, whose rounds move `slot` bytes."""
    if nbytes <= cells.nbytes:
        # The receiver has left the round that used this cell last.
        free, put = do.wait(RECEIVER, (1 - cells.count) * TICKS), do.copy(cell(), user(0), nbytes)
        return [free, do.write_header(), put, do.signal(TICKS), do.end_round(TICKS, TICKS)]
    # The receiver reads a registered array that begins a page in place from `direct` bytes on, and
    # other arrays through the kernel from `read_from` bytes on.
    # This slot was last used two rounds ago. That round ended TICKS before this one begins, so the
    # receiver has left it when its counter has come there. (Links have no FREE steps.)
    opening = [do.wait(RECEIVER, -TICKS), do.write_header()]
    if nbytes >= direct:
        access = READS if nbytes >= read_from else 0
        offered = [do.expose(SENDER, user(0), access, flag=False), do.signal(TICKS)]
        read = [do.wait(RECEIVER, TICKS)]
        return [*opening, *offered, *_ways(read, _publishes(slot, nbytes, 0), [])]
    steps = opening
    for tick, low, count in _segments(slot, nbytes):
        steps += [do.copy(staging(SENDER, low), user(0, low), count), do.signal(tick)]
    return [*steps, do.end_round(TICKS, TICKS), *_publishes(slot, nbytes, slot)]


def recv(slot: int, nbytes: int, direct: int = NEVER, cells: Cells = CELLS_OF_A_LINK) -> list[Step]:
    """Return the receiver's steps: fill user array 0 from the link or the sender's array."""
    if nbytes <= cells.nbytes:
        take = do.copy(user(0), cell(), nbytes)
        return [do.wait(SENDER, TICKS), take, do.signal(TICKS), do.end_round(TICKS, TICKS)]
    if nbytes >= direct:
        read = [do.fetch(user(0), SENDER, 0, nbytes), do.signal(TICKS)]
        staged = _reads(slot, nbytes, 0)
        return [do.wait(SENDER, TICKS), *_ways(read, staged, [do.signal(TICKS)])]
    steps = []
    for tick, low, count in _segments(slot, nbytes):
        steps += [do.wait(SENDER, tick), do.copy(user(0, low), staging(SENDER, low), count)]
    end = [do.signal(TICKS), do.end_round(TICKS, TICKS)]
    return [*steps, *end, *_reads(slot, nbytes, slot)]


def _segments(slot: int, nbytes: int) -> list[tuple[int, int, int]]:
    """Cut the first round: (tick that publishes the segment, offset, bytes); never empty."""
    first, each = min(nbytes, slot), line_up(-(-slot // SEGMENTS))
    lows = range(0, max(first, 1), each)
    ticks = [*range(1, len(lows)), TICKS]
    return [(tick, low, min(each, first - low)) for tick, low in zip(ticks, lows, strict=True)]


def _ways(direct: list[Step], staged: list[Step], left: list[Step]) -> list[Step]:
    """Run `direct` if the receiver can read the sender's array; else `left`, and then `staged`."""
    end = do.end_round(TICKS, TICKS)
    other = [*left, end, *staged]
    first = [*direct, end, do.jump(len(other))]
    return [do.branch_if_unreadable(SENDER, len(first)), *first, *other]


def _publishes(slot: int, nbytes: int, done: int) -> list[Step]:
    publish = do.copy(staging(SENDER), user(0, done, slot), slot, nbytes - done)
    return _rounds([do.wait(RECEIVER, -TICKS), publish, do.signal(TICKS)], slot, nbytes - done)


def _reads(slot: int, nbytes: int, done: int) -> list[Step]:
    read = do.copy(user(0, done, slot), staging(SENDER), slot, nbytes - done)
    return _rounds([do.wait(SENDER, TICKS), read, do.signal(TICKS)], slot, nbytes - done)


def _rounds(body: list[Step], slot: int, nbytes: int) -> list[Step]:
    rounds = -(-nbytes // slot)
    return [*body, do.end_round(TICKS, TICKS, rounds, len(body))] if nbytes > 0 else []


def send_away(nbytes: int) -> list[Step]:
    """Return the steps that send a header and user array 0 to another host."""
    return [
        *do.flow([do.send_header()]),
        *do.flow([do.give(0, user(0), nbytes)]),
        do.end_round(1, 1),
    ]


def recv_away(nbytes: int) -> list[Step]:
    """Return the steps that receive user array 0 from another host; the header has been read."""
    return [*do.flow([do.take(0, user(0), nbytes)]), do.end_round(1, 1)]
