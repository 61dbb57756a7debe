"""One library's side of a comparison.

`python -m benchmarks.compare.peers LIBRARY JOBS BUDGET UNTOUCHED OUT` runs on each rank. JOBS is a
JSON
list of [collective, nbytes], BUDGET the seconds that one round of one of them should take; rank 0
writes a JSON list of [collective, nbytes, seconds, wrong] to the file OUT. Unless UNTOUCHED is 1,
each rank writes what a call reads just before the call, as programs do; what that takes alone,
measured in turns with it, is taken off. (That a call has made the next writing slower counts as the
call's.)

All libraries do the same work on the same memory, in the same loop: plain float32 arrays in the
sizes of nccl-tests (`nbytes` is the larger buffer of a rank).
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.compare.libraries import LIBRARIES, Array, Call, Library

ROUNDS = 5
WARM_UP = 10
"""Calls before the first that counts: who loads code when it is first used has done so."""
WHOLE = {"all_reduce", "broadcast", "ping_pong", "exchange"}
"""Collectives whose arrays all have the whole size; in the others a chunk is 1/size of it."""
MESSAGES = {"ping_pong", "exchange"}
IN_PLACE = {"all_reduce", "broadcast"}
Check = Callable[[], int]


def pattern(rank: int, count: int) -> Array:
    """Return what a rank contributes: 0 to 6, other than its neighbour's."""
    return ((np.arange(count) + 3 * rank) % 7).astype(np.float32)


def expected(collective: str, inputs: list[Array], rank: int) -> tuple[Array, Array]:
    """Return what a rank reads, and what it must end with, given every rank's whole input."""
    chunks = [[x] if collective in WHOLE else np.split(x, len(inputs)) for x in inputs]
    x = chunks[rank][0] if collective == "all_gather" else inputs[rank]
    return x, WANTED[collective](chunks, rank)


def _total(arrays: list[Array]) -> Array:
    return np.asarray(np.sum(arrays, axis=0, dtype=np.float32))


WANTED: dict[str, Callable[[list[list[Array]], int], Array]] = {
    "all_reduce": lambda chunks, _: _total([mine[0] for mine in chunks]),
    "all_gather": lambda chunks, _: np.concatenate([mine[0] for mine in chunks]),
    "reduce_scatter": lambda chunks, rank: _total([mine[rank] for mine in chunks]),
    "broadcast": lambda chunks, _: chunks[0][0],
    "all_to_all": lambda chunks, rank: np.concatenate([mine[rank] for mine in chunks]),
    "ping_pong": lambda chunks, rank: chunks[rank ^ 1][0],
    "exchange": lambda chunks, rank: chunks[rank ^ 1][0],
}
"""What a rank must end with, of every rank's chunks."""


def nothing() -> None:
    """Do what a barrier does to arrays."""


def prepare(library: Library, collective: str, nbytes: int) -> tuple[Call, Call, Check]:
    """Return the call to time, what writes the array that it reads, and a check.

    The check runs the call once and counts wrong elements.
    """
    size, rank = library.size, library.rank
    if collective == "barrier":
        return barrier_of(library), nothing, lambda: 0
    if collective in MESSAGES and rank ^ 1 >= size:  # the last of an odd number has no neighbour
        return nothing, nothing, lambda: 0
    count = max(1, nbytes // 4 // (1 if collective in WHOLE else size))
    whole = count * (1 if collective in WHOLE else size)
    inputs = [pattern(r, whole) for r in range(size)]
    x, want = expected(collective, inputs, rank)
    out = np.zeros_like(want)
    call = library.calls(out, x)[collective]

    def check() -> int:
        out[:] = inputs[rank][: out.size]
        call()
        return int(np.count_nonzero(out != want))

    read = out if collective in IN_PLACE else x
    if collective == "broadcast" and rank != 0:
        return call, nothing, check
    return call, partial(np.multiply, read, np.float32(1), out=read), check


def barrier_of(library: Library) -> Call:
    """Return the library's barrier, bound."""
    unused = np.zeros(1, np.float32)
    return library.calls(unused, unused)["barrier"]


def measure(
    library: Library, collective: str, nbytes: int, budget: float, *, untouched: bool = True
) -> tuple[float, int]:
    """Return the median over rounds of the slowest rank's mean seconds, and wrong elements.

    Results are checked before the rounds and after them. What is not `untouched` is written before
    each call.
    """
    call, rewrite, check = prepare(library, collective, nbytes)
    wrong = check()
    seconds = timed(library, collective, call, budget, None if untouched else rewrite)
    wrong += check()
    total = np.array([wrong], np.float32)
    library.calls(total, total)["all_reduce"]()
    return seconds, int(total[0])


def timed(
    library: Library, collective: str, call: Call, budget: float, before: Call | None = None
) -> float:
    """Return the median over rounds of the slowest rank's mean seconds; a ping-pong is one way.

    What is done `before` each call, if anything, is not counted; all ranks must give it, or none.
    It is that of the rank that takes longest, for which the others may wait.
    """

    whole = call if before is None else _one_after_the_other(before, call)

    def lasts(calls: int) -> float:
        taken = slowest(library, _mean(library, whole, calls))
        if before is None:
            return taken
        return max(0.0, taken - slowest(library, _mean(library, before, calls)))

    _mean(library, whole, WARM_UP)
    probe = slowest(library, _mean(library, whole, 3))
    calls = int(min(5000, max(3, budget / max(probe, 1e-7))))
    found = [lasts(calls) for _ in range(ROUNDS)]
    return statistics.median(found) / (2 if collective == "ping_pong" else 1)


def _one_after_the_other(before: Call, call: Call) -> Call:
    def both() -> None:
        before()
        call()

    return both


def slowest(library: Library, mine: float) -> float:
    """Return the largest of all ranks' numbers, the same on all."""
    found = np.zeros(library.size, np.float32)
    found[library.rank] = mine
    library.calls(found, found)["all_reduce"]()
    return float(found.max())


def _mean(library: Library, call: Call, calls: int) -> float:
    barrier_of(library)()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - start) / calls


def write(library: Library, rows: list[list[object]], out: str) -> None:
    """Write a job's rows on rank 0, and leave."""
    if library.rank == 0:
        Path(out).write_text(json.dumps(rows))
    library.close()


def main() -> None:
    """Measure the jobs on this rank; rank 0 writes what came out."""
    name, jobs, budget, untouched, out = sys.argv[1:6]
    library = LIBRARIES[name]()
    rows: list[list[object]] = [
        [
            collective,
            nbytes,
            *measure(library, collective, nbytes, float(budget), untouched=untouched == "1"),
        ]
        for collective, nbytes in json.loads(jobs)
    ]
    write(library, rows, out)


if __name__ == "__main__":
    main()
