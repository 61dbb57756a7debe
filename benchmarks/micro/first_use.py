"""Measure the time from process start to the first all_reduce, and the memory of a rank.

Each round starts two processes: nc10d with an empty cache of compiled code (cold), with a full
cache (warm), and torch over gloo. nc10d's byte code is present, as pip installs it. Seconds are
from before the start of a process to the return of its first float32 all_reduce, on the slower
rank. Memory is read after that, with all ranks alive, from smaps_rollup (proc_pid_smaps(5)): RSS
counts shared pages fully, PSS only a rank's share of them.
"""

from __future__ import annotations

import argparse
import compileall
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.libraries import make_c10d
from nc10d.kernels.cache_dir import PACKAGE

LIMIT = 120.0
"""Seconds for a pair of ranks: far more than a cold start takes."""
CASES = ("nc10d, cold", "nc10d, warm", "gloo")
Figures = dict[str, float]


def memory(text: str) -> Figures:
    """Return {"rss": MiB, "pss": MiB} from the text of smaps_rollup."""
    fields = dict(line.split(":", 1) for line in text.splitlines()[1:])
    return {name.lower(): int(fields[name].split()[0]) / 1024 for name in ("Rss", "Pss")}


def rank_main(library: str, rank: int, size: int, folder: str) -> None:
    """Join a group by a file, reduce once, and print the time of the result and the memory."""
    adapter = make_c10d(library)
    dist, x = adapter.dist, adapter.ones(1024)
    dist.init_process_group(
        "gloo" if library == "gloo" else None,
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=size,
    )
    dist.all_reduce(x)
    done = time.monotonic()
    dist.barrier()
    weighs = memory(Path("/proc/self/smaps_rollup").read_text())
    dist.barrier()
    dist.destroy_process_group()
    if float(x[0]) != size:
        raise SystemExit(f"all_reduce of ones came out as {x[0]} on {size} ranks")
    print(json.dumps({"done": done, **weighs}))


def once(library: str, size: int, environment: Mapping[str, str]) -> Figures:
    """Start the ranks of a job; return seconds until the first result, and MiB of a rank."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        ranks = [_start(library, rank, size, folder, environment) for rank in range(size)]
        reports = [json.loads(_output(rank, library)) for rank in ranks]
    weights = {name: max(report[name] for report in reports) for name in ("rss", "pss")}
    return {"seconds": max(report["done"] for report in reports) - start, **weights}


def _start(
    library: str, rank: int, size: int, folder: str, environment: Mapping[str, str]
) -> subprocess.Popen[str]:
    words = ["first-use", "--rank", library, str(rank), str(size), folder]
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks", *words],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def _output(rank: subprocess.Popen[str], library: str) -> str:
    output, _ = rank.communicate(timeout=LIMIT)
    if rank.returncode:
        raise RuntimeError(f"{library}: a rank ended with exit code {rank.returncode}")
    return output


def rounds(count: int) -> dict[str, list[Figures]]:
    """Run every case `count` times, in turns. Blocks for all rounds."""
    compileall.compile_dir(PACKAGE, quiet=2)
    has_torch = importlib.util.find_spec("torch") is not None
    if not has_torch:
        print("# torch is not installed: gloo is left out", flush=True)
    found: dict[str, list[Figures]] = {case: [] for case in CASES if has_torch or case != "gloo"}
    for _ in range(count):
        with tempfile.TemporaryDirectory() as cache:
            here = {"NC10D_CACHE_DIR": cache}
            found["nc10d, cold"].append(once("nc10d", 2, here))
            found["nc10d, warm"].append(once("nc10d", 2, here))
        if has_torch:
            found["gloo"].append(once("gloo", 2, {}))
    return found


def report(found: Mapping[str, Sequence[Figures]]) -> list[str]:
    """Return a line for each case, with medians."""
    lines = [f"{'first all_reduce, 2 ranks':<28}{'seconds':>10}{'RSS MiB':>10}{'PSS MiB':>10}"]
    for case, figures in found.items():
        middle = [statistics.median(f[name] for f in figures) for name in ("seconds", "rss", "pss")]
        lines.append(f"{case:<28}{middle[0]:>10.2f}{middle[1]:>10.1f}{middle[2]:>10.1f}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; with --rank, run a rank."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks first-use", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank:
        library, rank, size, folder = options.rank
        rank_main(library, int(rank), int(size), folder)
        return 0
    load = os.getloadavg()[0]
    print(f"# {options.rounds} rounds, load at the start {load:.2f}; medians", flush=True)
    print(*report(rounds(options.rounds)), sep="\n")
    return 0
