"""all_to_all, gather and scatter: everyone may send something of its own to everyone.

Even exchanges have a fixed program. In the others a rank knows only its own sizes, so ranks
first announce what they send to whom; the engine compares that with what is awaited and settles
how many rounds the largest piece takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nc10d.backend.cpu.algorithms import peer_arrays
from nc10d.backend.cpu.algorithms.group_shape import GroupShape
from nc10d.backend.cpu.program.lines import line_down
from nc10d.backend.cpu.program.program import At, Step, board, moved, user
from nc10d.backend.cpu.program.steps import (
    agree,
    copy,
    end_round,
    enter,
    free,
    loop_agreed,
    meet,
    meet_all,
    signal,
    wait,
)


@dataclass(frozen=True, slots=True)
class Route:
    """What I send to and await from each rank: places and bytes.

    `pitch` is the distance between the places of two destinations on a board, `slot` how many
    bytes travel per pair and round.
    """

    sends: Sequence[At]
    send_bytes: Sequence[int]
    recvs: Sequence[At]
    recv_bytes: Sequence[int]
    slot: int
    pitch: int


def even_all_to_all(
    layout: GroupShape, nbytes: int, sends: Sequence[At], recvs: Sequence[At]
) -> list[Step]:
    """recvs[r] := rank r's sends[me], `nbytes` each."""
    slot = line_down(layout.half // layout.size)
    sizes = [nbytes] * layout.size
    route = Route(sends, sizes, recvs, sizes, slot, slot)
    opening = [free(), enter(), *_transfer(layout, route, 0, opening=True, own=True)]
    rounds = max(1, -(-nbytes // slot)) if layout.size > 1 else 1
    steps = [*opening, end_round(1, 2)]
    if rounds > 1:
        body = _transfer(layout, route, slot, opening=False, own=False)
        steps += [*body, end_round(1, 2, rounds - 1, len(body))]
    if layout.size == 1 or nbytes < layout.direct:
        return steps
    return peer_arrays.all_to_all(layout, nbytes, sends[0], recvs, steps)


def announced(layout: GroupShape, route: Route, send_counts: int, recv_counts: int) -> list[Step]:
    """Exchange by `route`; two user arrays (by number) hold its sizes as int64."""
    size = 8 * layout.size
    opening = [
        free(),
        enter(),
        copy(board(layout.rank), user(send_counts), size),
        signal(1),
        meet_all(),
        agree(send_counts, recv_counts, route.slot),
        *_keep(layout, route),
        end_round(1, 2),
    ]
    body = _transfer(layout, route, 0, opening=False, own=False)
    return [*opening, *body, loop_agreed(1, 2, len(body))]


def _keep(layout: GroupShape, route: Route) -> list[Step]:
    me = layout.rank
    nbytes = min(route.send_bytes[me], route.recv_bytes[me])
    return [copy(route.recvs[me], route.sends[me], nbytes)] if nbytes else []


def _transfer(
    layout: GroupShape, route: Route, base: int, *, opening: bool, own: bool
) -> list[Step]:
    """One round: show a slot for every rank, then take mine from every rank."""
    me, slot, pitch = layout.rank, route.slot, route.pitch
    steps: list[Step] = []
    for peer in layout.others:
        if route.send_bytes[peer] > base:
            place = moved(route.sends[peer], base, slot)
            left = route.send_bytes[peer] - base
            steps.append(copy(board(me, peer * pitch), place, slot, left))
    steps += [signal(1), *(_keep(layout, route) if own else [])]
    for peer in layout.others:
        steps.append(meet(peer) if opening else wait(peer, 1))
        if route.recv_bytes[peer] > base:
            place = moved(route.recvs[peer], base, slot)
            left = route.recv_bytes[peer] - base
            steps.append(copy(place, board(peer, me * pitch), slot, left))
    return steps
