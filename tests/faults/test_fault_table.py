"""The table of faults: what it says of nc10d is what the project promises."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from typing import Any

import pytest

from nc10d.debug.faults import Cell, _judged

# The most that anybody may be late, in ms, on a machine that others use too.
LATEST = 20_000


def rows(*words: str) -> dict[str, str]:
    command = [sys.executable, "-m", "nc10d.debug.faults", "--library", "nc10d", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    cells = re.findall(r"^\| (.+?) \| (.+?) \|$", done.stdout, re.MULTILINE)
    return {what: said for what, said in cells if what != "what"}


@pytest.mark.parametrize("scale", [1, pytest.param(100, marks=pytest.mark.long)])
def test_what_is_promised_is_what_the_table_says(scale: int) -> None:
    said = rows(f"--scale={scale}")
    flood = said.pop("strangers at the store, with a token")
    assert re.fullmatch(rf"{200 * scale} strangers: [\d.]+ ms in 99 of 100, \d+ calls .*", flood)
    lost = said.pop("a host's network is lost; timeout 20 s")
    reason = "not played: network namespaces "
    assert lost.startswith(reason) or lost.endswith(f" ms, {2 * scale} of {2 * scale} are told who")
    told = {what: said_of.split(" ms, ")[-1] for what, said_of in said.items()}
    assert told == {
        "kill -9, 4 ranks": f"{30 * scale} of {30 * scale} survivors are told who",
        "SIGSTOP, timeout 1 s": f"{6 * scale} of {6 * scale} are told who",
        "Ctrl-C in a call": f"KeyboardInterrupt {5 * scale}x",
        "16 kinds of mismatched calls": f"clear {16 * scale}",
        "a store absent, mute, frozen, dead; timeout 1 s": (
            f"StoreTimeout {3 * scale}x, StoreError {scale}x"
        ),
        "destroy and exit with a call in flight": f"exit code 0 {3 * scale}x",
        "a call in a forked child": (
            f"ForkedGroupError in the child {scale}x, the parents go on {scale}x"
        ),
        "init and destroy": f"{20 * scale} cycles: nothing stays",
        "kill -9 of all ranks": f"{3 * scale} times: no files left",
        "random and changed frames": f"{20_000 * scale} frames: no crash, nothing accepted",
    }
    found = {what: re.findall(r"/ (\d+) ms", said_of) for what, said_of in said.items()}
    late = {what: int(most[0]) for what, most in found.items() if most}
    assert max(late.values()) < LATEST, late


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
def test_two_ranks_that_disagree_are_judged_by_the_worse_one(
    codes: list[int], kinds: list[str], word: str
) -> None:
    assert _judged(codes, [report(kind) for kind in kinds]) == word


def test_who_was_told_when_the_time_was_up_was_told_late() -> None:
    assert _judged([0, 0], [report("RuntimeError", 1.5), report("RuntimeError")]) == "timed out"


def test_a_cell_shows_the_median_and_the_most() -> None:
    assert str(Cell((0.001, 0.004, 0.2), "words")) == "4 / 200 ms, words"
    assert str(Cell((), "words")) == "words"
