"""Times one collective of one size on every rank, and checks what it computed.

Sizes follow nccl-tests: `nbytes` is the larger buffer of a rank (the whole output of all_gather,
the whole input of reduce_scatter). algbw is nbytes over time; busbw corrects it by what the
collective must move, so that it can be held against the speed of the memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from nc10d.group import ProcessGroup
from nc10d.ops import MAX

Array = np.ndarray[Any, np.dtype[Any]]
Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Job:
    """One row: which collective, how large, of what, how often."""

    collective: str
    nbytes: int
    dtype: str
    iterations: int
    repeats: int


@dataclass(frozen=True, slots=True)
class Row:
    """One measured row; `seconds` is the median over repeats of the slowest rank's mean."""

    job: Job
    count: int
    op: str
    seconds: float
    wrong: int
    ranks: int

    @property
    def algbw(self) -> float:
        """GB/s as the caller sees them."""
        return self.job.nbytes / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def busbw(self) -> float:
        """GB/s as the memory (or the wire) sees them."""
        return self.algbw * FACTORS[self.job.collective](self.ranks)


@dataclass(slots=True)
class Case:
    """A collective ready to run: the call, how to fill its input, how to count mistakes."""

    call: Call
    reset: Call
    wrong: Callable[[], int]
    count: int
    op: str = "none"


def _pattern(rank: int, count: int, dtype: str) -> Array:
    return ((np.arange(count) + 3 * rank) % 7).astype(dtype)


def _differ(x: Array, y: Array) -> int:
    return int(np.count_nonzero(x != y))


