"""send and recv over a link: one direction between two ranks, with a board of its own.

On a link the sender is rank 0 and the receiver rank 1. The sender may be two halves ahead; then
it waits until the receiver has taken the older one.
"""

from __future__ import annotations

from nc10d.backend.cpu.program import Step, board, copy, end_round, header, signal, user, wait

SENDER, RECEIVER = 0, 1


def send(half: int, nbytes: int) -> list[Step]:
    """Put user array 0 through the link, half a board at a time."""
    opening = [wait(RECEIVER, -1), header()]
    if nbytes:
        opening.append(copy(board(SENDER), user(0), min(nbytes, half)))
    steps = [*opening, signal(1), end_round(1, 1)]
    if nbytes > half:
        put = copy(board(SENDER), user(0, half, half), half, nbytes - half)
        body = [wait(RECEIVER, -1), put, signal(1)]
        steps += [*body, end_round(1, 1, -(-(nbytes - half) // half), len(body))]
    return steps


def recv(half: int, nbytes: int) -> list[Step]:
    """Take user array 0 from the link."""
    opening = [wait(SENDER, 1)]
    if nbytes:
        opening.append(copy(user(0), board(SENDER), min(nbytes, half)))
    steps = [*opening, signal(1), end_round(1, 1)]
    if nbytes > half:
        take = copy(user(0, half, half), board(SENDER), half, nbytes - half)
        body = [wait(SENDER, 1), take, signal(1)]
        steps += [*body, end_round(1, 1, -(-(nbytes - half) // half), len(body))]
    return steps
