"""The programs of a collective of a given size, on every rank of a topology.

Sizes are those of `nc10d.bench.workloads`: `nbytes` is the larger buffer of a rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from nc10d.arrays.call_info import CallInfo
from nc10d.backend.cpu.algorithms import choose
from nc10d.backend.cpu.algorithms.group_shape import (
    DEFAULTS,
    DIRECT,
    GroupShape,
    Thresholds,
    Topology,
    grouped,
    one_shot_bytes,
)
from nc10d.backend.cpu.algorithms.reduction import Reduction
from nc10d.backend.cpu.program.program import Program, Step, user
from nc10d.ops import SUM

ITEM, DTYPE = 4, "float32"
SLOT = 256 * 1024
"""Bytes of a slot, half a staging buffer, of the default group."""
LOCAL_SIZE = 8
"""Default number of ranks of a host."""


@dataclass(frozen=True)
class Collective:
    """A collective of a given size in a group: `program(rank)` is a rank's program.

    `arrays` is the number of bytes of a rank's arrays.
    """

    op: str
    nbytes: int
    layout: GroupShape

    @property
    def hosts(self) -> Topology:
        """The ranks of each host."""
        return self.layout.hosts or Topology((tuple(range(self.layout.size)),))

    @property
    def arrays(self) -> int:
        """Bytes of all arrays of a rank."""
        return int(self.nbytes * (_ARRAYS[self.op](self.layout.size) if self.op in _ARRAYS else 1))

    def program(self, rank: int) -> Program:
        """Return the program that choose.py picks for a rank."""
        at = self.layout
        steps, users = MAKERS[self.op](replace(at, rank=rank), self.nbytes)
        return Program(CallInfo(self.op, DTYPE, self.nbytes // ITEM), tuple(steps), users)


def layout_of(
    hosts: Topology, slot: int = SLOT, *, thresholds: Thresholds | None = None
) -> GroupShape:
    """Return rank 0's view of the default group on these hosts, as the backend makes it.

    Every rank has a separate core. Across hosts the `thresholds` are always the defaults.
    """
    size = hosts.size
    several = hosts if len(hosts.hosts) > 1 else None
    small = one_shot_bytes(size, oversubscribed=several is not None)
    own = DEFAULTS if several or thresholds is None else thresholds
    return GroupShape(size, 0, slot, small, several, DIRECT, own)


def spread(ranks: int, local_size: int = LOCAL_SIZE) -> Topology:
    """Return ranks on as few hosts as possible, `local_size` to a host and the rest on the last."""
    return grouped([rank // local_size for rank in range(ranks)])


def _all_reduce(layout: GroupShape, nbytes: int) -> tuple[list[Step], int]:
    return choose.all_reduce(layout, nbytes, Reduction(SUM, DTYPE, layout.size)), 1


def _reduce(layout: GroupShape, nbytes: int) -> tuple[list[Step], int]:
    return choose.all_reduce(layout, nbytes, Reduction(SUM, DTYPE, layout.size), 0), 1


def _broadcast(layout: GroupShape, nbytes: int) -> tuple[list[Step], int]:
    return choose.broadcast(layout, nbytes, 0), 1


def _barrier(layout: GroupShape, nbytes: int) -> tuple[list[Step], int]:
    del nbytes
    return choose.barrier(layout), 0


def chunk(nbytes: int, size: int) -> int:
    """Return the bytes of a rank's chunk of an array of `nbytes`: whole elements, at least one."""
    return max(ITEM, nbytes // size // ITEM * ITEM)


def _all_gather(layout: GroupShape, nbytes: int) -> tuple[list[Step], int]:
    part = chunk(nbytes, layout.size)
    outs = [user(1, part * rank) for rank in range(layout.size)]
    return choose.all_gather(layout, [part] * layout.size, user(0), outs), 2


def _reduce_scatter(layout: GroupShape, nbytes: int) -> tuple[list[Step], int]:
    size = layout.size
    part, reduction = chunk(nbytes, size), Reduction(SUM, DTYPE, size)
    inps = [user(1, part * rank) for rank in range(size)]
    return choose.reduce_scatter(layout, [part] * size, user(0), inps, reduction), 2


def _all_to_all(layout: GroupShape, nbytes: int) -> tuple[list[Step], int]:
    part = chunk(nbytes, layout.size)
    sends, recvs = ([user(i, part * rank) for rank in range(layout.size)] for i in (0, 1))
    return choose.even_all_to_all(layout, part, sends, recvs), 2


MAKERS: dict[str, Callable[[GroupShape, int], tuple[list[Step], int]]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "barrier": _barrier,
}
_ARRAYS: dict[str, Callable[[int], float]] = {
    "all_gather": lambda size: 1 + 1 / size,
    "reduce_scatter": lambda size: 1 + 1 / size,
    "all_to_all": lambda size: 2.0,
}
