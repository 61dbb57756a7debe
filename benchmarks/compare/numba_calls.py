"""Compare nc10d.numba with numba-mpi over MPICH: calls inside functions that Numba compiles.

Each rank times a loop that Numba has compiled, on arrays of float64; the slowest rank counts. The
arrays stay as they are between calls. Each library has a job of its own; the jobs take turns in
interleaved rounds. Results are checked. A ratio above 1 means that nc10d is ahead. `ping_pong` is
one way of a message.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.background_load import BackgroundLoad
from benchmarks.compare.compare import require
from benchmarks.estimates import compare, estimate, turns
from benchmarks.figures import bytes_label
from benchmarks.libraries.jobs import run_job
from nc10d.base.text import byte_size

SIZES = [8, 1 << 10, 64 << 10, 1 << 20]
CALLS = ("all_reduce", "broadcast", "ping_pong", "barrier")
LIBRARIES = {"nc10d": "nc10d", "numba-mpi": "mpich"}
"""Each library's name in the table, and that of the job which it needs."""
WORKER = "benchmarks.compare.numba_calls"
Loop = Callable[[int], None]
Array = np.ndarray[Any, np.dtype[np.float64]]


def nc10d_loops(out: Array, x: Array, rank: int) -> dict[str, Callable[[int], None]]:
    """Return a compiled loop for each call of nc10d.numba."""
    from numba import njit

    from nc10d import numba as nb

    peer, biggest = rank ^ 1, nb.MAX

    @njit(nogil=True)
    def all_reduce(repeats, out):  # type: ignore[no-untyped-def]
        for _ in range(repeats):
            nb.all_reduce(out, biggest)

    @njit(nogil=True)
    def broadcast(repeats, out):  # type: ignore[no-untyped-def]
        for _ in range(repeats):
            nb.broadcast(out, 0)

    @njit(nogil=True)
    def ping_pong(repeats, out, x):  # type: ignore[no-untyped-def]
        for _ in range(repeats):
            if rank < peer:
                nb.send(x, peer)
                nb.recv(out, peer)
            else:
                nb.recv(out, peer)
                nb.send(x, peer)

    @njit(nogil=True)
    def barrier(repeats):  # type: ignore[no-untyped-def]
        for _ in range(repeats):
            nb.barrier()

    return {
        "all_reduce": lambda repeats: all_reduce(repeats, out),
        "broadcast": lambda repeats: broadcast(repeats, out),
        "ping_pong": lambda repeats: ping_pong(repeats, out, x),
        "barrier": barrier,
    }


def mpi_loops(out: Array, x: Array, rank: int) -> dict[str, Callable[[int], None]]:
    """Return a compiled loop for each call of numba-mpi, which reduces into another array."""
    import numba_mpi
    from numba import njit

    peer, biggest = rank ^ 1, numba_mpi.Operator.MAX

    @njit(nogil=True)
    def all_reduce(repeats, out, x):  # type: ignore[no-untyped-def]
        for _ in range(repeats):
            numba_mpi.allreduce(x, out, biggest)

    @njit(nogil=True)
    def broadcast(repeats, out):  # type: ignore[no-untyped-def]
        for _ in range(repeats):
            numba_mpi.bcast(out, 0)

    @njit(nogil=True)
    def ping_pong(repeats, out, x):  # type: ignore[no-untyped-def]
        for _ in range(repeats):
            if rank < peer:
                numba_mpi.send(x, peer)
                numba_mpi.recv(out, peer)
            else:
                numba_mpi.recv(out, peer)
                numba_mpi.send(x, peer)

    @njit(nogil=True)
    def barrier(repeats):  # type: ignore[no-untyped-def]
        for _ in range(repeats):
            numba_mpi.barrier()

    return {
        "all_reduce": lambda repeats: all_reduce(repeats, out, x),
        "broadcast": lambda repeats: broadcast(repeats, out),
        "ping_pong": lambda repeats: ping_pong(repeats, out, x),
        "barrier": barrier,
    }


def slowest(library: Any, seconds: float) -> float:
    """Return the largest of all ranks' times."""
    if library.name == "nc10d":
        import nc10d

        times = np.array([seconds])
        nc10d.all_reduce(times, nc10d.ReduceOp.MAX)
        return float(times[0])
    return float(library.comm.allreduce(seconds, library.mpi.MAX))


def rows(library: Any, sizes: Sequence[int], budget: float) -> list[list[Any]]:
    """Measure on one rank: a row of call, bytes, seconds of a call, and wrong elements."""
    found = []
    loops = nc10d_loops if library.name == "nc10d" else mpi_loops
    for nbytes in sizes:
        out, x = np.empty(nbytes // 8), np.full(nbytes // 8, float(library.rank))
        for call, loop in loops(out, x, library.rank).items():
            if call == "barrier" and nbytes != sizes[0]:
                continue
            out[:] = library.rank
            barrier = loops(out, x, library.rank)["barrier"]
            loop(3)  # compiles, and prepares the call
            once = slowest(library, timed(barrier, loop, 10) / 10)
            repeats = max(10, min(20_000, int(budget / once)))
            cost = slowest(library, timed(barrier, loop, repeats) / repeats)
            expected = {
                "all_reduce": library.size - 1,
                "broadcast": 0,
                "ping_pong": library.rank ^ 1,
                "barrier": library.rank,
            }[call]
            wrong = slowest(library, float(np.count_nonzero(out != expected)))
            halves = 2 if call == "ping_pong" else 1
            found.append([call, 0 if call == "barrier" else nbytes, cost / halves, wrong])
    return found


def timed(barrier: Loop, loop: Loop, repeats: int) -> float:
    """Return the seconds of the calls, which all ranks begin together."""
    barrier(1)
    started = time.perf_counter()
    loop(repeats)
    return time.perf_counter() - started


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Blocks for all rounds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks numba", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=0.1, help="seconds for a cell's repeats")
    parser.add_argument("--sizes", type=byte_size, nargs="+", default=SIZES)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one job")
    options = parser.parse_args(arguments)
    require([*LIBRARIES.values()])
    samples: dict[str, dict[tuple[str, int], list[float]]] = {name: {} for name in LIBRARIES}
    with BackgroundLoad() as others:
        for number in range(options.rounds):
            for name in turns([*LIBRARIES], number):
                words = [options.sizes, options.budget]
                for call, nbytes, seconds, wrong in run_job(
                    LIBRARIES[name], options.ranks, WORKER, words, options.limit
                ):
                    if wrong:
                        raise RuntimeError(f"{name}, {call}: wrong elements of {nbytes} bytes")
                    samples[name].setdefault((call, nbytes), []).append(seconds)
            print(f"# round {number + 1} of {options.rounds} done", file=sys.stderr, flush=True)
    cores = len(os.sched_getaffinity(0))
    print(f"# {options.ranks} ranks on {cores} cores; others used {others.cores:.2f} cores")
    print("| call | bytes | nc10d.numba, µs | numba-mpi, µs | ratio | nc10d is |")
    print("|---|---|---|---|---|---|")
    for call, nbytes in sorted(samples["nc10d"], key=lambda key: (CALLS.index(key[0]), key[1])):
        ours, theirs = (estimate(samples[name][call, nbytes]) for name in LIBRARIES)
        result = compare(nbytes, ours, {"numba-mpi": theirs})
        label = bytes_label(nbytes)
        print(f"| {call} | {label} | {ours} | {theirs} | {result.ratio:.2f} | {result.word} |")
    return 0
