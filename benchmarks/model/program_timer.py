"""Times small programs on the engine, to measure the cost model's constants.

Ranks, each on a separate core, run them at the same time. The difference of two programs that
differ in a step is the cost of that step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.model.measurements import typical
from nc10d.arrays.call_info import CallInfo
from nc10d.arrays.dtypes import DType
from nc10d.backend.cpu.backend import CpuBackend
from nc10d.backend.cpu.engine import call_sites
from nc10d.backend.cpu.native import entry_points
from nc10d.backend.cpu.native import offsets as codes
from nc10d.backend.cpu.native import prepared_calls as plain
from nc10d.backend.cpu.program.linker import Linked, link
from nc10d.backend.cpu.program.program import Kernel, Program, Step
from nc10d.group.process_group import ProcessGroup
from nc10d.kernels.reduce import kernel_address

MANY = 8
"""Repetitions of a short step in a program."""
Bytes = npt.NDArray[np.uint8]


class ProgramTimer:
    """Runs programs of up to two arrays on this rank's channel; `others` are the other ranks."""

    def __init__(self, group: ProcessGroup) -> None:
        backend: Any = group.backend("cpu")
        self.backend: CpuBackend = backend
        self.rank = group.rank
        self.others = [peer for peer in range(group.size) if peer != group.rank]
        self._linked: dict[tuple[Step, ...], Linked] = {}

    def run(self, steps: Sequence[Step], x: Bytes, y: Bytes | None = None) -> float:
        """Run a program on arrays; return its seconds. Blocks for its waits."""
        key = tuple(steps)
        linked = self._linked.get(key)
        if linked is None:
            program = Program(CallInfo("calibration"), key, 2)
            linked = link(program, self.backend.group.memory.size, codes.C_TABLES, _kernel, _room)
            self._linked[key] = linked
        channel, other = self.backend.group.channel.address, x if y is None else y
        table = np.array([plain.address(x), plain.address(other)], np.int64)
        words = channel, linked.address, plain.address(table)
        start = time.perf_counter()
        while (answer := entry_points.run(*words)) == codes.NEW_SITE:
            call_sites.learn()  # this line calls the engine for the first time
        while answer == codes.BLOCKED:  # a peer has lost its core for a while
            answer = entry_points.drive(channel, entry_points.SLICE_NS)
        taken = time.perf_counter() - start
        assert answer == codes.DONE, answer
        return taken


def _kernel(kernel: Kernel) -> int:
    return kernel_address(kernel.kind, DType.FLOAT32)


def _room(nbytes: int) -> Bytes:
    return np.zeros(nbytes, np.uint8)


def repeated(once: Callable[[], float], count: int) -> float:
    """Return the typical of `count` times; all ranks must pass the same count."""
    return typical([once() for _ in range(count)])


def often(nbytes: int) -> int:
    """Return how often to repeat a program that moves `nbytes`."""
    return max(5, min(48, (16 << 20) // max(nbytes, 1)))