def _in_place(group: ProcessGroup, job: Job, run: Callable[[Array], Call], want: Any) -> Case:
    count = max(1, job.nbytes // np.dtype(job.dtype).itemsize)
    x = np.zeros(count, job.dtype)
    mine = _pattern(group.rank, count, job.dtype)
    expected = want([_pattern(r, count, job.dtype) for r in range(group.size)])
    return Case(run(x), lambda: np.copyto(x, mine), lambda: _differ(x, expected), count)


def _total(arrays: list[Array]) -> Array:
    total: Array = np.sum(arrays, axis=0).astype(arrays[0].dtype)
    return total


def all_reduce(group: ProcessGroup, job: Job) -> Case:
    """Sum in place on every rank."""
    case = _in_place(group, job, lambda x: lambda: group.all_reduce(x), _total)
    case.op = "sum"
    return case


def reduce(group: ProcessGroup, job: Job) -> Case:
    """Sum in place on rank 0."""

    def want(arrays: list[Array]) -> Array:
        return _total(arrays) if group.rank == 0 else arrays[group.rank]

    case = _in_place(group, job, lambda x: lambda: group.reduce(x, 0), want)
    case.op = "sum"
    return case


def broadcast(group: ProcessGroup, job: Job) -> Case:
    """Rank 0's array to everyone."""
    return _in_place(group, job, lambda x: lambda: group.broadcast(x, 0), lambda all_: all_[0])


def _chunked(group: ProcessGroup, job: Job) -> tuple[int, list[Array]]:
    count = max(1, job.nbytes // np.dtype(job.dtype).itemsize // group.size)
    return count, [_pattern(r, count * group.size, job.dtype) for r in range(group.size)]


def all_gather(group: ProcessGroup, job: Job) -> Case:
    """Everyone's chunk to everyone."""
    count, arrays = _chunked(group, job)
    out = np.zeros(count * group.size, job.dtype)
    inp = arrays[group.rank][:count].copy()
    want = np.concatenate([a[:count] for a in arrays])
    return Case(
        lambda: group.all_gather_into_tensor(out, inp),
        lambda: out.fill(0),
        lambda: _differ(out, want),
        out.size,
    )


def reduce_scatter(group: ProcessGroup, job: Job) -> Case:
    """Sum of everyone's chunks for me."""
    count, arrays = _chunked(group, job)
    out, inp = np.zeros(count, job.dtype), arrays[group.rank].copy()
    want = _total(arrays)[group.rank * count : (group.rank + 1) * count]
    return Case(
        lambda: group.reduce_scatter_tensor(out, inp),
        lambda: out.fill(0),
        lambda: _differ(out, want),
        inp.size,
        "sum",
    )


def all_to_all(group: ProcessGroup, job: Job) -> Case:
    """A chunk from everyone to everyone."""
    count, arrays = _chunked(group, job)
    inp, out = arrays[group.rank].copy(), np.zeros(count * group.size, job.dtype)
    mine = slice(group.rank * count, (group.rank + 1) * count)
    want = np.concatenate([a[mine] for a in arrays])
    return Case(
        lambda: group.all_to_all_single(out, inp),
        lambda: out.fill(0),
        lambda: _differ(out, want),
        inp.size,
    )


def gather(group: ProcessGroup, job: Job) -> Case:
    """Everyone's chunk to rank 0."""
    count, arrays = _chunked(group, job)
    inp = arrays[group.rank][:count].copy()
    root = group.rank == 0
    outs = [np.zeros(count, job.dtype) for _ in range(group.size)] if root else None

    def wrong() -> int:
        return sum(_differ(o, a[:count]) for o, a in zip(outs or [], arrays, strict=False))

    return Case(lambda: group.gather(inp, outs, 0), lambda: None, wrong, count * group.size)


def scatter(group: ProcessGroup, job: Job) -> Case:
    """A chunk from rank 0 to everyone."""
    count, arrays = _chunked(group, job)
    out = np.zeros(count, job.dtype)
    mine = slice(group.rank * count, (group.rank + 1) * count)
    inps = list(arrays[0].reshape(group.size, count)) if group.rank == 0 else None
    return Case(
        lambda: group.scatter(out, inps, 0),
        lambda: out.fill(0),
        lambda: _differ(out, arrays[0][mine]),
        count * group.size,
    )


def send_recv(group: ProcessGroup, job: Job) -> Case:
    """A ping-pong between neighbours; the time is half of the round trip."""
    count = max(1, job.nbytes // np.dtype(job.dtype).itemsize)
    peer = group.rank ^ 1
    x, y = _pattern(group.rank, count, job.dtype), np.zeros(count, job.dtype)
    want = _pattern(peer, count, job.dtype)

    def call() -> None:
        if peer >= group.size:
            return
        if group.rank < peer:
            group.send(x, peer)
            group.recv(y, peer)
        else:
            group.recv(y, peer)
            group.send(x, peer)

    def wrong() -> int:
        return _differ(y, want) if peer < group.size else 0

    return Case(call, lambda: y.fill(0), wrong, count)


def barrier(group: ProcessGroup, job: Job) -> Case:
    """Nobody leaves before everybody has come."""
    del job
    return Case(lambda: group.barrier(), lambda: None, lambda: 0, 0)


COLLECTIVES: dict[str, Callable[[ProcessGroup, Job], Case]] = {
    "all_reduce": all_reduce,
    "reduce": reduce,
    "broadcast": broadcast,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    "gather": gather,
    "scatter": scatter,
    "send_recv": send_recv,
    "barrier": barrier,
}
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


def measure(group: ProcessGroup, job: Job) -> Row:
    """Run one job on this rank; every rank returns the same row. Blocks for all its rounds."""
    case = COLLECTIVES[job.collective](group, job)
    case.reset()
    case.call()
    wrong = np.array([case.wrong()], np.int64)
    times = np.zeros(job.repeats)
    for repeat in range(job.repeats):
        group.barrier()
        start = time.perf_counter()
        for _ in range(job.iterations):
            case.call()
        times[repeat] = (time.perf_counter() - start) / job.iterations
    group.all_reduce(times, MAX)
    if job.collective == "send_recv":
        times /= 2
    group.barrier()
    case.reset()
    case.call()
    wrong[0] += case.wrong()
    group.all_reduce(wrong)
    seconds = statistics.median(times.tolist())
    return Row(job, case.count, case.op, seconds, int(wrong[0]), group.size)
