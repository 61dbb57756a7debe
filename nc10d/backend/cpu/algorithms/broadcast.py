"""broadcast and barrier on one host.

broadcast: the root copies its array to its staging buffer, a slot per round, and every rank copies
the slot out. Up to INLINE_BYTES travel in the root counter's cache line instead. The two slots
alternate, so the root may be a round ahead. No rank leaves before all ranks have entered and
compared their fingerprints: so a disagreement, for example on the root, is an error in that very
call on every rank.

In a broadcast with several rounds tick 2 reports that a rank has left a round. The root signals
tick 2 only after it has compared all fingerprints. After a single-round broadcast the next call
reports this: a rank that enters the next call has left this round.

barrier: every rank signals tick 1 and waits for all others, over shared counters.
"""

from __future__ import annotations

from nc10d.backend.cpu.algorithms import peer_arrays
from nc10d.backend.cpu.algorithms.group_shape import GroupShape
from nc10d.backend.cpu.program import steps as do
from nc10d.backend.cpu.program.program import INLINE_BYTES, Step, inline, staging, user


def barrier(shape: GroupShape) -> list[Step]:
    """Return the steps of a barrier: no rank leaves before all have entered."""
    return do.single_round()


def broadcast(shape: GroupShape, nbytes: int, root: int) -> list[Step]:
    """Return the steps that copy the root's user array 0 to all ranks."""
    if shape.size == 1:
        return [do.free(), do.enter(), do.end_round(2, 2)]
    first, rest = min(nbytes, shape.slot_bytes), max(0, nbytes - shape.slot_bytes)
    steps = _first(shape, first, root)
    if rest:
        body = _more(shape, rest, root)
        rounds = -(-rest // shape.slot_bytes)
        steps += [do.signal(2), do.end_round(2, 2), *body, do.end_round(2, 2, rounds, len(body))]
    else:
        steps += [do.end_round(1, 2)]
    return peer_arrays.broadcast(shape, nbytes, root, steps) if nbytes >= shape.direct else steps


def _first(shape: GroupShape, nbytes: int, root: int) -> list[Step]:
    place = inline(root) if nbytes <= INLINE_BYTES else staging(root)
    publish = [do.copy(place, user(0), nbytes)] if nbytes and shape.rank == root else []
    read = [do.copy(user(0), place, nbytes)] if nbytes and shape.rank != root else []
    return [do.free(), do.enter(), *publish, do.signal(1), do.meet_all(), *read]


def _more(shape: GroupShape, rest: int, root: int) -> list[Step]:
    slot = shape.slot_bytes
    place = user(0, slot, slot)
    if shape.rank == root:
        return [do.free(), do.copy(staging(root), place, slot, rest), do.signal(2)]
    return [do.wait(root, 1), do.copy(place, staging(root), slot, rest), do.signal(2)]
