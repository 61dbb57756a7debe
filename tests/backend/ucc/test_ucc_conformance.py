"""The UCC backend, over the emulator, meets the contract of every backend.

With NC10D_REQUIRE_UCC=/path/to/libucc.so.1 the same tests run on that libucc.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from emulated_ucc import emulated

from nc10d.arrays.dtypes import DType
from nc10d.testing import check_backend

# A dtype for each way to reduce: by UCC, in rank order, and always by nc10d's kernels.
FEW = (DType.INT64, DType.FLOAT32, DType.BOOL)
REAL = os.environ.get("NC10D_REQUIRE_UCC", "")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    real = {"NC10D_UCC_LIBRARY": REAL} if REAL else {}
    folder = tmp_path_factory.mktemp("ucc")
    with emulated(folder, **real):
        yield
    assert not list(folder.iterdir()), "closed groups leave no file"


@pytest.mark.slow
@pytest.mark.usefixtures("library")
def test_the_ucc_backend_conforms() -> None:
    assert check_backend("ucc", (3,), "processes", dtypes=FEW, seed=5) > 60


@pytest.mark.long
@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("seed", [0, 1000])
def test_the_backend_conforms_with_all_types_and_sizes(seed: int) -> None:
    assert check_backend("ucc", (1, 2, 3, 4), "processes", seed=seed) > 300
