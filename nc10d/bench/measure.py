"""Times one collective of one size on every rank, and counts what came out wrong.

algbw is the larger buffer's bytes over the time; busbw corrects it by what the collective must
move, so that it can be held against the speed of the memory (the factors are nccl-tests').
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from nc10d.arrays.dtypes import DType
from nc10d.bench.workloads import COLLECTIVES, Call
from nc10d.group.process_group import ProcessGroup


@dataclass(frozen=True, slots=True)
class BenchJob:
    """One row: which collective, how large, of what, how often.

    A round is `iterations` calls; there are `repeats` rounds.
    """

    collective: str
    nbytes: int
    dtype: DType
    iterations: int
    repeats: int


@dataclass(frozen=True, slots=True)
class Row:
    """One measured row; `seconds` is the median over rounds of the slowest rank's mean.

    `count` elements were moved, which can be a few more or less than the job's bytes; `wrong` is
    over all ranks.
    """

    job: BenchJob
    count: int
    op: str
    seconds: float
    wrong: int
    ranks: int

    @property
    def nbytes(self) -> int:
        """Bytes of the larger buffer."""
        return self.count * self.job.dtype.itemsize

    @property
    def algbw(self) -> float:
        """GB/s as the caller sees them."""
        return self.nbytes / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def busbw(self) -> float:
        """GB/s as the memory (or the wire) sees them."""
        return self.algbw * FACTORS[self.job.collective](self.ranks)


FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "reduce": lambda n: 1.0,
    "broadcast": lambda n: 1.0,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "gather": lambda n: (n - 1) / n,
    "scatter": lambda n: (n - 1) / n,
    "send_recv": lambda n: 1.0,
    "barrier": lambda n: 0.0,
}


def measure(group: ProcessGroup, job: BenchJob) -> Row:
    """Run one job on this rank; every rank returns the same row. Blocks for all its rounds.

    Results are checked before the rounds and after them.
    """
    case = COLLECTIVES[job.collective](group, job.nbytes, job.dtype)
    case.reset()
    case.call()
    wrong = case.wrong()
    means = [_mean(group, case.call, job.iterations) for _ in range(job.repeats)]
    group.barrier()
    case.reset()
    case.call()
    wrong += case.wrong()
    everyones = _told(group, (wrong, means))
    slowest = [max(times) for times in zip(*(found for _, found in everyones), strict=True)]
    there_and_back = 2 if job.collective == "send_recv" else 1
    seconds = statistics.median(slowest) / there_and_back
    return Row(job, case.count, case.op, seconds, sum(w for w, _ in everyones), group.size)


def _mean(group: ProcessGroup, call: Call, iterations: int) -> float:
    """Return the mean seconds of a call, of this many, begun by all ranks together."""
    group.barrier()
    start = time.perf_counter()
    for _ in range(iterations):
        call()
    return (time.perf_counter() - start) / iterations


def _told(group: ProcessGroup, mine: tuple[int, list[float]]) -> list[tuple[int, list[float]]]:
    """Return what every rank found, by way of the store: collectives are what is on trial."""
    store, rank = group.store, group.rank
    number = store.add(f"bench/rows/{rank}", 1)
    store.set(f"bench/{number}/{rank}", json.dumps(mine).encode())
    keys = [f"bench/{number}/{other}" for other in range(group.size)]
    return [json.loads(text) for text in store.multi_get(keys)]
