"""Which algorithm carries out a collective: from what all ranks of the group know alike.

The functions have the signatures of the local algorithms; a layout that spans hosts gets its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from nc10d.backend.cpu.algorithms import all_reduce as reductions
from nc10d.backend.cpu.algorithms import (
    broadcast as broadcasts,
)
from nc10d.backend.cpu.algorithms import exchange, gather, hosts_exchange, hosts_reduce
from nc10d.backend.cpu.algorithms.all_reduce import Part
from nc10d.backend.cpu.algorithms.exchange import Route
from nc10d.backend.cpu.algorithms.group_shape import GroupShape
from nc10d.backend.cpu.algorithms.reduction import Reduction
from nc10d.backend.cpu.program.program import At, Step


def one_shot_limit(layout: GroupShape) -> int:
    """Return the largest array, in bytes, that an all_reduce folds in one shot."""
    pick = hosts_reduce.one_shot_limit if layout.hosts else reductions.one_shot_limit
    return pick(layout)


def all_reduce(layout: GroupShape, nbytes: int, reduction: Reduction, root: int = -1) -> list[Step]:
    """Fold user array 0 of all ranks, in place; with a root, only there."""
    pick = hosts_reduce.all_reduce if layout.hosts else reductions.all_reduce
    return pick(layout, nbytes, reduction, root)


def fused(layout: GroupShape, parts: Sequence[Part]) -> list[Step]:
    """Reduce several small arrays with one handshake."""
    return hosts_reduce.fused(layout, parts) if layout.hosts else reductions.fused(layout, parts)


def broadcast(layout: GroupShape, nbytes: int, root: int) -> list[Step]:
    """User array 0 := the root's."""
    pick = hosts_reduce.broadcast if layout.hosts else broadcasts.broadcast
    return pick(layout, nbytes, root)


def barrier(layout: GroupShape) -> list[Step]:
    """Nobody leaves before everybody has come."""
    pick = hosts_reduce.barrier if layout.hosts else broadcasts.barrier
    return pick(layout)


def all_gather(
    layout: GroupShape, sizes: Sequence[int], mine: At, outs: Sequence[At]
) -> list[Step]:
    """outs[r] := rank r's array of sizes[r] bytes; mine is my own."""
    pick = hosts_exchange.all_gather if layout.hosts else gather.all_gather
    return pick(layout, sizes, mine, outs)


def reduce_scatter(
    layout: GroupShape, sizes: Sequence[int], out: At, inps: Sequence[At], reduction: Reduction
) -> list[Step]:
    """out := fold over ranks of their inps[my rank]; sizes[r] bytes belong to rank r."""
    pick = hosts_exchange.reduce_scatter if layout.hosts else gather.reduce_scatter
    return pick(layout, sizes, out, inps, reduction)


def even_all_to_all(
    layout: GroupShape, nbytes: int, sends: Sequence[At], recvs: Sequence[At]
) -> list[Step]:
    """recvs[r] := rank r's sends[me], `nbytes` each."""
    pick = hosts_exchange.even_all_to_all if layout.hosts else exchange.even_all_to_all
    return pick(layout, nbytes, sends, recvs)


def announced(layout: GroupShape, route: Route, send_counts: int, recv_counts: int) -> list[Step]:
    """Exchange by `route`; two user arrays (by number) hold its sizes as int64."""
    pick = hosts_exchange.announced if layout.hosts else exchange.announced
    return pick(layout, route, send_counts, recv_counts)
