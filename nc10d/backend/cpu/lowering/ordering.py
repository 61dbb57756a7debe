"""Order among a batch's messages and collectives, where they share arrays.

Each message has its own link, and so may overtake the batch's collectives. That is invisible as
long as they share no array, or nobody writes the shared array. Otherwise the later operation
depends on the earlier: a gate (a word in memory) is opened when the earlier operation ends, and the
later waits for it. Gates are local to a rank: its peers run the same programs with or without.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from nc10d.arrays import intervals
from nc10d.arrays.buffer import Buffer, as_buffer, overlap
from nc10d.backend.cpu.algorithms.group_shape import GroupShape
from nc10d.backend.cpu.lowering.lower import lower
from nc10d.backend.cpu.native import prepared_calls as plain
from nc10d.backend.cpu.program.program import GATE_BYTES
from nc10d.ops import Op, Recv, Send

Words = npt.NDArray[np.int64]
Use = tuple[Buffer, bool]
"""An array, and whether the operation writes that array."""


@dataclass(slots=True)
class OpDependencies:
    """An operation's number, which its gate has too, its `waits`, and if it is awaited."""

    number: int
    waits: list[int] = field(default_factory=list)
    awaited: bool = False


@dataclass(frozen=True, slots=True)
class MessageDependencies:
    """A message's gates by address: the awaited gates, its own (0: none); kept by `words`."""

    waits: Sequence[int] = ()
    own: int = 0
    words: Words | None = None

    def __bool__(self) -> bool:
        return self.words is not None


INDEPENDENT = MessageDependencies()


class BatchDependencies:
    """The gates of a batch: a gate for each operation, numbered alike."""

    def __init__(self, ops: Sequence[OpDependencies]) -> None:
        self.ops = ops
        self.words: Words = np.zeros(GATE_BYTES // 8 * len(ops), np.int64)

    def of_message(self, number: int) -> MessageDependencies:
        """Return the dependencies for the message that is operation `number`."""
        op, first = self.ops[number], int(plain.address(self.words))
        if not op.waits and not op.awaited:
            return INDEPENDENT
        waits = [first + GATE_BYTES * earlier for earlier in op.waits]
        own = first + GATE_BYTES * number if op.awaited else 0
        return MessageDependencies(waits, own, self.words)


def find_dependencies(ops: Sequence[Op], shape: GroupShape) -> BatchDependencies | None:
    """Return the dependencies within a batch, or None if messages may overtake."""
    if not any(map(_is_message, ops)) or len(ops) == 1:
        return None
    uses = [_uses(op, shape) for op in ops]
    if _disjoint(uses):
        return None
    found = [OpDependencies(number) for number in range(len(ops))]
    for later, op in enumerate(ops):
        for earlier in range(later):
            # Collectives run in order among themselves, without gates.
            has_message = _is_message(op) or _is_message(ops[earlier])
            pairs = itertools.product(uses[earlier], uses[later])
            if has_message and any((a[1] or b[1]) and overlap(a[0], b[0]) for a, b in pairs):
                found[later].waits.append(earlier)
                found[earlier].awaited = True
    return BatchDependencies(found) if any(op.waits for op in found) else None


def _is_message(op: Op) -> bool:
    return isinstance(op, (Send, Recv))


def _uses(op: Op, shape: GroupShape) -> list[Use]:
    if isinstance(op, (Send, Recv)):
        return [(as_buffer(op.x), isinstance(op, Recv))]
    lowered = lower(op, shape)
    return [
        (array, number in lowered.outs)
        for number, array in enumerate(lowered.arrays)
        if isinstance(array, Buffer)
    ]


def _disjoint(uses: Sequence[Sequence[Use]]) -> bool:
    """Return whether no two arrays in a batch overlap, a quick test that most batches pass."""
    return intervals.disjoint(buffer.span for some in uses for buffer, _ in some)
