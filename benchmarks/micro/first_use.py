"""`python -m benchmarks.micro.first_use`: time to the first all_reduce, and memory of a rank.

Each round starts two processes: nc10d with an empty cache of compiled code (cold), with a full one
(warm), and torch over gloo. nc10d's byte code is there, as in what pip has installed. Seconds are
from before a process is started until its first float32 all_reduce has returned, the slower rank's;
memory is a rank's after that, all ranks still there, from smaps_rollup (proc_pid_smaps(5)): RSS has
shared pages whole, PSS each rank's share of them.
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
from typing import Any

from nc10d.kernels.cache_dir import PACKAGE
from nc10d.run.interrupt import quietly

LIMIT = 120.0
"""Seconds for a pair of ranks: far more than a cold start takes."""
CASES = ("nc10d, cold", "nc10d, warm", "gloo")
Figures = dict[str, float]


def memory(text: str) -> Figures:
    """Return {"rss": MiB, "pss": MiB} of the contents of smaps_rollup."""
    fields = dict(line.split(":", 1) for line in text.splitlines()[1:])
    return {name.lower(): int(fields[name].split()[0]) / 1024 for name in ("Rss", "Pss")}


def rank_main(library: str, rank: int, size: int, folder: str) -> None:
    """Be a rank: meet in a file, reduce once, and print when that was done and what it weighs."""
    dist, x = NEEDS[library]()
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


def _nc10d() -> tuple[Any, Any]:
    numpy = importlib.import_module("numpy")
    return importlib.import_module("nc10d"), numpy.ones(1024, numpy.float32)


def _gloo() -> tuple[Any, Any]:
    torch = importlib.import_module("torch")
    return importlib.import_module("torch.distributed"), torch.ones(1024)


NEEDS = {"nc10d": _nc10d, "gloo": _gloo}


def once(library: str, size: int, environment: Mapping[str, str]) -> Figures:
    """Start the ranks of one job; return seconds until the first result, and MiB of a rank."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        ranks = [_start(library, rank, size, folder, environment) for rank in range(size)]
        told = [json.loads(_words(rank, library)) for rank in ranks]
    weights = {name: max(one[name] for one in told) for name in ("rss", "pss")}
    return {"seconds": max(one["done"] for one in told) - start, **weights}


def _start(
    library: str, rank: int, size: int, folder: str, environment: Mapping[str, str]
) -> subprocess.Popen[str]:
    words = ["--be", library, str(rank), str(size), folder]
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.micro.first_use", *words],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def _words(rank: subprocess.Popen[str], library: str) -> str:
    words, _ = rank.communicate(timeout=LIMIT)
    if rank.returncode:
        raise RuntimeError(f"{library}: a rank ended with exit code {rank.returncode}")
    return words


def rounds(count: int) -> dict[str, list[Figures]]:
    """Run every case this often, in turns."""
    compileall.compile_dir(PACKAGE, quiet=2)
    known = importlib.util.find_spec("torch") is not None
    if not known:
        print("# torch is not installed: gloo is left out", flush=True)
    found: dict[str, list[Figures]] = {case: [] for case in CASES if known or case != "gloo"}
    for _ in range(count):
        with tempfile.TemporaryDirectory() as cache:
            here = {"NC10D_CACHE_DIR": cache}
            found["nc10d, cold"].append(once("nc10d", 2, here))
            found["nc10d, warm"].append(once("nc10d", 2, here))
        if known:
            found["gloo"].append(once("gloo", 2, {}))
    return found


def report(found: Mapping[str, Sequence[Figures]]) -> list[str]:
    """Return a line for each case: medians."""
    lines = [f"{'first all_reduce, 2 ranks':<28}{'seconds':>10}{'RSS MiB':>10}{'PSS MiB':>10}"]
    for case, figures in found.items():
        middle = [statistics.median(f[name] for f in figures) for name in ("seconds", "rss", "pss")]
        lines.append(f"{case:<28}{middle[0]:>10.2f}{middle[1]:>10.1f}{middle[2]:>10.1f}")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; with --be, be a rank."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.micro.first_use", description=__doc__
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--be", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.be:
        library, rank, size, folder = options.be
        rank_main(library, int(rank), int(size), folder)
        return 0
    load = os.getloadavg()[0]
    print(f"# {options.rounds} rounds, load at the start {load:.2f}; medians", flush=True)
    print(*report(rounds(options.rounds)), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(quietly(main))
