"""The choice of an algorithm, by values that are equal on all ranks of the group.

Every function has the signature of the algorithm for a single host. A group that spans hosts gets
the algorithm of the same name from hosts_reduce.py or hosts_exchange.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from nc10d.backend.cpu.algorithms import all_reduce as reductions
from nc10d.backend.cpu.algorithms import broadcast as broadcasts
from nc10d.backend.cpu.algorithms import exchange, gather, hosts_exchange, hosts_reduce
from nc10d.backend.cpu.algorithms.all_reduce import Part
from nc10d.backend.cpu.algorithms.exchange import Route
from nc10d.backend.cpu.algorithms.group_shape import GroupShape
from nc10d.backend.cpu.algorithms.reduction import Reduction
from nc10d.backend.cpu.program.program import At, Step


def one_shot_limit(shape: GroupShape) -> int:
    """Return the largest array in bytes that an all_reduce reduces in a single round."""
    choice = hosts_reduce.one_shot_limit if shape.hosts else reductions.one_shot_limit
    return choice(shape)


def all_reduce(shape: GroupShape, nbytes: int, reduction: Reduction, root: int = -1) -> list[Step]:
    """Return the steps that reduce user array 0 of all ranks in place, or only on the root."""
    choice = hosts_reduce.all_reduce if shape.hosts else reductions.all_reduce
    return choice(shape, nbytes, reduction, root)


def fused(shape: GroupShape, parts: Sequence[Part]) -> list[Step]:
    """Return the steps that reduce several small arrays, which share a barrier."""
    return hosts_reduce.fused(shape, parts) if shape.hosts else reductions.fused(shape, parts)


def broadcast(shape: GroupShape, nbytes: int, root: int) -> list[Step]:
    """Return the steps that copy the root's user array 0 to all ranks."""
    choice = hosts_reduce.broadcast if shape.hosts else broadcasts.broadcast
    return choice(shape, nbytes, root)


def barrier(shape: GroupShape) -> list[Step]:
    """Return the steps of a barrier: no rank leaves before all have entered."""
    choice = hosts_reduce.barrier if shape.hosts else broadcasts.barrier
    return choice(shape)


def all_gather(shape: GroupShape, sizes: Sequence[int], mine: At, outs: Sequence[At]) -> list[Step]:
    """Return the steps of outs[r] := rank r's array `mine` of sizes[r] bytes."""
    choice = hosts_exchange.all_gather if shape.hosts else gather.all_gather
    return choice(shape, sizes, mine, outs)


def reduce_scatter(
    shape: GroupShape, sizes: Sequence[int], out: At, inps: Sequence[At], reduction: Reduction
) -> list[Step]:
    """Return the steps of out := reduction of all ranks' inps[this rank].

    Rank r gets sizes[r] bytes.
    """
    choice = hosts_exchange.reduce_scatter if shape.hosts else gather.reduce_scatter
    return choice(shape, sizes, out, inps, reduction)


def even_all_to_all(
    shape: GroupShape, nbytes: int, sends: Sequence[At], recvs: Sequence[At]
) -> list[Step]:
    """Return the steps of recvs[r] := rank r's sends[this rank], `nbytes` each."""
    choice = hosts_exchange.even_all_to_all if shape.hosts else exchange.even_all_to_all
    return choice(shape, nbytes, sends, recvs)


def announced(shape: GroupShape, route: Route, send_counts: int, recv_counts: int) -> list[Step]:
    """Return the steps of an exchange along `route`.

    The user arrays with these two numbers hold the sizes, as int64.
    """
    choice = hosts_exchange.announced if shape.hosts else exchange.announced
    return choice(shape, route, send_counts, recv_counts)
