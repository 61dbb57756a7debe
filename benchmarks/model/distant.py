"""The cost model held against hosts of their own: network namespaces, one rank on each.

`survey_apart` measures; `python -m benchmarks.model.distant CELLS OUT` is a rank of it. CELLS is a
JSON
list of [collective, nbytes]; rank 0 writes rows of [kind, name, number, seconds] to the file OUT.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import nc10d as dist
from benchmarks.compare.apart import hosts_of_their_own, run_apart
from benchmarks.model.calibrate import (
    LIMIT,
    STREAMED,
    by_reach,
    call_seconds,
    calls,
    pin,
    survey_here,
)
from benchmarks.model.runner import Bench, often
from benchmarks.model.samples import Cell, Round, Sample
from benchmarks.model.wire_rates import latencies, streams
from nc10d.backend.cpu.engine.cpu_policy import cores
from nc10d.group.new_group import new_group

SAMPLE, CELL = "sample", "cell"


def survey_apart(cells: Sequence[Cell], hosts: int, rounds: int) -> list[Round]:
    """Measure constants and cells in turns; return each round.

    What a rank does in its own memory is measured on two processes of one host, calls and the
    network on the hosts. Blocks for some ten seconds a round. UnsupportedPlatform where hosts can't
    be made.
    """
    jobs = json.dumps([(cell.op, cell.nbytes) for cell in cells])
    found = []
    with hosts_of_their_own(hosts) as net:
        for _ in range(rounds):
            (near,) = survey_here((), 1, far=False)
            rows = run_apart(net, 1, ["benchmarks.model.distant", jobs], LIMIT)
            seconds = {tuple(key): value for *key, value in rows}
            away: Sample = {
                (name, number): value
                for (kind, name, number), value in seconds.items()
                if kind == SAMPLE
            }
            times = {cell: seconds[CELL, cell.op, cell.nbytes] for cell in cells}
            # Those two had a core each; all ranks together may have fewer.
            crowd = max(1.0, hosts / cores())
            inside = {key: crowd * value for key, value in near.sample.items()}
            # And what goes between hosts is work for those cores, whoever sends it.
            shared = {
                ("shared", reach): value / hosts
                for (name, reach), value in away.items()
                if name == "stream" and crowd > 1
            }
            found.append(Round({**inside, **away, **shared}, times))
    return found


def main() -> None:
    """Measure on this rank; rank 0 writes medians of constants and the slowest rank's times."""
    jobs, out = sys.argv[1:3]
    dist.init_process_group()
    group = dist.get_default_group()
    alone: Any = [new_group([rank]) for rank in range(group.size)][group.rank]
    pin(group.rank)
    bench = Bench(group)
    sample = {**calls(alone), **latencies(bench)}
    times: dict[Cell, float] = {}
    for reach, beside in by_reach([Cell(*job) for job in json.loads(jobs)], STREAMED):
        sample.update(streams(bench, reach))
        for cell in beside:
            times[cell] = call_seconds(group, cell.op, cell.nbytes, often(cell.nbytes))
    mine = {(SAMPLE, *key): seconds for key, seconds in sample.items()}
    mine |= {(CELL, cell.op, cell.nbytes): seconds for cell, seconds in times.items()}
    every = np.zeros((group.size, len(mine)))
    group.all_gather_into_tensor(every, np.array([*mine.values()]))
    if group.rank == 0:
        columns = zip(mine, every.T.tolist(), strict=True)
        Path(out).write_text(json.dumps([[*key, _of_all(key[0], seen)] for key, seen in columns]))
    dist.destroy_process_group()


def _of_all(kind: str, seen: Sequence[float]) -> float:
    return max(seen) if kind == CELL else statistics.median(seen)


if __name__ == "__main__":
    main()
