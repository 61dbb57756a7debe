"""`python -m nc10d.bench`: its options, its sizes, its table, and how it ends."""

import itertools
import subprocess
import sys
from collections.abc import Sequence

import pytest
from at_terminal import AtTerminal
from clocks import soon
from hypothesis import given
from hypothesis import strategies as st

from nc10d.arrays.dtypes import DType
from nc10d.base.text import byte_size
from nc10d.bench import cli
from nc10d.bench.measure import BenchJob, Row
from nc10d.bench.workloads import COLLECTIVES, FACTORS

BENCH = [sys.executable, "-m", "nc10d.bench"]
QUICK = ["--min-bytes", "8", "--max-bytes", "64", "--repeats", "1"]
COLUMNS = ["collective", "bytes", "count", "type", "op", "time", "algbw", "busbw", "wrong"]


@given(st.integers(1, 1 << 30), st.integers(0, 1 << 30), st.integers(2, 1000))
def test_sizes_grow_by_the_factor_and_end_at_the_largest(low: int, more: int, factor: int) -> None:
    found = list(cli.sizes(low, low + more, factor))
    assert found[0] == low
    assert found[-1] == low + more
    assert all(b == a * factor for a, b in itertools.pairwise(found[:-1]))
    assert found == sorted(set(found))


def test_the_largest_size_is_measured_though_no_step_meets_it() -> None:
    options = cli.read(["all_reduce", "--max-bytes", "1M"])
    assert [job.nbytes for job in cli.jobs(options)][-2:] == [256 << 10, 1 << 20]


def test_all_collectives_are_measured_unless_some_are_named() -> None:
    assert {job.collective for job in cli.jobs(cli.read([]))} == set(COLLECTIVES) == set(FACTORS)
    assert [*cli.jobs(cli.read(["all"]))] == [*cli.jobs(cli.read([]))]
    named = cli.read(["broadcast", "barrier"])
    assert {job.collective for job in cli.jobs(named)} == {"broadcast", "barrier"}


@pytest.mark.parametrize(
    ("text", "nbytes"), [("64", 64), ("4K", 4096), ("4k", 4096), ("16M", 1 << 24), ("1G", 1 << 30)]
)
def test_sizes_have_units(text: str, nbytes: int) -> None:
    assert byte_size(text) == nbytes


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["all_redcue"], "unknown collective all_redcue; known: all_reduce, "),
        (["--dtype", "float12"], "unknown --dtype float12; known: bool, uint8, "),
        (["--dtype", "S4"], "unknown --dtype S4"),
        (["--factor", "1"], "--factor must be at least 2"),
        (["--ranks", "0"], "'0' is not a number of at least 1"),
        (["--repeats", "-1"], "'-1' is not a number of at least 1"),
        (["--min-bytes", "0"], "'0' is not a size such as 64, 4K, 16M or 1G"),
        (["--max-bytes", "much"], "'much' is not a size"),
        (["--max-bytes", ""], "'' is not a size"),
        (["--min-bytes", "1M", "--max-bytes", "1K"], "is more than --max-bytes 1024"),
    ],
)
def test_wrong_options_are_reported(
    words: Sequence[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.read(words)
    assert ended.value.code == 2
    assert problem in capsys.readouterr().err


def test_a_row_stands_under_its_columns() -> None:
    job = BenchJob("all_reduce", 4000, DType.FLOAT8_E4M3FN, 10, 1)
    row = Row(job, count=4000, op="sum", seconds=2e-6, wrong=7, ranks=4)
    text = cli.line(row)
    assert cli.HEADER.replace(" us", "").replace(" GB/s", "").split() == COLUMNS
    cells = ["all_reduce", "4000", "4000", "float8_e4m3fn", "sum", "2.00", "2.000", "3.000", "7"]
    assert text.split() == cells
    assert len(text) == len(cli.HEADER)
    assert cli.HEADER.index("type") == text.index("float8")


def table(*words: str) -> tuple[int, list[list[str]]]:
    """Run the command; return its exit code, and the cells of its rows."""
    done = subprocess.run([*BENCH, *words], capture_output=True, text=True, timeout=100)
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert lines[1] == cli.HEADER
    assert lines[-1] == f"# {sum(int(line.split()[-1]) for line in lines[2:-1])} wrong elements"
    return done.returncode, [line.split() for line in lines[2:-1]]


@pytest.mark.slow
def test_the_command_measures_every_collective() -> None:
    code, rows = table("--ranks", "3", *QUICK)
    assert code == 0
    assert [row[0] for row in rows[::2]] == list(COLLECTIVES)
    assert all(len(row) == len(COLUMNS) and row[-1] == "0" for row in rows)
    assert all(float(row[5]) > 0 for row in rows)


def test_the_command_measures_the_job_of_a_launcher() -> None:
    launcher = [sys.executable, "-m", "nc10d.run", "--nproc-per-node", "2", "--no-prefix"]
    words = [*launcher, "-m", "nc10d.bench", "all_gather", *QUICK]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all_gather") == 2
    assert done.stdout.startswith("# 2 ranks on ")


def test_ctrl_c_ends_the_command_without_output() -> None:
    def attempt() -> float:
        with AtTerminal([*BENCH, "all_reduce", "--repeats", "1000000"]) as bench:
            bench.read_until("wrong\r\n")  # a whole line: Ctrl-C discards unread output
            code, seconds = bench.interrupt()
        assert code == 130
        assert bench.screen.rstrip().endswith(("wrong\r\n^C", "wrong"))
        return seconds

    assert soon(2.0, attempt)
