"""Measures the cost model's constants and calls on separate hosts: namespaces with a rank each.

`survey_hosts` starts the ranks; each of them runs `rows`.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.libraries.namespaces import run_on_hosts, separate_hosts
from benchmarks.libraries.nc10d import Nc10d
from benchmarks.model.calibrate import (
    LIMIT,
    STREAMED,
    by_reach,
    call_seconds,
    calls,
    pin,
    survey_here,
)
from benchmarks.model.measurements import Round, Sample, TimedCall
from benchmarks.model.program_timer import ProgramTimer, often
from benchmarks.model.wire_rates import latencies, streams
from nc10d.backend.cpu.engine.cpu_policy import cores
from nc10d.group.new_group import new_group

SAMPLE, CELL = "sample", "cell"
"""Kinds of rows: a constant, or a collective's time."""


def survey_hosts(cells: Sequence[TimedCall], hosts: int, rounds: int) -> list[Round]:
    """Measure constants and calls in turns; return each round.

    Memory is measured with two processes on this host; Python and the network on the hosts. Blocks
    for about ten seconds a round. UnsupportedPlatform where hosts can't be made.
    """
    jobs = [(cell.op, cell.nbytes) for cell in cells]
    found = []
    with separate_hosts(hosts) as net:
        for _ in range(rounds):
            (near,) = survey_here((), 1, far=False)
            found_rows = run_on_hosts(net, 1, "nc10d", __name__, [jobs], LIMIT)
            seconds = {tuple(key): value for *key, value in found_rows}
            away: Sample = {
                (name, number): value
                for (kind, name, number), value in seconds.items()
                if kind == SAMPLE
            }
            times = {cell: seconds[CELL, cell.op, cell.nbytes] for cell in cells}
            # The two processes had a core each; all ranks together may have fewer.
            oversubscription = max(1.0, hosts / cores())
            inside = {key: oversubscription * value for key, value in near.sample.items()}
            # Traffic between hosts is work for the same cores, whichever rank sends.
            shared = {
                ("shared", reach): value / hosts
                for (name, reach), value in away.items()
                if name == "stream" and oversubscription > 1
            }
            found.append(Round({**inside, **away, **shared}, times))
    return found


def rows(library: Nc10d, jobs: Sequence[tuple[str, int]]) -> list[list[object]]:
    """Measure on this rank; return rows of [kind, name, number, seconds], the same on all ranks.

    Constants are medians over ranks, times those of the slowest rank.
    """
    group = library.dist.get_default_group()
    alone: Any = [new_group([rank]) for rank in range(group.size)][group.rank]
    pin(group.rank)
    timer = ProgramTimer(group)
    sample = {**calls(alone), **latencies(timer)}
    times: dict[TimedCall, float] = {}
    for reach, beside in by_reach([TimedCall(*job) for job in jobs], STREAMED):
        sample.update(streams(timer, reach))
        for cell in beside:
            times[cell] = call_seconds(group, cell.op, cell.nbytes, often(cell.nbytes))
    own = {(SAMPLE, *key): seconds for key, seconds in sample.items()}
    own |= {(CELL, cell.op, cell.nbytes): seconds for cell, seconds in times.items()}
    every = np.zeros((group.size, len(own)))
    group.all_gather_into_tensor(every, np.array([*own.values()]))
    columns = zip(own, every.T.tolist(), strict=True)
    return [[*key, _of_all(key[0], seen)] for key, seen in columns]


def _of_all(kind: str, seen: Sequence[float]) -> float:
    return max(seen) if kind == CELL else statistics.median(seen)
