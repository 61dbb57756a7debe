"""Sums in rank order have the bits of the past, on any hosts, sizes and vector units."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lettered_hosts import ranks_on

import nc10d as dist
from nc10d.arrays.dtypes import DType
from nc10d.group.process_group import ProcessGroup
from nc10d.kernels.reduce import kernel_address
from nc10d.ops import PRODUCT, SUM, ReduceOp
from nc10d.testing import Ranks

PERIOD = 250
KERNEL = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
OPS = {"sum": SUM.ordered, "product": PRODUCT.ordered, "logsumexp": dist.LOGSUMEXP}
SIZES = 2, 3, 4
GOLDEN: dict[tuple[str, str, int], str] = {
    ("sum", "float64", 2): "9a0352b6b097bb48",
    ("sum", "float64", 3): "7b817314134eda65",
    ("sum", "float64", 4): "14af1dc34ad52b18",
    ("sum", "float32", 2): "fed7bf3b9eebbf5b",
    ("sum", "float32", 3): "da0c1364ed04f6ed",
    ("sum", "float32", 4): "7071f367ded49b19",
    ("sum", "bfloat16", 2): "4d5ea6913294e523",
    ("sum", "bfloat16", 3): "649dda002878c8b8",
    ("sum", "bfloat16", 4): "908e436971a770b2",
    ("sum", "float16", 2): "85663f05fcffa6f6",
    ("sum", "float16", 3): "ca82150f3a2eb95e",
    ("sum", "float16", 4): "0f8f6518caaa60a9",
    ("product", "float64", 2): "0789be1fb1d7b394",
    ("product", "float64", 3): "d86e359d13061da1",
    ("product", "float64", 4): "071d54c67097db4f",
    ("product", "float32", 2): "e3769bc85adcd1ef",
    ("product", "float32", 3): "edafef83652357c7",
    ("product", "float32", 4): "4dbb160d792838a4",
    ("product", "bfloat16", 2): "e526f7272fcbf22d",
    ("product", "bfloat16", 3): "03ab9a0d5821e796",
    ("product", "bfloat16", 4): "4c0f54d719dd292f",
    ("product", "float16", 2): "ca1b26c2d51574c1",
    ("product", "float16", 3): "4b20510fc20d5ff3",
    ("product", "float16", 4): "f3221d61ecfe70b2",
    ("logsumexp", "float64", 2): "7ca3b31a8a845f55",
    ("logsumexp", "float64", 3): "8721ec152325da84",
    ("logsumexp", "float64", 4): "f0e168374668772e",
    ("logsumexp", "float32", 2): "1093ebc0c3d5f93c",
    ("logsumexp", "float32", 3): "e2330c9e560baa2f",
    ("logsumexp", "float32", 4): "74572217f56e0af8",
    ("logsumexp", "bfloat16", 2): "0fccd8d61e85dcc3",
    ("logsumexp", "bfloat16", 3): "be02a363e1e0ae36",
    ("logsumexp", "bfloat16", 4): "bfa7195209ffc773",
    ("logsumexp", "float16", 2): "e959ea2b9ac4725c",
    ("logsumexp", "float16", 3): "410ec15ba5f1227f",
    ("logsumexp", "float16", 4): "593219b06a2bf631",
}
"""Digests of a period, by reduction, dtype and number of ranks."""


def values(dtype: str, rank: int) -> Any:
    """Return fixed numbers of unlike size: no order of sums but one has the bits."""
    words = np.random.PCG64(100 + rank).random_raw(PERIOD)
    exponents = (words % np.uint64(7)).astype(np.int64) - 3
    found = np.ldexp((words >> np.uint64(11)).astype(np.float64) * 2.0**-53 - 0.5, exponents)
    return found.astype(DType[dtype.upper()].numpy)


def digest(x: Any) -> str:
    return hashlib.sha256(x.tobytes()).hexdigest()[:16]


def compare(group: ProcessGroup) -> None:
    for (name, dtype, size), golden in GOLDEN.items():
        if size != group.size:
            continue
        for periods in (1, 17, 1300):  # a small message, pieces, pieces of chunks
            x = np.tile(values(dtype, group.rank), periods)
            held = dist.empty(x.shape, x.dtype)
            held[...] = x
            for array in (x, held):
                dist.all_reduce(array, OPS[name])
                assert digest(array[:PERIOD]) == golden, (name, dtype, size, periods)
                assert (
                    array.reshape(periods, PERIOD).view("u1") == array[:PERIOD].view("u1")
                ).all()


@pytest.mark.parametrize("size", SIZES)
def test_ranks_on_one_host_have_the_golden_bits(size: int) -> None:
    with Ranks(size) as ranks:
        ranks.run(compare)


@pytest.mark.parametrize("hosts", ["AB", "ABA", "ABCA"])
def test_ranks_on_several_hosts_have_the_golden_bits(hosts: str) -> None:
    with ranks_on(hosts) as ranks:
        ranks.run(compare)


def folded(op: ReduceOp, dtype: str, size: int) -> Any:
    """Return a fold of all ranks' numbers by the kernel itself."""
    kernel = KERNEL(kernel_address(op.pairwise.name, DType[dtype.upper()]))
    total = values(dtype, 0)
    for rank in range(1, size):
        x = values(dtype, rank)
        kernel(total.ctypes.data, total.ctypes.data, x.ctypes.data, x.nbytes)
    return total


def print_digests() -> None:
    for name, dtype, size in GOLDEN:
        print(name, dtype, size, digest(folded(OPS[name], dtype, size)))


NARROW_CPU = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}


def test_a_cpu_without_wide_vectors_has_the_golden_bits(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import test_golden_bits as t; t.print_digests()"],
        cwd=Path(__file__).parent,
        env={**os.environ, **NARROW_CPU, "NC10D_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    rows = [line.split() for line in done.stdout.splitlines()]
    found = {(name, dtype, int(size)): bits for name, dtype, size, bits in rows}
    assert found == GOLDEN
