"""The command's tables; and kernels, registered arrays, overlap and first use are right."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.__main__ import TABLES, main, usage
from benchmarks.micro import first_use, kernels, overlap, registered
from nc10d.arrays.dtypes import DType
from nc10d.ops import MAX, SUM
from nc10d.testing import Ranks

SMAPS = """55d0-7ffe ---p 00000000 00:00 0    [rollup]
Rss:               20480 kB
Pss:               10240 kB
Pss_Dirty:          7736 kB
"""


@pytest.mark.parametrize("name", TABLES)
def test_every_table_has_its_help(name: str) -> None:
    command = [sys.executable, "-m", "benchmarks", name, "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: python -m benchmarks {name} ")


def test_the_help_lists_every_table() -> None:
    rows = [line.split() for line in usage().splitlines() if line.startswith("  ")]
    assert [row[0] for row in rows] == [*TABLES]
    assert all(len(row) > 3 for row in rows)


def test_an_unknown_table_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stroe"]) == 2
    assert "unknown table stroe; known: compare, " in capsys.readouterr().err


def test_the_kernel_that_is_timed_adds() -> None:
    x, y = np.arange(1000, dtype=np.float32), np.full(1000, 2, np.float32)
    call = kernels.folding(SUM, x, y)
    call()
    call()
    assert np.array_equal(x, np.arange(1000) + 4)


def test_speeds_are_reported_by_float32s() -> None:
    found = {DType.FLOAT32: [4e9, 2e9, 3e9], DType.BFLOAT16: [6e9]}
    assert [line.split() for line in kernels.report(found)] == [
        ["float32", "3.00", "1.00"],
        ["bfloat16", "6.00", "2.00"],
    ]


def test_every_type_is_timed_in_every_round() -> None:
    found = kernels.speeds([DType.FLOAT32, DType.INT8], MAX, 64, 3)
    assert {dtype: len(one) for dtype, one in found.items()} == {DType.FLOAT32: 3, DType.INT8: 3}
    assert all(speed > 0 for one in found.values() for speed in one)


def test_registered_arrays_are_held_against_the_floor() -> None:
    ranks = [
        {registered.FLOOR: [2e-3], "all_reduce, registered": [1e-3]},
        {registered.FLOOR: [1e-3], "all_reduce, registered": [3e-3]},
    ]
    floor, reduced = registered.report(ranks)
    assert floor.endswith("1.00")
    assert reduced.split() == ["all_reduce,", "registered", "3000", "(3000–3000)", "µs", "1.50"]


def test_registered_arrays_and_overlap_are_measured() -> None:
    with Ranks(2) as ranks:
        assert ranks.run(registered.check) == [True, True]
        times = ranks.run(registered.measure, [4096] * 2, [2] * 2)
    assert all(len(found) == 2 for one in times for found in one.values())


def test_time_that_does_not_add_to_the_product_is_hidden() -> None:
    times = {"all_reduce": [2.0], "product": [10.0], "async": [10.5], "sync": [12.0]}
    assert overlap.hidden(times) == 0.75
    assert overlap.report(times).endswith("hidden 75 %; async/sync 0.88")


@pytest.mark.slow
def test_overlap_is_measured_and_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "timeline.png"
    words = ["--bytes", "65536", "--rounds", "1", "--plot", str(picture)]
    command = [sys.executable, "-m", "benchmarks", "overlap", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert [line.partition(":")[0] for line in done.stdout.splitlines()[1:]] == [*overlap.SCENARIOS]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_ranks_memory_is_in_mib() -> None:
    assert first_use.memory(SMAPS) == {"rss": 20.0, "pss": 10.0}


def test_a_first_use_is_timed_from_its_start_and_weighed() -> None:
    found = first_use.once("nc10d", 2, {})
    assert 0 < found["seconds"] < first_use.LIMIT
    assert 10 < found["pss"] <= found["rss"] < 10_000


def test_a_rank_that_fails_is_reported() -> None:
    with pytest.raises(RuntimeError, match="nccl: a rank ended with exit code 1"):
        first_use.once("nccl", 1, {})


def test_cases_are_reported_with_their_medians() -> None:
    figures = [{"seconds": s, "cpu": 4.0, "rss": 30.0, "pss": 20.0} for s in (1.0, 5.0, 2.0)]
    _, line = first_use.report({"gloo": figures})
    assert line.split() == ["gloo", "2.00", "4.00", "30.0", "20.0"]
