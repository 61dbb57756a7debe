"""send and recv over a link: one direction between two ranks, with a board of its own.

On a link the sender is rank 0 and the receiver rank 1. The sender may be two halves ahead; then
it waits until the receiver has taken the older one. A round spends TICKS, however many of them it
needs. A large message that the receiver can read where it lies is not put on the board at all.
"""

from __future__ import annotations

from nc10d.backend.cpu.algorithms.hosts_steps import flow, give, head, take
from nc10d.backend.cpu.algorithms.tuning import ASKED, NEVER
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
"""Into how many half a board is cut: while the receiver copies one, the sender puts the next."""


def send(half: int, nbytes: int, direct: int = NEVER, asked: int = ASKED) -> list[Step]:
    """Put user array 0 through the link, half a board at a time; or let it be read, if large.

    From `asked` bytes on it may be the kernel that reads it.
    """
    opening = [wait(RECEIVER, -TICKS), header()]
    if nbytes >= direct:
        access = READS if nbytes >= asked else 0
        offered = [expose(SENDER, user(0), access, flag=False), signal(TICKS)]
        return [*opening, *offered, *_ways([wait(RECEIVER, TICKS)], _puts(half, nbytes, 0), [])]
    steps = list(opening)
    for tick, low, count in _segments(half, nbytes):
        steps += [copy(board(SENDER, low), user(0, low), count), signal(tick)]
    return [*steps, end_round(TICKS, TICKS), *_puts(half, nbytes, half)]


def recv(half: int, nbytes: int, direct: int = NEVER) -> list[Step]:
    """Take user array 0 from the link, or from where it lies."""
    if nbytes >= direct:
        read = [fetch(user(0), SENDER, 0, nbytes), signal(TICKS)]
        boards = _takes(half, nbytes, 0)
        return [wait(SENDER, TICKS), *_ways(read, boards, [signal(TICKS)])]
    steps = []
    for tick, low, count in _segments(half, nbytes):
        steps += [wait(SENDER, tick), copy(user(0, low), board(SENDER, low), count)]
    end = [signal(TICKS), end_round(TICKS, TICKS)]
    return [*steps, *end, *_takes(half, nbytes, half)]


def _segments(half: int, nbytes: int) -> list[tuple[int, int, int]]:
    """Cut what the first round moves: (tick that tells of it, offset, bytes); at least one."""
    first, each = min(nbytes, half), line_up(-(-half // SEGMENTS))
    lows = range(0, max(first, 1), each)
    ticks = [*range(1, len(lows)), TICKS]
    return [(tick, low, min(each, first - low)) for tick, low in zip(ticks, lows, strict=True)]


def _ways(direct: list[Step], boards: list[Step], left: list[Step]) -> list[Step]:
    """Go `direct` if what the sender offers can be read; else end the round and use the boards."""
    end = end_round(TICKS, TICKS)
    other = [*left, end, *boards]
    first = [*direct, end, jump(len(other))]
    return [branch_if_unreadable(SENDER, len(first)), *first, *other]


def _puts(half: int, nbytes: int, done: int) -> list[Step]:
    put = copy(board(SENDER), user(0, done, half), half, nbytes - done)
    return _rounds([wait(RECEIVER, -TICKS), put, signal(TICKS)], half, nbytes - done)


def _takes(half: int, nbytes: int, done: int) -> list[Step]:
    take = copy(user(0, done, half), board(SENDER), half, nbytes - done)
    return _rounds([wait(SENDER, TICKS), take, signal(TICKS)], half, nbytes - done)


def _rounds(body: list[Step], half: int, nbytes: int) -> list[Step]:
    rounds = -(-nbytes // half)
    return [*body, end_round(TICKS, TICKS, rounds, len(body))] if nbytes > 0 else []


def send_away(nbytes: int) -> list[Step]:
    """Send user array 0 to another host, behind its header."""
    steps = [*flow([head()]), *flow([give(0, user(0), nbytes)])]
    return [*steps, end_round(1, 1)]


def recv_away(nbytes: int) -> list[Step]:
    """Take user array 0 from another host; its header has been taken to find this receive."""
    return [*flow([take(0, user(0), nbytes)]), end_round(1, 1)]
