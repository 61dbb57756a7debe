"""What a batch can't do: operations that would see one another's results at the wrong time.

Collectives of a batch run one after another on the very arrays, but strided arrays are copied
before the first and back after the last, and messages overtake collectives. Where that could be
seen, the batch is refused before anything is sent.
"""

from __future__ import annotations

from collections.abc import Sequence

from nc10d.backend.cpu.requests import Request
from nc10d.buffer import Buffer, as_buffer
from nc10d.ops import OP_NAMES, Recv, Send


def refuse_conflicts(requests: Sequence[Request], messages: Sequence[Send | Recv]) -> None:
    """Raise ValueError if strided arrays or messages of a batch touch what others of it use."""
    arrays = [
        (number, buffer, index in request.outs)
        for number, request in enumerate(requests)
        for index, buffer in enumerate(request.arrays)
        if isinstance(buffer, Buffer)
    ]
    for number, buffer, written in arrays:
        if buffer.contiguous:
            continue
        for other, neighbour, changed in arrays:
            if other != number and (written or changed) and _meet(buffer, neighbour):
                raise ValueError(
                    "a coalescing block can't use an array that is not contiguous together with "
                    "another that overlaps it: use two blocks, or a contiguous copy"
                )
    for message in messages:
        mine = as_buffer(message.x)
        received = isinstance(message, Recv)
        if any((received or written) and _meet(mine, other) for _, other, written in arrays):
            raise ValueError(
                f"{OP_NAMES[type(message)]}: messages overtake the collectives of a coalescing "
                "block, so they can't share an array with one of them: use two blocks"
            )


def _meet(one: Buffer, other: Buffer) -> bool:
    (low, high), (first, last) = one.span, other.span
    return low < last and first < high
