"""send and recv: a link leads from a sender to a receiver and has a staging buffer of its own.

On a link the sender is rank 0 and the receiver rank 1. Every round spends TICKS ticks.

Over the staging buffer: the sender waits until the half is free, copies the next piece and signals.
The receiver waits for that tick, copies the piece and signals that the half is free again. So the
sender may be two rounds ahead. The first round is cut into segments, so that both copy at once.

In place: the sender exposes a large array and waits. If the receiver can read it, the receiver
copies it; otherwise both end the round and continue over the staging buffer.
"""

from __future__ import annotations

from nc10d.backend.cpu.algorithms.hosts_steps import flow, give, head, take
from nc10d.backend.cpu.algorithms.tuning import DEFAULTS, NEVER
from nc10d.backend.cpu.native.offsets import LINK_TICKS as TICKS
from nc10d.backend.cpu.native.offsets import READS
from nc10d.backend.cpu.program.lines import line_up
from nc10d.backend.cpu.program.program import Step, board, user
from nc10d.backend.cpu.program.steps import (
    branch_if_unreadable,
    copy,
    end_round,
    expose,
    fetch,
    header,
    jump,
    signal,
    wait,
)

SENDER, RECEIVER = 0, 1
SEGMENTS = TICKS
"""Segments of the first round: the sender copies the next while the receiver copies this one."""


def send(
    staging: int, nbytes: int, direct: int = NEVER, read_from: int = DEFAULTS.read_from
) -> list[Step]:
    """Return the sender's steps for user array 0, in rounds of `staging` bytes.

    The receiver reads a registered array that begins a page in place from `direct` bytes on, and
    other arrays through the kernel from `read_from` bytes on.
    """
    opening = [wait(RECEIVER, -TICKS), header()]
    if nbytes >= direct:
        access = READS if nbytes >= read_from else 0
        offered = [expose(SENDER, user(0), access, flag=False), signal(TICKS)]
        return [*opening, *offered, *_ways([wait(RECEIVER, TICKS)], _puts(staging, nbytes, 0), [])]
    steps = list(opening)
    for tick, low, count in _segments(staging, nbytes):
        steps += [copy(board(SENDER, low), user(0, low), count), signal(tick)]
    return [*steps, end_round(TICKS, TICKS), *_puts(staging, nbytes, staging)]


def recv(staging: int, nbytes: int, direct: int = NEVER) -> list[Step]:
    """Return the receiver's steps: fill user array 0 from the link or the sender's array."""
    if nbytes >= direct:
        read = [fetch(user(0), SENDER, 0, nbytes), signal(TICKS)]
        staged = _takes(staging, nbytes, 0)
        return [wait(SENDER, TICKS), *_ways(read, staged, [signal(TICKS)])]
    steps = []
    for tick, low, count in _segments(staging, nbytes):
        steps += [wait(SENDER, tick), copy(user(0, low), board(SENDER, low), count)]
    end = [signal(TICKS), end_round(TICKS, TICKS)]
    return [*steps, *end, *_takes(staging, nbytes, staging)]


def _segments(staging: int, nbytes: int) -> list[tuple[int, int, int]]:
    """Cut the first round: (tick that publishes the segment, offset, bytes); never empty."""
    first, each = min(nbytes, staging), line_up(-(-staging // SEGMENTS))
    lows = range(0, max(first, 1), each)
    ticks = [*range(1, len(lows)), TICKS]
    return [(tick, low, min(each, first - low)) for tick, low in zip(ticks, lows, strict=True)]


def _ways(direct: list[Step], staged: list[Step], left: list[Step]) -> list[Step]:
    """Run `direct` if the receiver can read the sender's array; else `left`, and then `staged`."""
    end = end_round(TICKS, TICKS)
    other = [*left, end, *staged]
    first = [*direct, end, jump(len(other))]
    return [branch_if_unreadable(SENDER, len(first)), *first, *other]


def _puts(staging: int, nbytes: int, done: int) -> list[Step]:
    put = copy(board(SENDER), user(0, done, staging), staging, nbytes - done)
    return _rounds([wait(RECEIVER, -TICKS), put, signal(TICKS)], staging, nbytes - done)


def _takes(staging: int, nbytes: int, done: int) -> list[Step]:
    take = copy(user(0, done, staging), board(SENDER), staging, nbytes - done)
    return _rounds([wait(SENDER, TICKS), take, signal(TICKS)], staging, nbytes - done)


def _rounds(body: list[Step], staging: int, nbytes: int) -> list[Step]:
    rounds = -(-nbytes // staging)
    return [*body, end_round(TICKS, TICKS, rounds, len(body))] if nbytes > 0 else []


def send_away(nbytes: int) -> list[Step]:
    """Return the steps that send a header and user array 0 to another host."""
    steps = [*flow([head()]), *flow([give(0, user(0), nbytes)])]
    return [*steps, end_round(1, 1)]


def recv_away(nbytes: int) -> list[Step]:
    """Return the steps that receive user array 0 from another host.

    The header has been read already: the receive was matched by it.
    """
    return [*flow([take(0, user(0), nbytes)]), end_round(1, 1)]
