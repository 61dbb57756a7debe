"""all_to_all and exchanges of different sizes on one host, over staging buffers.

In each round a rank copies a piece for every peer to the staging buffer and signals tick 1. Then it
waits for each peer in turn, beginning with the next rank, and copies its piece from there. In the
first round a rank waits for all ranks, to compare their calls before it writes to any array. Later
a rank waits for the peers with which it exchanges more than the first pieces.

If all pieces have equal sizes, every rank computes the number of rounds. Otherwise a rank knows
only its own sizes: it publishes the sizes to send and to await (tick 1), and then its first pieces
(tick 2). Each rank compares all pairs' sizes, while its peers may still copy pieces. The largest
size of any pair determines how many rounds all ranks make.

A piece has the same place in every round, which only the pair's two ranks use, and the sizes have
their own place. So a rank may write its next piece for a peer while another peer, whose exchange is
over, still reads the sizes.

Not done, because both were slower at 1 MiB: sizes before the pieces in the buffer, since copies
then run between addresses that differ by 64 bytes; one tick for sizes and pieces, since a rank
then waits for the pieces before copying its own.
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

    # A staging buffer's slot has a part for each destination. With `to_one` every rank sends to the
    # same rank, which gets the whole slot.

    sends: Sequence[At]
    send_bytes: Sequence[int]
    recvs: Sequence[At]
    recv_bytes: Sequence[int]
    to_one: bool = False


@dataclass(frozen=True, slots=True)
class _SlotLayout:
    """Where pieces lie in a staging buffer's slots: each pair moves `piece` per round."""

    size: int
    piece: int
    pitch: int

    def place(self, sender: int, receiver: int) -> At:
        """Return the place for the piece from one rank to another."""
        number = (receiver - sender - 1) % self.size
        return staging(sender, number * self.pitch)


def _layout(shape: GroupShape, room: int, parts: int) -> _SlotLayout:
    """Return the layout for slots whose first `room` bytes have so many parts."""
    piece = line_down(room // parts)
    assert piece > 0, shape
    return _SlotLayout(shape.size, piece, piece if parts > 1 else 0)


def even_all_to_all(
    shape: GroupShape, nbytes: int, sends: Sequence[At], recvs: Sequence[At]
) -> list[Step]:
    """Return the steps of recvs[r] := rank r's sends[this rank], `nbytes` each."""
    sizes = [nbytes] * shape.size
    steps = known_all_to_all(shape, Route(sends, sizes, recvs, sizes), nbytes)
    if shape.size == 1 or nbytes < shape.direct:
        return steps
    return peer_arrays.all_to_all(shape, nbytes, sends[0], recvs, steps)


def known_all_to_all(shape: GroupShape, route: Route, most: int) -> list[Step]:
    """Return the steps for an exchange along `route`; all ranks know `most`, the largest size."""
    layout = _layout(shape, shape.slot_bytes, shape.size)
    opening = [do.free(), do.enter(), *_publish(shape, route, layout), do.signal(1)]
    opening += [do.meet_all(), *_keep(shape, route), *_collect(shape, route, layout)]
    steps = [*opening, do.end_round(1, 2)]
    rounds = max(1, -(-most // layout.piece)) if shape.size > 1 else 1
    if rounds > 1:
        body = _later_round(shape, route, layout, layout.piece)
        steps += [*body, do.end_round(1, 2, rounds - 1, len(body))]
    return steps


def announced(shape: GroupShape, route: Route, crossing: Steps = ()) -> list[Step]:
    """Return the steps for an exchange along `route`; `crossing` compares sizes with other hosts.

    User array 0 holds the sizes: for each rank the bytes to send and those to await, as int64.
    """
    sizes = do.SIZES_BYTES * shape.size
    # The sizes stand behind the pieces, which so begin at a page, as large arrays nearly do: copies
    # are slow if both addresses are some 64 bytes apart within their pages.
    room = shape.slot_bytes - line_up(sizes)
    # A rank needs no part for a piece that stays.
    parts = 1 if route.to_one else max(1, shape.size - 1)
    layout = _layout(shape, room, parts)
    opening = [do.free(), do.enter(), do.copy(staging(shape.rank, room), user(0), sizes)]
    opening += [do.signal(1), *_publish(shape, route, layout), do.signal(2), do.meet_all()]
    opening.append(do.agree(layout.piece, room))
    ticks = 2
    if crossing:
        ticks = 3
        opening += [*crossing, do.signal(3), do.wait_all(3)]
    opening += [*_keep(shape, route), *_collect(shape, route, layout, 2)]
    # Round 0 is the loop's segment 0, which jumps over the body to the loop's end.
    body = _later_round(shape, route, layout)
    return [*opening, do.jump(len(body)), *body, do.loop_agreed(ticks, ticks + 1, len(body))]


def _keep(shape: GroupShape, route: Route) -> list[Step]:
    me = shape.rank
    nbytes = min(route.send_bytes[me], route.recv_bytes[me])
    return [do.copy(route.recvs[me], route.sends[me], nbytes)] if nbytes else []


def _publish(
    shape: GroupShape, route: Route, layout: _SlotLayout, beyond: int = 0, base: int = 0
) -> list[Step]:
    """Return the steps that publish a piece for each peer that is sent more than `beyond` bytes.

    The pieces of segment 0 begin `base` bytes into the arrays.
    """
    return [
        do.copy(
            layout.place(shape.rank, peer),
            moved(route.sends[peer], base, layout.piece),
            layout.piece,
            route.send_bytes[peer] - base,
        )
        for peer in shape.peers
        if route.send_bytes[peer] > beyond
    ]


def _collect(shape: GroupShape, route: Route, layout: _SlotLayout, tick: int = 0) -> list[Step]:
    """Return the steps that copy each peer's first piece, when that peer has signalled `tick`."""
    steps: list[Step] = []
    for peer in shape.peers:
        if route.recv_bytes[peer] > 0:
            steps += [do.wait(peer, tick)] if tick else []
            steps.append(_take(shape, route, layout, peer, 0))
    return steps


def _take(shape: GroupShape, route: Route, layout: _SlotLayout, peer: int, base: int) -> Step:
    """Return the step that copies a peer's piece; `base` as in `_publish`."""
    place = moved(route.recvs[peer], base, layout.piece)
    left = route.recv_bytes[peer] - base
    return do.copy(place, layout.place(peer, shape.rank), layout.piece, left)


def _later_round(shape: GroupShape, route: Route, layout: _SlotLayout, base: int = 0) -> list[Step]:
    """Return the steps for a round after the first; `base` as in `_publish`."""
    first = layout.piece
    steps = [*_publish(shape, route, layout, first, base), do.signal(1)]
    for peer in shape.peers:
        # A sender waits as well: the piece's place is written again in the round after the next.
        if max(route.send_bytes[peer], route.recv_bytes[peer]) > first:
            steps.append(do.wait(peer, 1))
        if route.recv_bytes[peer] > first:
            steps.append(_take(shape, route, layout, peer, base))
    return steps
