"""How the simulator runs steps that access peers' exposed arrays, and gates.

An exposed array is watched from `expose` to the end of the program. Its owner's accesses are
checked against those of its peers. The end of the program counts as a write, because the caller may
write from then on. So does `withdraw`, which ends the time in which peers may write.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from nc10d.backend.cpu.program.program import Space, Step, StepKind
from simulation.race_simulator.vector_clocks import Bytes, Region, mapped, paired

if TYPE_CHECKING:
    from simulation.race_simulator.simulator import SimulatedRank


def touch(me: SimulatedRank, array: Bytes, low: int, nbytes: int, *, write: bool) -> None:
    """Record an access to an array of this rank, if it is exposed."""
    for region in me.exposed.values():
        if np.shares_memory(region.data, array):
            start = low + _address(array) - _address(region.data)
            if start >= 0:
                region.touch(start, start + nbytes, me.rank, me.clock, write=write)


def withdraw(me: SimulatedRank) -> None:
    """End the exposure of all arrays of the program that has ended."""
    for region in me.exposed.values():
        region.touch(0, region.data.size, me.rank, me.clock, write=True)
    me.exposed.clear()
    assert me.writable == 0, "a program ends with a window that it has not withdrawn"


def _address(array: Bytes) -> int:
    return int(array.ctypes.data)


def _expose(me: SimulatedRank, step: Step) -> bool:
    slot, place = me.round & 1, (me.round & 1, step.dst.offset)
    me.view(step.dst, 16, write=True)
    _, users = me.queue[0]
    assert step.src.space is Space.USER, step
    data = users[step.src.index][step.src.offset :]
    me.exposed[place] = Region(f"array of rank {me.rank}", data)
    if me.rank in me.world.unreadable:
        me.flags[slot] = me.flags[slot] or step.flag
        del me.exposed[place]
    elif me.rank not in me.world.keeping and step.writable:
        me.writable, me.written = step.writable, me.exposed[place]
    return True


def _withdraw(me: SimulatedRank, step: Step) -> bool:
    del step
    if me.writable:
        assert me.written is not None
        me.written.touch(0, me.writable, me.rank, me.clock, write=True)
    me.writable = 0
    return True


def _exposed(me: SimulatedRank, step: Step, peer: int) -> Region:
    slot, offset = me.round & 1, step.src.offset
    owner = me.world.ranks[peer]
    owner.staging[slot].touch(offset, offset + 16, me.rank, me.clock, write=False)
    region = owner.exposed.get((slot, offset))
    assert region is not None, f"rank {peer} has exposed nothing to {step}"
    return region


def _fetch(me: SimulatedRank, step: Step) -> bool:
    region, low = _exposed(me, step, step.peer), step.offset
    there = min(step.nbytes, max(0, me.writable - low))
    low, nbytes = low + there, step.nbytes - there
    dst = me.view(replace(step.dst, offset=step.dst.offset + there), nbytes, write=True)
    region.touch(low, low + nbytes, me.rank, me.clock, write=False)
    dst[:] = region.data[low : low + nbytes]
    return True


def _fold(me: SimulatedRank, step: Step) -> bool:
    assert step.kernel is not None
    low, nbytes = step.offset, step.nbytes
    me.view(step.also, 2 * step.most, write=True)
    total: Any = None
    for rank in range(me.world.size):
        if rank == me.rank:
            part = me.view(step.own, nbytes, write=False)
        else:
            region = _exposed(me, step, rank)
            region.touch(low, low + nbytes, me.rank, me.clock, write=False)
            part = region.data[low : low + nbytes]
        values = part.copy().view(step.kernel.dtype.numpy)
        total = values if total is None else paired(step.kernel, total, values)
    folded = np.asarray(total).view(np.uint8)
    if step.last is not None:
        folded = mapped(step.last, folded, step.arg)
    me.view(step.dst, nbytes, write=True)[:] = folded
    _give(me, step, folded[: max(0, step.writable - low)], low)
    return True


def _give(me: SimulatedRank, step: Step, data: Bytes, low: int) -> None:
    """Write bytes into the windows of all peers that have exposed any."""
    for rank in range(me.world.size):
        given = min(data.size, me.world.ranks[rank].writable - low)
        if rank != me.rank and given > 0:
            region = _exposed(me, step, rank)
            region.touch(low, low + given, me.rank, me.clock, write=True)
            region.data[low : low + given] = data[:given]


def _fill(me: SimulatedRank, step: Step) -> bool:
    # A rank that has exposed a window does not fetch it, so it must be filled completely.
    for rank in me.others:
        assert me.world.ranks[rank].writable in (0, step.nbytes), step
    _give(me, step, me.view(step.own, step.nbytes, write=False), 0)
    return True


def _branch_if_flagged(me: SimulatedRank, step: Step) -> bool:
    if not me.everyone_reached(me.seq + step.tick):
        return False
    if me.compare(me.others):
        me.writable = 0
        me.pc += step.skip
    return True


def _jump(me: SimulatedRank, step: Step) -> bool:
    me.pc += step.skip
    return True


def _pick(me: SimulatedRank, step: Step) -> bool:
    slot, owner = me.round & 1, me.world.ranks[step.src.index]
    owner.staging[slot].touch(0, 16, me.rank, me.clock, write=False)
    if (slot, 0) not in owner.exposed:
        me.pc += step.skip
    return True


def _gate(me: SimulatedRank, step: Step) -> bool:
    return bool(me.view(step.dst, 8, write=False).view(np.int64)[0])


def _open(me: SimulatedRank, step: Step) -> bool:
    me.view(step.dst, 8, write=True).view(np.int64)[0] = 1
    me.world.signalled()
    return True


HANDLERS: dict[StepKind, Callable[[SimulatedRank, Step], bool]] = {
    StepKind.EXPOSE: _expose,
    StepKind.FETCH: _fetch,
    StepKind.FOLD_EXPOSED: _fold,
    StepKind.BRANCH_IF_FLAGGED: _branch_if_flagged,
    StepKind.JUMP: _jump,
    StepKind.BRANCH_IF_UNREADABLE: _pick,
    StepKind.GATE: _gate,
    StepKind.OPEN_GATE: _open,
    StepKind.WITHDRAW: _withdraw,
    StepKind.FILL_EXPOSED: _fill,
}
