"""Small programs on the engine, and how long they take: what the cost model is measured with.

Ranks, each on a core of its own, run them at the same time. Two programs that differ in one step
tell what that step costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.model.samples import typical
from nc10d.arrays.dtypes import DType
from nc10d.backend.cpu.backend import CpuBackend
from nc10d.backend.cpu.engine import call_sites
from nc10d.backend.cpu.native import entry_points
from nc10d.backend.cpu.native import offsets as codes
from nc10d.backend.cpu.native import prepared_calls as plain
from nc10d.backend.cpu.program.linker import Linked, link
from nc10d.backend.cpu.program.program import CallInfo, Kernel, Program, Step
from nc10d.group.process_group import ProcessGroup
from nc10d.kernels.reduce import kernel_address
from nc10d.ops import RedOp

MANY = 8
"""How often a program does what is soon done."""
Bytes = npt.NDArray[np.uint8]


class Bench:
    """One rank's end of the measurements: its channel, and programs of up to two arrays.

    `others` are all other ranks: of two ranks the mate.
    """

    def __init__(self, group: ProcessGroup) -> None:
        backend: Any = group.backend("cpu")
        self.backend: CpuBackend = backend
        self.rank = group.rank
        self.others = [peer for peer in range(group.size) if peer != group.rank]
        self._kept: dict[tuple[Step, ...], Linked] = {}

    def run(self, steps: Sequence[Step], x: Bytes, y: Bytes | None = None) -> float:
        """Run a program on arrays; return the seconds. Blocks for its waits."""
        key = tuple(steps)
        linked = self._kept.get(key)
        if linked is None:
            program = Program(CallInfo("calibration"), key, 2)
            linked = link(program, self.backend.group.memory.size, codes.C_TABLES, _kernel, _room)
            self._kept[key] = linked
        channel, other = self.backend.group.channel.address, x if y is None else y
        table = np.array([plain.address(x), plain.address(other)], np.int64)
        words = channel, linked.address, plain.address(table)
        start = time.perf_counter()
        while (answer := entry_points.run(*words)) == codes.NEW_SITE:
            call_sites.learn()  # the line that calls this has never called before
        while answer == codes.BLOCKED:  # a mate has lost its core for a while
            answer = entry_points.drive(channel, entry_points.SLICE_NS)
        taken = time.perf_counter() - start
        assert answer == codes.DONE, answer
        return taken


def _kernel(kernel: Kernel) -> int:
    return kernel_address(RedOp[kernel.kind], DType.FLOAT32)


def _room(nbytes: int) -> Bytes:
    return np.zeros(nbytes, np.uint8)


def repeated(one: Callable[[], float], count: int) -> float:
    """Return the typical one of `count` times; all ranks that take part repeat alike."""
    return typical([one() for _ in range(count)])


def often(nbytes: int) -> int:
    """Return how often to repeat what goes through so many bytes."""
    return max(5, min(48, (16 << 20) // max(nbytes, 1)))
