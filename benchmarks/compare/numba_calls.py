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


def nc10d_calls() -> dict[str, Any]:
    """Return nc10d.numba's calls as compiled functions; `all_reduce` reduces `out` in place."""
    from numba import njit

    from nc10d import numba as nb

    biggest = nb.MAX

    @njit(nogil=True)
    def all_reduce(out, _):  # type: ignore[no-untyped-def]
        nb.all_reduce(out, biggest)

    return {
        "all_reduce": all_reduce,
        "broadcast": nb.broadcast,
        "send": nb.send,
        "recv": nb.recv,
        "barrier": nb.barrier,
    }


def mpi_calls() -> dict[str, Any]:
    """Return numba-mpi's calls as compiled functions; `all_reduce` reduces `x` into `out`."""
    import numba_mpi
    from numba import njit

    biggest = numba_mpi.Operator.MAX

    @njit(nogil=True)
    def all_reduce(out, x):  # type: ignore[no-untyped-def]
        numba_mpi.allreduce(x, out, biggest)

    return {
        "all_reduce": all_reduce,
        "broadcast": numba_mpi.bcast,
        "send": numba_mpi.send,
        "recv": numba_mpi.recv,
        "barrier": numba_mpi.barrier,
    }


def loops(calls: dict[str, Any], out: Array, x: Array, rank: int) -> dict[str, Loop]:
    """Return a compiled loop for each call."""
    from numba import njit

    reduce, spread, meet = calls["all_reduce"], calls["broadcast"], calls["barrier"]
    send, recv, peer = calls["send"], calls["recv"], rank ^ 1

    @njit(nogil=True)
    def all_reduce(repeats, out, x):  # type: ignore[no-untyped-def]
        for _ in range(repeats):
            reduce(out, x)

    @njit(nogil=True)
    def broadcast(repeats, out):  # type: ignore[no-untyped-def]
        for _ in range(repeats):
            spread(out, 0)

    @njit(nogil=True)
    def ping_pong(repeats, out, x):  # type: ignore[no-untyped-def]
        for _ in range(repeats):
            if rank < peer:
                send(x, peer)
                recv(out, peer)
            else:
                recv(out, peer)
                send(x, peer)

    @njit(nogil=True)
    def barrier(repeats):  # type: ignore[no-untyped-def]
        for _ in range(repeats):
            meet()

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
    calls = nc10d_calls() if library.name == "nc10d" else mpi_calls()
    rank, found = library.rank, []
    for nbytes in sizes:
        out, x = np.empty(nbytes // 8), np.full(nbytes // 8, float(rank))
        timed_loops = loops(calls, out, x, rank)
        barrier = timed_loops["barrier"]
        expected = {"all_reduce": library.size - 1, "broadcast": 0, "ping_pong": rank ^ 1}
        for call, loop in timed_loops.items():
            if call == "barrier" and nbytes != sizes[0]:
                continue
            out[:] = rank
            loop(3)  # compiles, and prepares the call
            once = slowest(library, timed(barrier, loop, 10) / 10)
            repeats = max(10, min(20_000, int(budget / once)))
            cost = slowest(library, timed(barrier, loop, repeats) / repeats)
            wrong = slowest(library, float(np.count_nonzero(out != expected.get(call, rank))))
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
