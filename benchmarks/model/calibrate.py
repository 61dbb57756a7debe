"""Measures this machine: the cost model's constants, in turns with collectives."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle, islice
from typing import Any

import numpy as np

from benchmarks.model.collective_programs import MAKERS
from benchmarks.model.measurements import Round, Sample, TimedCall, medians
from benchmarks.model.memory_rates import handshakes, rates
from benchmarks.model.program_timer import ProgramTimer, often, repeated
from benchmarks.model.wire_rates import latencies, streams
from nc10d.arrays.dtypes import DType
from nc10d.backend.protocol import BackendSetup
from nc10d.backend.cpu.backend import CpuBackend, make
from nc10d.backend.cpu.engine.cpu_policy import own_thresholds
from nc10d.backend.registry import register_backend
from nc10d.bench.workloads import COLLECTIVES
from nc10d.group.new_group import new_group
from nc10d.group.process_group import ProcessGroup
from nc10d.testing.ranks import Ranks

REACHES = tuple(1 << power for power in (9, 11, 13, 15, 17, 18, 19, 20, 21, 22, 23, 24, 25))
"""Sizes of arrays, in bytes, at which rates are measured: 512 bytes to 32 MiB. They are closer from
128 KiB on, where caches end and copies begin to bypass them."""
STREAMED = REACHES[2:]
"""Sizes at which bytes between hosts are measured; smaller transfers show only their latency."""
APART = "bench-apart"
LIMIT = 900.0
"""Seconds for all rounds together."""


def survey_here(cells: Sequence[TimedCall], rounds: int, *, far: bool) -> list[Round]:
    """Measure constants and calls on two processes of this machine; return each round.

    Blocks for about two seconds a round. A call's time is that of the slower rank.
    """
    with Ranks(2, "processes", timeout=LIMIT) as ranks:
        both = ranks.run(survey, [cells] * 2, [rounds] * 2, [far] * 2)
    return [
        Round(
            medians([first.sample, second.sample]),
            {cell: max(first.times[cell], second.times[cell]) for cell in cells},
            own_thresholds(),
        )
        for first, second in zip(*both, strict=True)
    ]


def survey(group: ProcessGroup, cells: Sequence[TimedCall], rounds: int, far: bool) -> list[Round]:
    """Measure constants and calls in turns, on each of two ranks; return each round.

    Both ranks call this; with `far` the network is measured, too. Everything of a size is measured
    together, because a virtual machine's cores may be moved from a second to the next.
    """
    timer = ProgramTimer(group)
    away: Any = None
    far_bench: ProgramTimer | None = None
    alone: Any = [new_group([rank]) for rank in range(group.size)][group.rank]
    if far:
        register_backend(APART, apart)
        away = new_group(backend=APART)
        far_bench = ProgramTimer(away)
    pin(group.rank)
    found: list[Round] = []
    for _ in range(rounds):
        sample = {**handshakes(timer), **calls(alone)}
        if far_bench is not None:
            sample.update(latencies(far_bench))
        times: dict[TimedCall, float] = {}
        for reach, beside in by_reach(cells, REACHES):
            sample.update(rates(timer, reach))
            if far_bench is not None and reach in STREAMED:
                sample.update(streams(far_bench, reach))
            for cell in beside:
                where: Any = away if cell.far else group
                times[cell] = call_seconds(where, cell.op, cell.nbytes, often(cell.nbytes))
        found.append(Round(sample, times))
    return found


def by_reach(
    cells: Sequence[TimedCall], reaches: Sequence[int]
) -> Iterator[tuple[int, list[TimedCall]]]:
    """Yield each reach with the calls to measure beside it; the last with all larger calls."""
    low = -1.0
    for reach, high in zip(reaches, [*reaches[:-1], math.inf], strict=True):
        yield reach, [cell for cell in cells if low < cell.nbytes <= high]
        low = high


def calls(alone: ProcessGroup) -> Sample:
    """Time each collective in a group of this rank alone, which leaves only the time in Python."""
    return {(f"call {op}", 0): call_seconds(alone, op, 8, 100) for op in MAKERS}


def call_seconds(group: ProcessGroup, op: str, nbytes: int, count: int) -> float:
    """Return the typical seconds of a collective over `count` rows of calls."""
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

    The root of a broadcast changes from call to call. A constant root would run ahead of the other
    ranks, and a stream would be timed.
    """
    if op != "broadcast":
        return [COLLECTIVES[op](group, nbytes, DType.FLOAT32).call]
    x = np.ones(nbytes // 4, np.float32)
    return [partial(group.broadcast, x, root) for root in range(group.size)]


def pin(rank: int) -> None:
    """Bind this rank to a core, if there are enough: two ranks on a core share its cache."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > rank:
        os.sched_setaffinity(0, {cores[rank]})


def apart(setup: BackendSetup) -> CpuBackend:
    """Make the backend of a rank that claims to be on a separate host."""
    return make(setup, f"host {setup.rank}")
