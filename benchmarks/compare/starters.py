"""How a job of a compared library is started, as its users would start it.

nc10d and gloo by this package's launcher, an MPI by its own. Ranks are bound to no core; where they
outnumber the cores, Open MPI is told to yield, as its manual asks (MPICH does by itself).
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

BIN = Path(sys.executable).parent
Rows = list[list[Any]]
LIBRARIES = ("nc10d", "gloo", "mpich", "openmpi")
WANDERERS = ("nc10d", "gloo")
"""Libraries whose ranks can be started one by one, on hosts of their own."""


@dataclass(frozen=True)
class Starter:
    """The words before `-m MODULE`, and what the environment needs besides."""

    words: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def missing(self) -> str:
        """Name the program that is not installed; empty if it is."""
        return "" if shutil.which(self.words[0]) else self.words[0]


def starter(library: str, ranks: int) -> Starter:
    """Return how a job of `ranks` processes is started; ValueError if nothing is known of it."""
    if library == "mpich":
        return Starter([str(BIN / "mpiexec"), "-n", str(ranks), sys.executable])
    if library == "openmpi":
        return _open_mpi(ranks)
    if library not in WANDERERS:
        raise ValueError(f"unknown library {library!r}; known: {', '.join(LIBRARIES)}")
    # No --standalone: that makes a token, and then torch's store is a stranger to ours.
    return Starter([sys.executable, "-m", "nc10d.run", "--nproc-per-node", str(ranks)])


def _open_mpi(ranks: int) -> Starter:
    """NC10D_OPENMPI says where it is; it lives in a folder of its own beside MPICH."""
    folder = Path(os.environ.get("NC10D_OPENMPI", Path(sys.prefix) / "openmpi"))
    run = [str(folder / "bin" / "mpirun"), "--bind-to", "none", "--oversubscribe"]
    crowded = ranks > len(os.sched_getaffinity(0))
    environment = {
        "MPI4PY_LIBMPI": str(folder / "lib" / "libmpi.so.40"),
        "OMPI_MCA_mpi_yield_when_idle": str(int(crowded)),
        # A container's only user may be root.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    return Starter([*run, "-n", str(ranks), sys.executable], environment)


def run_job(library: str, ranks: int, module: str, arguments: Sequence[str], limit: float) -> Rows:
    """Run `module` on the ranks of one job; return the rows that rank 0 wrote.

    The file to write to is given as the last argument. Blocks until the job ends, at most `limit`
    seconds; RuntimeError with the job's last words if it fails.
    """
    start = starter(library, ranks)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        ended = subprocess.run(
            [*start.words, "-m", module, library, *arguments, str(out)],
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
