"""send and recv over a link: one direction between two ranks, with a board of its own.

On a link the sender is rank 0 and the receiver rank 1. The sender may be two halves ahead; then
it waits until the receiver has taken the older one. A large message that the receiver can read
where it lies is not put on the board at all.
"""

from __future__ import annotations

from nc10d.backend.cpu.algorithms.crossing import flow, give, head, take
from nc10d.backend.cpu.algorithms.layout import NEVER
from nc10d.backend.cpu.program import (
    Step,
    board,
    copy,
    end_round,
    expose,
    fetch,
    header,
    jump,
    pick,
    signal,
    user,
    wait,
)

SENDER, RECEIVER = 0, 1


def send(half: int, nbytes: int, direct: int = NEVER) -> list[Step]:
    """Put user array 0 through the link, half a board at a time; or let it be read, if large."""
    if nbytes >= direct:
        offered = expose(SENDER, user(0), True, flag=False)
        opening = [wait(RECEIVER, -1), header(), offered, signal(1)]
        return [*opening, *_ways([wait(RECEIVER, 1)], _puts(half, nbytes, 0), [])]
    opening = [wait(RECEIVER, -1), header()]
    if nbytes:
        opening.append(copy(board(SENDER), user(0), min(nbytes, half)))
    return [*opening, signal(1), end_round(1, 1), *_puts(half, nbytes, half)]


def recv(half: int, nbytes: int, direct: int = NEVER) -> list[Step]:
    """Take user array 0 from the link, or from where it lies."""
    if nbytes >= direct:
        read = [fetch(user(0), SENDER, 0, nbytes), signal(1)]
        return [wait(SENDER, 1), *_ways(read, _takes(half, nbytes, 0), [signal(1)])]
    opening = [wait(SENDER, 1)]
    if nbytes:
        opening.append(copy(user(0), board(SENDER), min(nbytes, half)))
    return [*opening, signal(1), end_round(1, 1), *_takes(half, nbytes, half)]


def _ways(direct: list[Step], boards: list[Step], left: list[Step]) -> list[Step]:
    """Go `direct` if what the sender offers can be read; else end the round and use the boards."""
    end = end_round(1, 1)
    other = [*left, end, *boards]
    first = [*direct, end, jump(len(other))]
    return [pick(SENDER, len(first)), *first, *other]


def _puts(half: int, nbytes: int, done: int) -> list[Step]:
    put = copy(board(SENDER), user(0, done, half), half, nbytes - done)
    return _rounds([wait(RECEIVER, -1), put, signal(1)], half, nbytes - done)


def _takes(half: int, nbytes: int, done: int) -> list[Step]:
    take = copy(user(0, done, half), board(SENDER), half, nbytes - done)
    return _rounds([wait(SENDER, 1), take, signal(1)], half, nbytes - done)


def _rounds(body: list[Step], half: int, nbytes: int) -> list[Step]:
    return [*body, end_round(1, 1, -(-nbytes // half), len(body))] if nbytes > 0 else []


def send_away(nbytes: int) -> list[Step]:
    """Send user array 0 to another host, behind its header."""
    steps = [*flow([head()]), *flow([give(0, user(0), nbytes)])]
    return [*steps, end_round(1, 1)]


def recv_away(nbytes: int) -> list[Step]:
    """Take user array 0 from another host; its header has been taken to find this receive."""
    return [*flow([take(0, user(0), nbytes)]), end_round(1, 1)]
