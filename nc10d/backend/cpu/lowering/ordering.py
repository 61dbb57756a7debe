"""Order among the messages and the collectives of one batch, where they share arrays.

Messages have links of their own and overtake collectives. As long as they share no array, or
nobody writes it, nobody can tell. Where somebody could, a gate keeps the later one waiting until
the earlier one has ended, as if each had been called after the other. Gates are known to this rank
alone: its peers run the same programs with or without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from nc10d.arrays import intervals
from nc10d.arrays.buffer import Buffer, as_buffer, overlap
from nc10d.backend.cpu.algorithms.group_shape import GroupShape
from nc10d.backend.cpu.lowering.lower import request
from nc10d.backend.cpu.native import prepared_calls as plain
from nc10d.backend.cpu.program.program import GATE_BYTES
from nc10d.ops import Op, Recv, Send

Words = npt.NDArray[np.int64]
Use = tuple[Buffer, bool]
"""An array, and whether it is written."""


@dataclass(slots=True)
class OpDependencies:
    """One operation's gates: those it waits for, and whether somebody waits for its own."""

    own: int
    waits: list[int] = field(default_factory=list)
    awaited: bool = False


@dataclass(frozen=True, slots=True)
class MessageDependencies:
    """A message's way through the gates: addresses of those before it, and its own (0: none)."""

    waits: Sequence[int] = ()
    own: int = 0
    words: Words | None = None

    def __bool__(self) -> bool:
        return self.words is not None


FREE = MessageDependencies()


class BatchDependencies:
    """The gates of one batch: one an operation, numbered like them."""

    def __init__(self, fences: Sequence[OpDependencies]) -> None:
        self.fences = fences
        self.words: Words = np.zeros(GATE_BYTES // 8 * len(fences), np.int64)

    def passage(self, number: int) -> MessageDependencies:
        """Return the gates of operation `number`."""
        fence, first = self.fences[number], int(plain.address(self.words))
        if not fence.waits and not fence.awaited:
            return FREE
        waits = [first + GATE_BYTES * other for other in fence.waits]
        return MessageDependencies(
            waits, first + GATE_BYTES * number if fence.awaited else 0, self.words
        )


def find_gates(ops: Sequence[Op], layout: GroupShape) -> BatchDependencies | None:
    """Return the gates that a batch needs, or None if its messages may overtake."""
    if not any(map(_is_message, ops)) or len(ops) == 1:
        return None
    uses = [_uses(op, layout) for op in ops]
    if _apart(uses):
        return None
    fences = [OpDependencies(number) for number in range(len(ops))]
    for later, op in enumerate(ops):
        for earlier in range(later):
            # Collectives are in order among themselves.
            one_is_message = _is_message(op) or _is_message(ops[earlier])
            if one_is_message and _clash(uses[earlier], uses[later]):
                fences[later].waits.append(earlier)
                fences[earlier].awaited = True
    return BatchDependencies(fences) if any(fence.waits for fence in fences) else None


def _is_message(op: Op) -> bool:
    return isinstance(op, (Send, Recv))


def _uses(op: Op, layout: GroupShape) -> list[Use]:
    if isinstance(op, (Send, Recv)):
        return [(as_buffer(op.x), isinstance(op, Recv))]
    wanted = request(op, layout)
    return [
        (array, number in wanted.outs)
        for number, array in enumerate(wanted.arrays)
        if isinstance(array, Buffer)
    ]


def _apart(uses: Sequence[Sequence[Use]]) -> bool:
    """Say whether all arrays lie apart, which is what nearly every batch comes with."""
    return intervals.disjoint(buffer.span for some in uses for buffer, _ in some)


def _clash(some: Sequence[Use], others: Sequence[Use]) -> bool:
    return any((a[1] or b[1]) and overlap(a[0], b[0]) for a in some for b in others)
