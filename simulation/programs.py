"""The engine's programs in any interleaving: several collectives, back to back.

Laws: every array ends with NumPy's result. No two ranks touch the same bytes unordered. No rank
waits for ever. Ranks that make different calls get an error.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nc10d.arrays.call_info import CallInfo
from nc10d.backend.cpu.algorithms import choose
from nc10d.backend.cpu.algorithms.group_shape import GroupShape
from nc10d.backend.cpu.algorithms.reduction import Reduction
from nc10d.backend.cpu.program.program import Program
from nc10d.ops import SUM
from simulation.clock import Simulation
from simulation.laws import LawBroken, require
from simulation.race_simulator.simulator import SimulatedWorld
from simulation.race_simulator.vector_clocks import Disagreement

_SLOT, _SMALL = 2048, 512
Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Collective:
    """A collective that all ranks call, each on an array of `count` numbers."""

    op: str
    count: int
    root: int
    index: int

    def array(self, rank: int) -> Array:
        """Return a rank's input."""
        return np.arange(self.count, dtype=np.int64) * (rank + 1) + self.index

    def program(self, layout: GroupShape) -> Program:
        """Return a rank's program."""
        if self.op == "broadcast":
            steps = choose.broadcast(layout, 8 * self.count, self.root)
        else:
            reduction = Reduction(SUM, "int64", layout.size)
            root = self.root if self.op == "reduce" else -1
            steps = choose.all_reduce(layout, 8 * self.count, reduction, root)
        return Program(CallInfo(self.op, count=self.count, root=self.root), tuple(steps), 1)

    def expected(self, size: int, rank: int) -> Array:
        """Return the array that a rank must end with."""
        if self.op == "broadcast":
            return self.array(self.root)
        if self.op == "reduce" and rank != self.root:
            return self.array(rank)
        total: Array = np.sum([self.array(other) for other in range(size)], axis=0)
        return total


def programs(sim: Simulation) -> None:
    """Run collectives of all ranks; in some runs the last rank's last call differs."""
    random, size = sim.random, sim.random.randint(2, 5)
    world = SimulatedWorld(size, _SLOT)
    layouts = [GroupShape(size, rank, _SLOT, _SMALL) for rank in range(size)]
    calls = [
        Collective(
            random.choice(("all_reduce", "reduce", "broadcast", "broadcast")),
            random.choice((0, 1, 3, 40, 300)),
            random.randrange(size),
            index,
        )
        for index in range(random.randint(1, 5))
    ]
    mismatch = random.random() < 0.2
    if mismatch:
        calls[-1] = Collective("reduce", 40, 0, len(calls))
    data = [[call.array(rank) for rank in range(size)] for call in calls]
    for call, arrays in zip(calls, data, strict=True):
        for rank, array in enumerate(arrays):
            odd = mismatch and call is calls[-1] and rank == size - 1
            made = Collective("reduce", 40, 1, 0) if odd else call
            world.submit(rank, made.program(layouts[rank]), [array.view(np.uint8)])
    try:
        world.run(random.randrange)
    except Disagreement:
        if mismatch:
            return
        raise
    if mismatch:
        raise LawBroken("a rank made another call, and no rank raised")
    for call, arrays in zip(calls, data, strict=True):
        for rank, array in enumerate(arrays):
            right = bool(np.array_equal(array, call.expected(size, rank)))
            require(right, f"{call}: rank {rank} ends with a wrong array")
