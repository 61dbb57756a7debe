"""The dependencies between the operations of a block: later ones wait where memory is shared."""

from __future__ import annotations

from collections.abc import Sequence

from nc10d.arrays.access import touched
from nc10d.arrays.buffer import as_buffer
from nc10d.arrays.intervals import conflict
from nc10d.ops import Op

Dependencies = dict[int, frozenset[int]]
"""Place in the batch of an operation -> places of the earlier operations that it waits for."""


def dependencies_of(ops: Sequence[Op]) -> Dependencies:
    """Return the dependencies of a batch; empty if its operations may run in any order."""
    if len(ops) == 1:
        return {}
    memory = [[(as_buffer(x).span, written) for x, written in touched(op)] for op in ops]
    found = {
        place: frozenset(n for n, earlier in enumerate(memory[:place]) if conflict(earlier, uses))
        for place, uses in enumerate(memory)
    }
    return {place: earlier for place, earlier in found.items() if earlier}
