"""One library's ways to reduce many arrays, on each rank of a job.

`python -m nc10d.bench.batches LIBRARY JOBS BUDGET OUT`: JOBS is a JSON list of bytes an array; rank
0 writes a JSON list of [way, nbytes, seconds, wrong] to OUT. A way is bound to its arrays once, and
what is timed is all of its Python: the block or the loop, and the copies into a flat buffer and
back where it makes them.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from nc10d.bench.libraries import LIBRARIES, Array, Call, Library
from nc10d.bench.peers import barrier_of, pattern, slowest, timed

COUNT = 64
FRESH = 15
"""How often a block of arrays that were never seen before is timed."""
Way = Callable[[Any, Sequence[Array]], Call]


def one_by_one(library: Any, arrays: Sequence[Array]) -> Call:
    """Call after call."""
    return in_order([library.calls(x, x)["all_reduce"] for x in arrays])


def in_order(calls: Sequence[Call]) -> Call:
    """Return a call that makes these."""

    def run() -> None:
        for call in calls:
            call()

    return run


def block(library: Any, arrays: Sequence[Any]) -> Call:
    """One coalescing block: nc10d's, or torch's with tensors."""
    dist = library.dist
    manager = getattr(dist, "coalescing_manager", None) or dist._coalescing_manager

    def run() -> None:
        with manager():
            for x in arrays:
                dist.all_reduce(x)

    return run


def plan(library: Any, arrays: Sequence[Array]) -> Call:
    """A block that was kept."""
    with library.dist.coalescing_manager() as batch:
        for x in arrays:
            library.dist.all_reduce(x)
    launch: Call = batch.plan().launch
    return launch


def all_at_once(library: Any, arrays: Sequence[Any]) -> Call:
    """Every call asynchronous, then wait for each: c10d's calls."""

    def run() -> None:
        for work in [library.dist.all_reduce(x, async_op=True) for x in arrays]:
            work.wait()

    return run


def mpi_all_at_once(library: Any, arrays: Sequence[Array]) -> Call:
    """Every call nonblocking, then wait for all."""
    mpi, comm = library.mpi, library.comm
    starts = [partial(comm.Iallreduce, mpi.IN_PLACE, [x, mpi.FLOAT]) for x in arrays]

    def run() -> None:
        mpi.Request.Waitall([start() for start in starts])

    return run


def flat(library: Any, arrays: Sequence[Array]) -> Call:
    """Copy into one flat buffer, reduce it, copy back: by NumPy."""
    whole = np.empty(sum(x.size for x in arrays), np.float32)
    parts = np.split(whole, len(arrays))
    reduce = library.calls(whole, whole)["all_reduce"]

    def run() -> None:
        np.concatenate(arrays, out=whole)
        reduce()
        for x, part in zip(arrays, parts, strict=True):
            np.copyto(x, part)

    return run


def torch_flat(library: Any, tensors: Sequence[Any]) -> Call:
    """Copy into one flat tensor, reduce it, copy back: by torch's calls for lists."""
    torch, dist = library.torch, library.dist
    whole = torch.empty(sum(x.numel() for x in tensors))
    parts = list(whole.split([x.numel() for x in tensors]))

    def run() -> None:
        torch.cat(tensors, out=whole)
        dist.all_reduce(whole)
        torch._foreach_copy_(tensors, parts)

    return run


def on_tensors(way: Way) -> Way:
    """Return a way that is given tensors, made once."""
    return lambda library, arrays: way(library, library.tensors(arrays))


MPI_WAYS: dict[str, Way] = {
    "one by one": one_by_one,
    "nonblocking": mpi_all_at_once,
    "flat, copied": flat,
}
WAYS: dict[str, dict[str, Way]] = {
    "nc10d": {"block, new arrays": block, "block, again": block, "plan": plan},
    "gloo": {
        "one by one": one_by_one,
        "nonblocking": on_tensors(all_at_once),
        "manager": on_tensors(block),
        "flat, copied": on_tensors(torch_flat),
    },
    "mpich": MPI_WAYS,
    "openmpi": MPI_WAYS,
}


def fresh_arrays(library: Library, nbytes: int) -> list[Array]:
    """Return new arrays with what this rank contributes."""
    return [pattern(library.rank + i, nbytes // 4) for i in range(COUNT)]


def mistakes(library: Library, way: Way, nbytes: int) -> int:
    """Run a way once; return how many elements came out wrong."""
    arrays = fresh_arrays(library, nbytes)
    call = way(library, arrays)
    for i, x in enumerate(arrays):  # a plan's making has reduced them once
        x[:] = pattern(library.rank + i, x.size)
    call()
    total = [sum(pattern(r + i, nbytes // 4) for r in range(library.size)) for i in range(COUNT)]
    return sum(int(np.count_nonzero(x != want)) for x, want in zip(arrays, total, strict=True))


def measure(library: Library, name: str, way: Way, nbytes: int, budget: float) -> float:
    """Return the seconds that a way takes for all arrays, on the slowest rank."""
    if name == "block, new arrays":
        return slowest(library, statistics.median(_fresh(library, way, nbytes)))
    return timed(library, way(library, fresh_arrays(library, nbytes)), budget)


def _fresh(library: Library, way: Way, nbytes: int) -> list[float]:
    return [_once(library, way(library, fresh_arrays(library, nbytes))) for _ in range(FRESH)]


def _once(library: Library, call: Call) -> float:
    barrier_of(library)()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def main() -> None:
    """Measure every way on this rank; rank 0 writes what came out."""
    name, jobs, budget, out = sys.argv[1:5]
    library = LIBRARIES[name]()
    rows = []
    for nbytes in json.loads(jobs):
        for title, way in WAYS[name].items():
            wrong = slowest(library, mistakes(library, way, nbytes))
            seconds = measure(library, title, way, nbytes, float(budget))
            rows.append([title, nbytes, seconds, int(wrong)])
    if library.rank == 0:
        Path(out).write_text(json.dumps(rows))
    library.close()


if __name__ == "__main__":
    main()
