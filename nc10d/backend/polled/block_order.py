"""The dependencies between a block's operations: later ones wait where memory is shared."""

from __future__ import annotations

from collections.abc import Sequence

from nc10d.arrays.access import touched
from nc10d.arrays.buffer import as_buffer
from nc10d.arrays.intervals import conflict
from nc10d.ops import Op

Dependencies = dict[int, frozenset[int]]
"""An operation's place in the batch -> places of the earlier operations that must end first."""


def dependencies_of(ops: Sequence[Op]) -> Dependencies:
    """Return a batch's dependencies; empty if the operations may run in any order."""
    if len(ops) == 1:
        return {}
    memory = [[(as_buffer(x).span, written) for x, written in touched(op)] for op in ops]
    found = {
        place: frozenset(n for n, earlier in enumerate(memory[:place]) if conflict(earlier, uses))
        for place, uses in enumerate(memory)
    }
    return {place: earlier for place, earlier in found.items() if earlier}
