"""Which operations of a batch must wait for which: those that use one another's memory.

A block means its calls in order. Nobody can see the order of operations that share no memory, or
only read it; any other waits until the earlier ones that it meets are over.
"""

from __future__ import annotations

from collections.abc import Sequence

from nc10d.arrays.access import touched
from nc10d.arrays.buffer import as_buffer
from nc10d.arrays.intervals import Use, clash
from nc10d.ops import Op

Dependencies = dict[int, frozenset[int]]
"""Place in the batch of an operation -> places of the earlier ones that it waits for."""


def dependencies_of(ops: Sequence[Op]) -> Dependencies:
    """Return what waits for what; empty where any order will do."""
    if len(ops) == 1:
        return {}
    memory = [_touched(op) for op in ops]
    found = {
        place: frozenset(n for n, earlier in enumerate(memory[:place]) if clash(earlier, mine))
        for place, mine in enumerate(memory)
    }
    return {place: earlier for place, earlier in found.items() if earlier}


def _touched(op: Op) -> list[Use]:
    """Return the memory of an operation's arrays, and whether it may be written."""
    return [(as_buffer(x).span, written) for x, written in touched(op)]
