"""Dependencies inside a batch: which operations must wait for which earlier operations.

The result of a block is as if its calls ran in order. The order of operations that share no memory,
or only read it, can't be observed. Any other operation waits for the earlier operations that it
shares memory with.
"""

from __future__ import annotations

from collections.abc import Sequence

from nc10d.arrays.access import touched
from nc10d.arrays.buffer import as_buffer
from nc10d.arrays.intervals import Use, conflict
from nc10d.ops import Op

Dependencies = dict[int, frozenset[int]]
"""Place in the batch of an operation -> places of the earlier operations that it waits for."""


def dependencies_of(ops: Sequence[Op]) -> Dependencies:
    """Return the dependencies of a batch; empty if its operations may run in any order."""
    if len(ops) == 1:
        return {}
    memory = [_touched(op) for op in ops]
    found = {
        place: frozenset(n for n, earlier in enumerate(memory[:place]) if conflict(earlier, uses))
        for place, uses in enumerate(memory)
    }
    return {place: earlier for place, earlier in found.items() if earlier}


def _touched(op: Op) -> list[Use]:
    """Return the memory of an operation's arrays, and whether it may be written."""
    return [(as_buffer(x).span, written) for x, written in touched(op)]
