"""`python -m benchmarks TABLE [options]`: run from a checkout; `--help` lists the tables."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from nc10d.run.signals import run_interruptible

TABLES = {
    "compare": ("compare.compare", "collectives of nc10d, gloo and MPI, also on separate hosts"),
    "coalescing": ("compare.coalescing", "64 small all_reduces in the ways of each library"),
    "first-use": ("micro.first_use", "time to the first all_reduce, and memory; beside gloo"),
    "store": ("micro.store", "TCPStore beside torch's"),
    "ddp": ("micro.ddp", "communication in a training step, by nc10d and by torch over gloo"),
    "zero": ("micro.zero", "a step of divided optimizer state, by nc10d and by torch over gloo"),
    "ddp-modes": ("micro.ddp_modes", "step and peak memory by mode of DDP, beside torch's"),
    "torch": ("micro.torch_backend", "torch.distributed on nc10d and on gloo"),
    "compile": ("micro.compiled", "compiled programs with collectives, beside eager and gloo"),
    "numba": ("compare.numba_calls", "calls in compiled code, beside numba-mpi over MPICH"),
    "reductions": ("compare.own_reductions", "one's own reductions beside SUM and mpi4py's Op"),
    "objects": ("micro.objects", "objects by nc10d's codec and by pickle"),
    "flatten": ("micro.flatten", "packing a bucket of 25 MiB, beside torch and memcpy"),
    "overlap": ("micro.overlap", "share of an all_reduce that a matrix product hides; timeline"),
    "registered": ("micro.registered", "all_reduce of registered arrays, beside memory's speed"),
    "engine": ("micro.engine", "a call's cost at each level, from engine to API"),
    "kernels": ("micro.kernels", "a core's additions per second, by element type"),
    "exact": ("micro.exact", "exact sums, dots and norms on one rank, beside NumPy"),
    "imports": ("micro.imports", "import nc10d beside import numpy"),
    "faults": ("faults.table", "fault scenarios, beside gloo"),
    "kills": ("faults.kills", "a rank killed amid collectives, COUNT times, as JSON"),
}
"""Module and description of each table."""


def usage() -> str:
    """Return the help text: a line for each table."""
    lines = [f"  {name:<14}{text}" for name, (_, text) in TABLES.items()]
    return "\n".join(
        [
            "usage: python -m benchmarks TABLE [options]",
            "",
            "Measurements of nc10d for its developers. Each table has a --help.",
            "",
            "tables:",
            *lines,
            "",
            "nccl-tests' table of a job: python -m nc10d.bench",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the table that the command line names; return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else 2
    name, *options = words
    if name not in TABLES:
        print(f"unknown table {name}; known: {', '.join(TABLES)}", file=sys.stderr)
        return 2
    return int(importlib.import_module(f"benchmarks.{TABLES[name][0]}").main(options))


if __name__ == "__main__":
    raise SystemExit(run_interruptible(main))
