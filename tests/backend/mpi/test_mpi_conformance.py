"""MPI does what any backend must, whoever's MPI it is."""

from __future__ import annotations

import pytest
from mpi_launchers import LIBRARIES

from nc10d.testing import check_backend
from nc10d.testing.launched import Launcher


@pytest.mark.parametrize("launcher", LIBRARIES)
def test_the_mpi_backend_conforms(launcher: Launcher) -> None:
    assert check_backend("mpi", (2, 3), launcher, seed=5) > 280
