"""Measures the ways of a library to reduce 64 arrays, on a rank of its job.

`wall` is from the first call to the end of the wait, on the slowest rank. `cpu` is the CPU time of
all threads of a process, averaged over ranks. `issue` ends when the last call has returned, before
any wait. A way is bound to its arrays once. The timed part includes all of its Python: the block or
the loop, and the copies into a flat array and back where it makes them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.compare.call_times import barrier_of, pattern, slowest
from benchmarks.libraries.base import Array, Library

Wait = Callable[[], object]
Issue = Callable[[], Wait]
Way = Callable[[Any, Sequence[Any]], Issue]
Cost = tuple[float, float, float]
"""Wall, CPU and issue, in seconds."""
COUNT = 64
MOST = 200
PERIOD = 7
"""`pattern` repeats after so many ranks."""


def separately(library: Any, arrays: Sequence[Any]) -> Issue:
    """Make asynchronous calls; then wait for each."""

    def issue() -> Wait:
        works = [library.dist.all_reduce(x, async_op=True) for x in arrays]
        return lambda: [work.wait() for work in works]

    return issue


def blocking(library: Any, arrays: Sequence[Array]) -> Issue:
    """Make blocking calls."""
    calls = [library.bind(x, x)["all_reduce"] for x in arrays]

    def issue() -> Wait:
        for call in calls:
            call()
        return _nothing

    return issue


def plan(library: Any, arrays: Sequence[Array]) -> Issue:
    """Launch a prepared block; preparing it reduces the arrays, too."""
    with library.dist.coalescing_manager() as batch:
        for x in arrays:
            library.dist.all_reduce(x)
    launch = batch.plan().launch

    def issue() -> Wait:
        launch()
        return _nothing

    return issue


def _nothing() -> None:
    """Wait for completed calls."""


def block(library: Any, arrays: Sequence[Any]) -> Issue:
    """Use a coalescing block: nc10d's, or torch's with tensors."""
    dist = library.dist
    manager = getattr(dist, "coalescing_manager", None) or dist._coalescing_manager

    def issue() -> Wait:
        with manager(async_ops=True) as batch:
            for x in arrays:
                dist.all_reduce(x)
        wait: Wait = batch.wait
        return wait

    return issue


def flattened(library: Any, arrays: Sequence[Array]) -> Issue:
    """Reduce a flat array, with the copies into it and back by nc10d's packing."""
    from nc10d.reducer.packing import copy_all

    flat = np.empty(sum(x.size for x in arrays), np.float32)
    parts = np.split(flat, np.cumsum([x.size for x in arrays[:-1]]))
    back = [(x.ctypes.data, y.ctypes.data, x.nbytes) for x, y in zip(arrays, parts, strict=True)]
    into = [(y, x, nbytes) for x, y, nbytes in back]

    def issue(_kept: object = arrays) -> Wait:  # the copies have addresses only
        copy_all(into)
        work = library.dist.all_reduce(flat, async_op=True)

        def wait() -> None:
            work.wait()
            copy_all(back)

        return wait

    return issue


def torch_flattened(library: Any, tensors: Sequence[Any]) -> Issue:
    """Reduce a flat tensor, with the copies into it and back by torch's calls for lists."""
    torch, flat = library.torch, library.torch.empty(sum(x.numel() for x in tensors))
    parts = list(flat.split([x.numel() for x in tensors]))

    def issue() -> Wait:
        torch._foreach_copy_(parts, tensors)
        work = library.dist.all_reduce(flat, async_op=True)
        return lambda: (work.wait(), torch._foreach_copy_(tensors, parts))

    return issue


def mpi_separately(library: Any, arrays: Sequence[Array]) -> Issue:
    """Make nonblocking calls; then wait for all."""
    mpi, comm = library.mpi, library.comm

    def issue() -> Wait:
        requests = [comm.Iallreduce(mpi.IN_PLACE, [x, mpi.FLOAT]) for x in arrays]
        return lambda: mpi.Request.Waitall(requests)

    return issue


