"""The MPI backend meets the contract of every backend, under any MPI."""

from __future__ import annotations

import pytest
from mpi_launchers import LIBRARIES

from nc10d.arrays.dtypes import DType
from nc10d.testing import check_backend
from nc10d.testing.hosts.external_ranks import Launcher

# A dtype for each way to reduce: by MPI, by nc10d's op, in rank order, and wrapping around.
FEW = (DType.INT64, DType.UINT8, DType.INT16, DType.FLOAT32, DType.BFLOAT16, DType.BOOL)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LIBRARIES)
def test_the_mpi_backend_conforms(launcher: Launcher) -> None:
    assert check_backend("mpi", (2, 3), launcher, dtypes=FEW, seed=5) > 140


@pytest.mark.long
@pytest.mark.parametrize("launcher", LIBRARIES)
@pytest.mark.parametrize("seed", range(0, 4000, 1000))
def test_the_backend_conforms_with_all_types_and_sizes(launcher: Launcher, seed: int) -> None:
    assert check_backend("mpi", (1, 2, 3, 4, 5), launcher, seed=seed) > 350
