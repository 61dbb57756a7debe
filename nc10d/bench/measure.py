"""Times a collective with a given size on every rank, and counts wrong elements.

algbw is the larger buffer's bytes over the time. busbw multiplies it by nccl-tests' factor for the
bytes that the collective must move, so that it can be compared with the memory's speed.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from typing import Any

from nc10d.arrays.dtypes import DType
from nc10d.base.deadline import monotonic
from nc10d.base.stored import read_json
from nc10d.bench.workloads import COLLECTIVES, FACTORS, Call
from nc10d.group.process_group import ProcessGroup


@dataclass(frozen=True, slots=True)
class BenchJob:
    """A row to measure: a collective, size and type, in `repeats` rounds of `iterations` calls."""

    collective: str
    nbytes: int
    dtype: DType
    iterations: int
    repeats: int


@dataclass(frozen=True, slots=True)
class Row:
    """A measured row; `seconds`: median of the slowest rank's means; `wrong` over all ranks."""

    job: BenchJob
    count: int
    op: str
    seconds: float
    wrong: int
    ranks: int

    @property
    def nbytes(self) -> int:
        """The larger buffer's bytes."""
        return self.count * self.job.dtype.itemsize

    @property
    def algbw(self) -> float:
        """GB/s for the caller's data."""
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def busbw(self) -> float:
        """GB/s in the memory (or the network)."""
        return self.algbw * FACTORS[self.job.collective](self.ranks)


def measure(group: ProcessGroup, job: BenchJob) -> Row:
    """Run a job on this rank; every rank returns the same row. Blocks for all rounds."""
    # Results are checked before the rounds and after them.
    workload = COLLECTIVES[job.collective](group, job.nbytes, job.dtype)
    workload.reset()
    workload.call()
    wrong = workload.wrong()
    means = [_mean(group, workload.call, job.iterations) for _ in range(job.repeats)]
    group.barrier()
    workload.reset()
    workload.call()
    wrong += workload.wrong()
    results = _exchange(group, (wrong, means))
    slowest = [max(times) for times in zip(*(means for _, means in results), strict=True)]
    there_and_back = 2 if job.collective == "send_recv" else 1
    seconds = statistics.median(slowest) / there_and_back
    wrong = sum(wrong for wrong, _ in results)
    return Row(job, workload.count, workload.op, seconds, wrong, group.size)


def _mean(group: ProcessGroup, call: Call, iterations: int) -> float:
    """Return the mean seconds for `iterations` calls, which all ranks begin together."""
    group.barrier()
    start = monotonic()
    for _ in range(iterations):
        call()
    return (monotonic() - start) / iterations


def _exchange(
    group: ProcessGroup, result: tuple[int, list[float]]
) -> list[tuple[int, list[float]]]:
    """Return every rank's result by the store, since the collectives may be wrong."""
    store, rank = group.store, group.rank
    number = store.add(f"bench/rows/{rank}", 1)
    store.set(f"bench/{number}/{rank}", json.dumps(result).encode())
    keys = [f"bench/{number}/{other}" for other in range(group.size)]
    texts = store.multi_get(keys)
    return [read_json(key, text, _row) for key, text in zip(keys, texts, strict=True)]


def _row(value: Any) -> tuple[int, list[float]]:
    wrong, seconds = value
    return int(wrong), [float(one) for one in seconds]
