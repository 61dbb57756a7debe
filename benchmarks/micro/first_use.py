"""Measure the time from process start to the first all_reduce, and the memory of a rank.

Each round starts the ranks of four jobs: nc10d with an empty cache of compiled code (cold), with a
full cache (warm), torch.distributed on nc10d, and on gloo. nc10d's byte code is present, as pip
installs it. Seconds are from before the start of a process to the return of its first float32
all_reduce, on the slowest rank. CPU seconds are those of all ranks together until then; they depend
less on what else the machine does. Memory is read after that, with all ranks alive, from
smaps_rollup (proc_pid_smaps(5)): RSS counts shared pages fully, PSS only a rank's share of them.
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
"""Seconds for the ranks of a job: far more than a cold start takes."""
ON_TORCH = "nc10d of torch"
TORCH_BACKENDS = {ON_TORCH: "nc10d", "gloo": "gloo"}
"""Libraries that need torch, and the backend that they name."""
CASES = ("nc10d, cold", "nc10d, warm", *TORCH_BACKENDS)
FIGURES = ("seconds", "cpu", "rss", "pss")
Figures = dict[str, float]


def memory(text: str) -> Figures:
    """Return {"rss": MiB, "pss": MiB} from the text of smaps_rollup."""
    fields = dict(line.split(":", 1) for line in text.splitlines()[1:])
    return {name.lower(): int(fields[name].split()[0]) / 1024 for name in ("Rss", "Pss")}


def rank_main(library: str, rank: int, size: int, folder: str) -> None:
    """Join a group by a file, reduce once, and print the time of the result and the memory."""
    backend = TORCH_BACKENDS.get(library)
    adapter = make_c10d("gloo" if backend else library)
    if library == ON_TORCH:
        import nc10d.torch

        assert nc10d.torch, "registers the backend where nc10d is not installed"
    dist, x = adapter.dist, adapter.ones(1024)
    meeting = f"file://{folder}/store"
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=size)
    dist.all_reduce(x)
    done, cpu = time.monotonic(), time.process_time()
    dist.barrier()
    weighs = memory(Path("/proc/self/smaps_rollup").read_text())
    dist.barrier()
    dist.destroy_process_group()
    if float(x[0]) != size:
        raise SystemExit(f"all_reduce of ones came out as {x[0]} on {size} ranks")
    print(json.dumps({"done": done, "cpu": cpu, **weighs}))


def once(library: str, size: int, environment: Mapping[str, str]) -> Figures:
    """Start the ranks of a job; return seconds until the first result, and MiB of the largest."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.monotonic()
        ranks = [_start(library, rank, size, folder, environment) for rank in range(size)]
        reports = [json.loads(_output(rank, library)) for rank in ranks]
    weights = {name: max(report[name] for report in reports) for name in ("rss", "pss")}
    seconds = max(report["done"] for report in reports) - start
    return {"seconds": seconds, "cpu": sum(report["cpu"] for report in reports), **weights}


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


def rounds(count: int, size: int) -> dict[str, list[Figures]]:
    """Run every case `count` times on `size` ranks, in turns. Blocks for all rounds."""
    compileall.compile_dir(PACKAGE, quiet=2)
    has_torch = importlib.util.find_spec("torch") is not None
    if not has_torch:
        print("# torch is not installed: its backends are left out", flush=True)
    cases = CASES if has_torch else CASES[:2]
    found: dict[str, list[Figures]] = {case: [] for case in cases}
    for _ in range(count):
        with tempfile.TemporaryDirectory() as cache:
            here = {"NC10D_CACHE_DIR": cache}
            found["nc10d, cold"].append(once("nc10d", size, here))
            found["nc10d, warm"].append(once("nc10d", size, here))
        for library in cases[2:]:
            found[library].append(once(library, size, {}))
    return found


def report(found: Mapping[str, Sequence[Figures]], size: int = 2) -> list[str]:
    """Return a line for each case, with medians."""
    title = f"first all_reduce, {size} ranks"
    lines = [f"{title:<28}{'seconds':>10}{'CPU s':>10}{'RSS MiB':>10}{'PSS MiB':>10}"]
    for case, figures in found.items():
        middle = [statistics.median(f[name] for f in figures) for name in FIGURES]
        lines.append(
            f"{case:<28}{middle[0]:>10.2f}{middle[1]:>10.2f}{middle[2]:>10.1f}{middle[3]:>10.1f}"
        )
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; with --rank, run a rank."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks first-use", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank:
        library, rank, size, folder = options.rank
        rank_main(library, int(rank), int(size), folder)
        return 0
    load = os.getloadavg()[0]
    print(f"# {options.rounds} rounds, load at the start {load:.2f}; medians", flush=True)
    print(*report(rounds(options.rounds, options.ranks), options.ranks), sep="\n")
    return 0
