"""all_to_all and exchanges of different sizes on one host, over staging buffers.

In each round a rank copies a piece for every peer to its staging buffer and signals tick 1. Then it
waits for each peer in turn, beginning with the next rank, and copies its piece from there. In the
first round it waits for all ranks, to compare their calls before it writes to any array; later only
for those with which it still has pieces to exchange.

If all pieces have equal sizes, every rank computes the number of rounds. Otherwise a rank knows
only its own sizes: beside its first pieces it publishes what it sends and what it awaits. Each rank
compares the two for all pairs. The largest size of any pair determines the number of rounds for all
ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nc10d.backend.cpu.algorithms import peer_arrays
from nc10d.backend.cpu.algorithms.group_shape import GroupShape
from nc10d.backend.cpu.program import steps as do
from nc10d.backend.cpu.program.program import (
    At,
    Step,
    Steps,
    line_down,
    line_up,
    moved,
    staging,
    user,
)


@dataclass(frozen=True, slots=True)
class Route:
    """Places and bytes of the arrays that this rank sends to, and receives from, each rank."""

    # A slot of a staging buffer has a part for each destination. With `to_one` every rank sends to
    # the same single rank, which gets the whole slot.

    sends: Sequence[At]
    send_bytes: Sequence[int]
    recvs: Sequence[At]
    recv_bytes: Sequence[int]
    to_one: bool = False


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Where the pieces of a round stand in a staging buffer; a pair moves `nbytes` per round."""

    start: int
    nbytes: int
    pitch: int

    def place(self, sender: int, receiver: int) -> At:
        """Return the place of the piece from one rank to another."""
        return staging(sender, self.start + receiver * self.pitch)


def _pieces(shape: GroupShape, start: int, to_one: bool) -> _Pieces:
    """Cut the slots from `start` on."""
    nbytes = line_down((shape.slot_bytes - start) // (1 if to_one else shape.size))
    assert nbytes > 0, shape
    return _Pieces(start, nbytes, 0 if to_one else nbytes)


def even_all_to_all(
    shape: GroupShape, nbytes: int, sends: Sequence[At], recvs: Sequence[At]
) -> list[Step]:
    """Return the steps of recvs[r] := rank r's sends[this rank], `nbytes` each."""
    pieces = _pieces(shape, 0, to_one=False)
    sizes = [nbytes] * shape.size
    route = Route(sends, sizes, recvs, sizes)
    opening = [do.free(), do.enter(), *_publish(shape, route, pieces), do.signal(1)]
    opening += [do.meet_all(), *_keep(shape, route), *_collect(shape, route, pieces)]
    steps = [*opening, do.end_round(1, 2)]
    rounds = max(1, -(-nbytes // pieces.nbytes)) if shape.size > 1 else 1
    if rounds > 1:
        body = _later_rounds(shape, route, pieces, pieces.nbytes)
        steps += [*body, do.end_round(1, 2, rounds - 1, len(body))]
    if shape.size == 1 or nbytes < shape.direct:
        return steps
    return peer_arrays.all_to_all(shape, nbytes, sends[0], recvs, steps)


def announced(shape: GroupShape, route: Route, crossing: Steps = ()) -> list[Step]:
    """Return the steps of an exchange along `route`; `crossing` compares sizes with other hosts.

    User array 0 holds the sizes: for each rank the bytes sent to it and awaited from it, as int64.
    """
    sizes = do.SIZES_BYTES * shape.size
    pieces = _pieces(shape, line_up(sizes), route.to_one)
    opening = [do.free(), do.enter(), do.copy(staging(shape.rank), user(0), sizes)]
    opening += [*_publish(shape, route, pieces), do.signal(1), do.meet_all()]
    opening.append(do.agree(pieces.nbytes))
    ticks = 1
    if crossing:
        ticks = 2
        opening += [*crossing, do.signal(2), do.wait_all(2)]
    opening += [*_keep(shape, route), *_collect(shape, route, pieces)]
    # The opening is the first segment: it goes on where the loop over the others ends a round.
    body = _later_rounds(shape, route, pieces)
    return [*opening, do.jump(len(body)), *body, do.loop_agreed(ticks, ticks + 1, len(body))]


def _keep(shape: GroupShape, route: Route) -> list[Step]:
    me = shape.rank
    nbytes = min(route.send_bytes[me], route.recv_bytes[me])
    return [do.copy(route.recvs[me], route.sends[me], nbytes)] if nbytes else []


def _publish(
    shape: GroupShape, route: Route, pieces: _Pieces, beyond: int = 0, base: int = 0
) -> list[Step]:
    """Return the steps that publish a piece for each peer that is sent more than `beyond` bytes.

    The pieces of segment 0 begin `base` bytes into the arrays.
    """
    return [
        do.copy(
            pieces.place(shape.rank, peer),
            moved(route.sends[peer], base, pieces.nbytes),
            pieces.nbytes,
            route.send_bytes[peer] - base,
        )
        for peer in shape.peers
        if route.send_bytes[peer] > beyond
    ]


def _collect(
    shape: GroupShape, route: Route, pieces: _Pieces, beyond: int = 0, base: int = 0
) -> list[Step]:
    """Return the steps that copy the pieces for this rank.

    With `beyond` they wait for each peer that this rank receives from, or sends to: a slot is
    written again only when such peers have signalled the round after.
    """
    steps: list[Step] = []
    for peer in shape.peers:
        if beyond and max(route.send_bytes[peer], route.recv_bytes[peer]) > beyond:
            steps.append(do.wait(peer, 1))
        if route.recv_bytes[peer] > beyond:
            place = moved(route.recvs[peer], base, pieces.nbytes)
            left = route.recv_bytes[peer] - base
            steps.append(do.copy(place, pieces.place(peer, shape.rank), pieces.nbytes, left))
    return steps


def _later_rounds(shape: GroupShape, route: Route, pieces: _Pieces, base: int = 0) -> list[Step]:
    """Return the steps of each round after the first."""
    where = pieces, pieces.nbytes, base
    publish = _publish(shape, route, *where)
    return [*publish, do.signal(1), *_collect(shape, route, *where)]
