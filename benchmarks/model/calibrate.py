"""Measures this machine: constants of the cost model, and collectives in turns with them."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle, islice
from typing import Any

import numpy as np

from benchmarks.model.cases import MAKERS
from benchmarks.model.rates import handshakes, rates
from benchmarks.model.runner import Bench, often, repeated
from benchmarks.model.samples import Cell, Round, Sample, medians
from benchmarks.model.wire_rates import latencies, streams
from nc10d.arrays.dtypes import DType
from nc10d.backend.base import BackendSetup
from nc10d.backend.cpu.backend import CpuBackend, make
from nc10d.backend.cpu.engine.cpu_policy import own_boards
from nc10d.backend.registry import register_backend
from nc10d.bench.workloads import COLLECTIVES
from nc10d.group.new_group import new_group
from nc10d.group.process_group import ProcessGroup
from nc10d.testing.ranks import Ranks

REACHES = tuple(1 << power for power in (9, 11, 13, 15, 17, 18, 19, 20, 21, 22, 23, 24, 25))
"""Sizes of arrays, in bytes, at which rates are measured: 512 bytes to 32 MiB. Closer from 128 KiB
on, where caches end, and copies begin to go past them."""
STREAMED = REACHES[2:]
"""Those at which bytes between hosts are measured: fewer are lost in what a transfer costs."""
APART = "bench-apart"
LIMIT = 900.0
"""Seconds for all rounds together."""


def survey_here(cells: Sequence[Cell], rounds: int, *, far: bool) -> list[Round]:
    """Measure constants and cells on two processes of this machine; return each round.

    Blocks for some two seconds a round. A cell's time is that of the slower rank.
    """
    with Ranks(2, "processes", timeout=LIMIT) as ranks:
        both = ranks.run(survey, [cells] * 2, [rounds] * 2, [far] * 2)
    return [
        Round(
            medians([one.sample, other.sample]),
            {cell: max(one.times[cell], other.times[cell]) for cell in cells},
            own_boards(),
        )
        for one, other in zip(*both, strict=True)
    ]


def survey(group: ProcessGroup, cells: Sequence[Cell], rounds: int, far: bool) -> list[Round]:
    """Measure constants and cells in turns, on one of two ranks; return each round's.

    Both ranks call; `far` says whether to look at the network too. What has to do with a size is
    measured together: a virtual machine's cores may move apart from one second to the next.
    """
    bench = Bench(group)
    away: Any = None
    far_bench: Bench | None = None
    alone: Any = [new_group([rank]) for rank in range(group.size)][group.rank]
    if far:
        register_backend(APART, apart)
        away = new_group(backend=APART)
        far_bench = Bench(away)
    pin(group.rank)
    found: list[Round] = []
    for _ in range(rounds):
        sample = {**handshakes(bench), **calls(alone)}
        if far_bench is not None:
            sample.update(latencies(far_bench))
        times: dict[Cell, float] = {}
        for reach, beside in by_reach(cells, REACHES):
            sample.update(rates(bench, reach))
            if far_bench is not None and reach in STREAMED:
                sample.update(streams(far_bench, reach))
            for cell in beside:
                where: Any = away if cell.far else group
                times[cell] = call_seconds(where, cell.op, cell.nbytes, often(cell.nbytes))
        found.append(Round(sample, times))
    return found


def by_reach(cells: Sequence[Cell], reaches: Sequence[int]) -> Iterator[tuple[int, list[Cell]]]:
    """Yield each reach with the cells to measure beside it; the last one with all that are left."""
    low = -1.0
    for reach, high in zip(reaches, [*reaches[:-1], math.inf], strict=True):
        yield reach, [cell for cell in cells if low < cell.nbytes <= high]
        low = high


def calls(alone: ProcessGroup) -> Sample:
    """Time each collective in a group of this rank alone: only the way through Python is left."""
    return {(f"call {op}", 0): call_seconds(alone, op, 8, 100) for op in MAKERS}


def call_seconds(group: ProcessGroup, op: str, nbytes: int, count: int) -> float:
    """Return the typical seconds of a collective, called some times in a row, `count` times."""
    turns = _turns(group, op, nbytes)
    many = 8 if nbytes < 1 << 16 else 4

    def once() -> float:
        start = time.perf_counter()
        for call in islice(cycle(turns), many):
            call()
        return (time.perf_counter() - start) / many

    group.barrier()
    return repeated(once, count)


def _turns(group: ProcessGroup, op: str, nbytes: int) -> list[Callable[[], object]]:
    """Return calls to be made in turns.

    Everyone in turn is a broadcast's root: one that always is would run ahead of the others, and a
    stream would be timed.
    """
    if op != "broadcast":
        return [COLLECTIVES[op](group, nbytes, DType.FLOAT32).call]
    x = np.ones(nbytes // 4, np.float32)
    return [partial(group.broadcast, x, root) for root in range(group.size)]


def pin(rank: int) -> None:
    """Keep this rank on a core of its own, if there are enough: two on one core share its cache."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > rank:
        os.sched_setaffinity(0, {cores[rank]})


def apart(setup: BackendSetup) -> CpuBackend:
    """Make the backend of a rank that says it is on a host of its own."""
    return make(setup, f"host {setup.rank}")
