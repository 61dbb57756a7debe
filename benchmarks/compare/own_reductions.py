"""Compare all_reduce by one's own reductions with SUM, and with mpi4py over MPICH and Open MPI.

Each rank times blocking calls in place; the slowest rank counts. The arrays have the same bytes in
each row. mpi4py's side is MPI_MINLOC for pairs, and `Op.Create` of a NumPy function elsewhere.
Each library has a job of its own; the jobs take turns in interleaved rounds, and results are
checked. A ratio above 1 means that nc10d is ahead.
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
from benchmarks.compare.numba_calls import slowest
from benchmarks.estimates import estimate, turns
from benchmarks.figures import bytes_label
from benchmarks.libraries.jobs import run_job
from nc10d.base.text import byte_size

SIZES = [8, 1 << 10, 64 << 10, 1 << 20, 8 << 20, 64 << 20]
LIBRARIES = ("nc10d", "mpich", "openmpi")
WORKER = "benchmarks.compare.own_reductions"
Array = np.ndarray[Any, np.dtype[Any]]
DTYPES: dict[str, Any] = {
    "SUM": np.dtype("f4"),
    "ARGMIN": np.dtype([("value", "f4"), ("index", "i4")]),
    "WELFORD": np.dtype([("n", "f8"), ("mean", "f8"), ("m2", "f8")]),
    "LOGSUMEXP": np.dtype("f4"),
}


def welford(a: Array, b: Array) -> None:
    """Merge records into b, as NumPy users write it."""
    n, difference = a["n"] + b["n"], b["mean"] - a["mean"]
    weight = np.divide(b["n"], n, out=np.zeros_like(n), where=n > 0)
    b["m2"] += a["m2"] + difference * difference * (a["n"] * weight)
    b["mean"], b["n"] = a["mean"] + difference * weight, n


def merged(name: str, a: Array, b: Array) -> None:
    """b := a op b, by NumPy."""
    welford(a, b) if name == "WELFORD" else np.logaddexp(a, b, out=b)


def calls(library: Any, x: Array, name: str) -> Callable[[], object]:
    """Return the all_reduce of x in place."""
    if library.name == "nc10d":
        import nc10d

        op = getattr(nc10d, name)
        return lambda: nc10d.all_reduce(x, op)
    mpi, comm = library.mpi, library.comm
    if name in ("SUM", "ARGMIN"):
        kind, op = (mpi.FLOAT, mpi.SUM) if name == "SUM" else (mpi.FLOAT_INT, mpi.MINLOC)
        return lambda: comm.Allreduce(mpi.IN_PLACE, [x, x.size, kind], op)
    dtype = x.dtype

    def combine(lower: Any, upper: Any, _datatype: Any) -> None:
        merged(name, np.frombuffer(lower, dtype), np.frombuffer(upper, dtype))

    made, kind = mpi.Op.Create(combine, commute=True), mpi.BYTE.Create_contiguous(dtype.itemsize)
    kind.Commit()
    return lambda: comm.Allreduce(mpi.IN_PLACE, [x, x.size, kind], made)


def filled(name: str, count: int, rank: int) -> Array:
    """Return a rank's elements."""
    x = np.zeros(count, DTYPES[name])
    for number, part in enumerate([x[f] for f in x.dtype.names] if x.dtype.names else [x]):
        part[:] = (np.arange(count) + 3 * rank + number) % 7 + number
    return x


def wrong(name: str, x: Array, size: int) -> int:
    """Return how many elements of a result differ from NumPy's, rounding aside."""
    ranks = [filled(name, x.size, rank) for rank in range(size)]
    total = ranks[0].copy()
    for other in ranks[1:]:
        if name == "SUM":
            total += other
        elif name == "ARGMIN":
            less = (other["value"] < total["value"]) | (
                (other["value"] == total["value"]) & (other["index"] < total["index"])
            )
            total[less] = other[less]
        else:
            merged(name, total, other)
            total = other
    fields = x.dtype.names
    parts = [(x[f], total[f]) for f in fields] if fields else [(x, total)]
    return sum(int(np.count_nonzero(~np.isclose(a, b, rtol=1e-5))) for a, b in parts)


def rows(library: Any, sizes: Sequence[int], budget: float) -> list[list[Any]]:
    """Measure on one rank: a row of reduction, bytes, seconds of a call, and wrong elements."""
    found = []
    for nbytes in sizes:
        for name, dtype in DTYPES.items():
            count = max(1, nbytes // dtype.itemsize)
            x = filled(name, count, library.rank)
            call = calls(library, x, name)
            call()
            errors = slowest(library, float(wrong(name, x, library.size)))
            x[:] = filled(name, count, library.rank)
            once = slowest(library, timed(call, 3) / 3)
            repeats = max(3, min(20_000, int(budget / once)))
            found.append([name, nbytes, slowest(library, timed(call, repeats) / repeats), errors])
    return found


def timed(call: Callable[[], object], repeats: int) -> float:
    """Return the seconds of the calls, behind one that makes ranks begin together."""
    call()
    started = time.perf_counter()
    for _ in range(repeats):
        call()
    return time.perf_counter() - started


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. Blocks for all rounds."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks reductions", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=0.1, help="seconds for a cell's repeats")
    parser.add_argument("--sizes", type=byte_size, nargs="+", default=SIZES)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one job")
    options = parser.parse_args(arguments)
    require(LIBRARIES)
    samples: dict[str, dict[tuple[str, int], list[float]]] = {name: {} for name in LIBRARIES}
    with BackgroundLoad() as others:
        for number in range(options.rounds):
            for library in turns([*LIBRARIES], number):
                words = [options.sizes, options.budget]
                for name, nbytes, seconds, errors in run_job(
                    library, options.ranks, WORKER, words, options.limit
                ):
                    if errors:
                        raise RuntimeError(f"{library}, {name}: {errors} wrong of {nbytes} bytes")
                    samples[library].setdefault((name, nbytes), []).append(seconds)
            print(f"# round {number + 1} of {options.rounds} done", file=sys.stderr, flush=True)
    cores = len(os.sched_getaffinity(0))
    print(f"# {options.ranks} ranks on {cores} cores; others used {others.cores:.2f} cores")
    print("| reduction | bytes | nc10d, µs | of SUM's time | ns/element | MPICH | Open MPI |")
    print("|---|---|---|---|---|---|---|")
    for name in DTYPES:
        for nbytes in options.sizes:
            own, total, *mpi = (
                estimate(samples[library][key])
                for library, key in (
                    ("nc10d", (name, nbytes)),
                    ("nc10d", ("SUM", nbytes)),
                    ("mpich", (name, nbytes)),
                    ("openmpi", (name, nbytes)),
                )
            )
            count = max(1, nbytes // DTYPES[name].itemsize)
            ratios = " | ".join(f"{each.median / own.median:.1f}" for each in mpi)
            share, each = own.median / total.median, own.median / count * 1e9
            print(
                f"| {name} | {bytes_label(nbytes)} | {own} | {share:.2f} | {each:.2f} | {ratios} |"
            )
    return 0
