"""all_to_all and exchanges of different sizes on one host, over staging buffers.

In each round a rank copies a piece for every peer to its staging buffer and signals tick 1. Then it
waits for each peer in turn, beginning with the next rank, and copies its piece from there. In the
first round it waits for all ranks, to compare their calls before it writes to any array.

If all pieces have equal sizes, every rank computes the number of rounds. Otherwise a rank knows
only its own sizes: the ranks first publish what they send and what they await. Each rank compares
the two for all pairs. The largest size of any pair determines the number of rounds for all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nc10d.backend.cpu.algorithms import peer_arrays
from nc10d.backend.cpu.algorithms.group_shape import GroupShape
from nc10d.backend.cpu.program import steps as do
from nc10d.backend.cpu.program.program import At, Step, Steps, line_down, moved, staging, user


@dataclass(frozen=True, slots=True)
class Route:
    """Places and bytes of the arrays that this rank sends to, and receives from, each rank."""

    # `pitch` is the distance in bytes between the pieces for two destinations in a staging buffer.
    # `piece` is the number of bytes that a pair of ranks transfers per round.

    sends: Sequence[At]
    send_bytes: Sequence[int]
    recvs: Sequence[At]
    recv_bytes: Sequence[int]
    piece: int
    pitch: int


def even_all_to_all(
    shape: GroupShape, nbytes: int, sends: Sequence[At], recvs: Sequence[At]
) -> list[Step]:
    """Return the steps of recvs[r] := rank r's sends[this rank], `nbytes` each."""
    piece = line_down(shape.slot_bytes // shape.size)
    sizes = [nbytes] * shape.size
    route = Route(sends, sizes, recvs, sizes, piece, piece)
    opening = [do.free(), do.enter(), *_transfer(shape, route, 0, opening=True)]
    rounds = max(1, -(-nbytes // piece)) if shape.size > 1 else 1
    steps = [*opening, do.end_round(1, 2)]
    if rounds > 1:
        body = _transfer(shape, route, piece)
        steps += [*body, do.end_round(1, 2, rounds - 1, len(body))]
    if shape.size == 1 or nbytes < shape.direct:
        return steps
    return peer_arrays.all_to_all(shape, nbytes, sends[0], recvs, steps)


def announced(shape: GroupShape, route: Route, crossing: Steps = ()) -> list[Step]:
    """Return the steps of an exchange along `route`; `crossing` compares sizes with other hosts.

    User array 0 holds the sizes: for each rank the bytes sent to it and awaited from it, as int64.
    """
    sizes = do.SIZES_BYTES * shape.size
    opening = [do.free(), do.enter(), do.copy(staging(shape.rank), user(0), sizes)]
    opening += [do.signal(1), do.meet_all(), do.agree(route.piece)]
    ticks = 1
    if crossing:
        ticks = 2
        opening += [*crossing, do.signal(2), do.wait_all(2)]
    opening += [*_keep(shape, route), do.end_round(ticks, ticks + 1)]
    body = _transfer(shape, route, 0)
    return [*opening, *body, do.loop_agreed(1, 2, len(body))]


def _keep(shape: GroupShape, route: Route) -> list[Step]:
    me = shape.rank
    nbytes = min(route.send_bytes[me], route.recv_bytes[me])
    return [do.copy(route.recvs[me], route.sends[me], nbytes)] if nbytes else []


def _transfer(shape: GroupShape, route: Route, base: int, opening: bool = False) -> list[Step]:
    """Return the steps of a round: publish a piece for each peer, then copy from each peer."""
    me, piece, pitch = shape.rank, route.piece, route.pitch
    steps: list[Step] = []
    for peer in shape.peers:
        if route.send_bytes[peer] > base:
            place = moved(route.sends[peer], base, piece)
            left = route.send_bytes[peer] - base
            steps.append(do.copy(staging(me, peer * pitch), place, piece, left))
    steps.append(do.signal(1))
    if opening:
        steps += [do.meet_all(), *_keep(shape, route)]
    for peer in shape.peers:
        steps += [] if opening else [do.wait(peer, 1)]
        if route.recv_bytes[peer] > base:
            place = moved(route.recvs[peer], base, piece)
            left = route.recv_bytes[peer] - base
            steps.append(do.copy(place, staging(peer, me * pitch), piece, left))
    return steps