def mpi_flattened(library: Any, arrays: Sequence[Array]) -> Issue:
    """Reduce a flat array, with the copies into it and back by NumPy."""
    mpi, comm = library.mpi, library.comm
    flat = np.empty(sum(x.size for x in arrays), np.float32)
    parts = np.split(flat, len(arrays))

    def issue() -> Wait:
        np.concatenate(arrays, out=flat)
        request = comm.Iallreduce(mpi.IN_PLACE, [flat, mpi.FLOAT])
        return lambda: (request.Wait(), list(map(np.copyto, arrays, parts)))

    return issue


def on_tensors(way: Way) -> Way:
    """Return a way that passes tensors over the arrays' memory."""
    return lambda library, arrays: way(library, list(map(library.tensor, arrays)))


BLOCK, FRESH, PLAN = "block", "block, new arrays", "plan"
ONE_BY_ONE, BLOCKING, FLAT = "one by one", "one by one, blocking", "flattened"
NAMES = [BLOCK, FRESH, PLAN, ONE_BY_ONE, BLOCKING, FLAT]
"""The ways that a library may have. FRESH is BLOCK with new arrays every time."""
MPI_WAYS: dict[str, Way] = {ONE_BY_ONE: mpi_separately, BLOCKING: blocking, FLAT: mpi_flattened}
WAYS: dict[str, dict[str, Way]] = {
    "nc10d": {
        BLOCK: block,
        FRESH: block,
        PLAN: plan,
        ONE_BY_ONE: separately,
        BLOCKING: blocking,
        FLAT: flattened,
    },
    "gloo": {
        BLOCK: on_tensors(block),
        ONE_BY_ONE: on_tensors(separately),
        BLOCKING: blocking,
        FLAT: on_tensors(torch_flattened),
    },
    "mpich": MPI_WAYS,
    "openmpi": MPI_WAYS,
}


def mistakes(library: Library, way: Way, nbytes: int) -> int:
    """Run a way once; return the number of wrong elements."""
    kinds = [pattern(kind, nbytes // 4) for kind in range(PERIOD)]
    arrays = [kinds[(library.rank + i) % PERIOD].copy() for i in range(COUNT)]
    issue = way(library, arrays)
    for i, x in enumerate(arrays):  # preparing a plan has reduced them once
        x[:] = kinds[(library.rank + i) % PERIOD]
    issue()()
    wrong = 0
    for i, x in enumerate(arrays):
        for rank in range(library.size):
            x -= kinds[(rank + i) % PERIOD]
        wrong += int(np.count_nonzero(x))
    return wrong


def cost(library: Library, way: Way, nbytes: int, budget: float, fresh: bool = False) -> Cost:
    """Return a way's cost: the median over repeats; over ranks see the module.

    With `fresh` every repeat has new arrays. Blocks for all repeats.
    """

    def bound() -> Issue:
        return way(library, [np.zeros(nbytes // 4, np.float32) for _ in range(COUNT)])

    same = bound()
    probe = slowest(library, once(library, same)[0])
    calls = int(min(MOST, max(3, budget / probe)))
    repeats = (once(library, bound() if fresh else same) for _ in range(calls))
    wall, cpu, issued = zip(*repeats, strict=True)
    total = np.array([statistics.fmean(cpu)], np.float32)
    library.bind(total, total)["all_reduce"]()
    mean = float(total[0]) / library.size
    return (
        slowest(library, statistics.median(wall)),
        mean,
        slowest(library, statistics.median(issued)),
    )


def once(library: Library, issue: Issue) -> Cost:
    """Return the cost of a single repeat on this rank."""
    barrier_of(library)()
    start, spent = time.perf_counter(), time.process_time()
    wait = issue()
    issued = time.perf_counter()
    wait()
    return time.perf_counter() - start, time.process_time() - spent, issued - start


def rows(library: Library, sizes: Sequence[int], budget: float) -> list[list[object]]:
    """Measure every way for each size; return [way, nbytes, wall, cpu, issue, wrong] of each.

    Times are seconds; `budget` is the seconds for a way's repeats. Blocks for all of them.
    """
    found: list[list[object]] = []
    for nbytes in sizes:
        for title, way in WAYS[library.name].items():
            wrong = slowest(library, mistakes(library, way, nbytes))
            costs = cost(library, way, nbytes, budget, title == FRESH)
            found.append([title, nbytes, *costs, int(wrong)])
    return found
