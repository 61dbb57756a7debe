"""The table of faults: nc10d's column keeps the project's promises."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.faults import interrupts
from benchmarks.faults.results import Result
from benchmarks.faults.table import ROWS, _word_for
from benchmarks.libraries.nc10d import Nc10d

# The longest allowed delay in ms, on a machine with other load.
LATEST = 20_000


def rows(*words: str) -> dict[str, str]:
    command = [sys.executable, "-m", "benchmarks", "faults", "--library", "nc10d", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    cells = re.findall(r"^\| (.+?) \| (.+?) \|$", done.stdout, re.MULTILINE)
    return {row: result for row, result in cells if row != "what"}


def promised(name: str, n: int) -> str:
    """Return a row's required words for a scenario that is played `n` times."""
    waits = len(interrupts.waits(Nc10d()))
    words = {
        "kills": f"{3 * n} of {3 * n} survivors name the lost rank",
        "stops": f"{2 * n} of {2 * n} name the lost rank",
        "pauses": rf"{n} s, (?P<ranks>\d+) ranks: goes on (?P=ranks)x",
        "interrupts": f"KeyboardInterrupt {n * (waits + 1)}x",
        "mismatches": f"clear {16 * n}",
        "stores": f"ConnectTimeout {3 * n}x, DistNetworkError {n}x, StoreTimeout {n}x",
        "networks": f"{2 * n} of {2 * n} name the lost rank|not played: network namespaces .*",
        "ends": f"exit code 3 {n}x",
        "forks": f"ForkedGroupError in the child {n}x, the parents go on {n}x",
        "cycles": f"{n} cycles: nothing stays",
        "drops": f"{n} groups: nothing stays, no more than 1 MiB",
        "all-killed": f"{n} times: no files left",
        "strangers": rf"{n} strangers: [\d.]+ ms in 99 of 100, \d+ calls of an honest client",
        "ports": f"{n} connections: none kept, none let in afterwards; the sum is right",
        "frames": f"{n} frames: no crash, nothing accepted",
    }
    return words[name]


def keeps(name: str, count: int, said: str) -> None:
    assert re.fullmatch(rf"([\d-]+ / [\d-]+ ms, )?({promised(name, count)})", said), said
    late = re.findall(r"/ (\d+) ms", said)
    assert not late or int(late[0]) < LATEST


@pytest.mark.slow
def test_the_table_keeps_the_promises() -> None:
    said = rows()
    assert [*said] == [row.title for row in ROWS.values()]
    for name, row in ROWS.items():
        keeps(name, row.count, said[row.title])


@pytest.mark.long
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("name", ROWS)
def test_a_campaign_of_a_row_keeps_its_promise(name: str) -> None:
    (said,) = rows("--row", name, "--long").values()
    keeps(name, ROWS[name].long, said)


def report(kind: str, late: float = 0.0) -> dict[str, Any]:
    return {"kind": kind, "late": late, "message": "", "failed": None}


@pytest.mark.parametrize(
    ("codes", "kinds", "word"),
    [
        ([0, 0], ["CollectiveMismatch"] * 2, "clear"),
        ([0, 0], ["CollectiveMismatch", "nothing"], "silent"),
        ([0, 0], ["nothing", "RuntimeError"], "silent"),
        ([0, -signal.SIGABRT], ["RuntimeError"], "aborted"),
        ([0, -signal.SIGKILL], ["CollectiveMismatch"], "hung"),
        ([0, 0], ["RuntimeError"] * 2, "unclear"),
    ],
)
def test_two_ranks_that_disagree_are_judged_by_the_worse_report(
    codes: list[int], kinds: list[str], word: str
) -> None:
    assert _word_for(codes, [report(kind) for kind in kinds]) == word


def test_an_error_at_the_timeout_is_late() -> None:
    assert _word_for([0, 0], [report("RuntimeError", 1.5), report("RuntimeError")]) == "timed out"


def test_a_cell_shows_the_median_and_the_most() -> None:
    assert str(Result((0.001, 0.004, 0.2), "words")) == "4 / 200 ms, words"
    assert str(Result((), "words")) == "words"
