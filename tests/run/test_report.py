"""Which failure is reported, and in which words."""

from __future__ import annotations

import dataclasses

import pytest

from nc10d.run import report
from nc10d.run.report import Exit, failure_text, first_failure, is_secondary

LOST = (
    "Traceback (most recent call last):",
    '  File "a.py", line 3, in f',
    "nc10d.errors.PeerLost: rank 2",
)
BUG = ("Traceback (most recent call last):", '  File "a.py", line 3, in f', "ValueError: boom")


def ended(rank: int, status: int, last_lines: tuple[str, ...] = ()) -> Exit:
    return Exit(rank, rank, "host", 100 + rank, status, last_lines)


def test_ranks_that_end_well_are_not_failures() -> None:
    assert first_failure([ended(0, 0), ended(1, 0)]) is None


def test_the_first_to_fail_is_reported() -> None:
    exits = [ended(3, 0), ended(2, 7), ended(1, -9)]
    assert first_failure(exits) == exits[1]


def test_a_secondary_failure_makes_way_for_its_cause() -> None:
    exits = [ended(0, 1, LOST), ended(2, 1, BUG)]
    assert first_failure(exits) == exits[1]


def test_the_first_of_only_secondary_failures_is_reported() -> None:
    exits = [ended(0, 1, LOST), ended(1, 1, LOST)]
    assert first_failure(exits) == exits[0]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (LOST, True),
        ((*LOST, "    which was in all_reduce 41", ""), True),
        (("Aborted", ""), True),
        (BUG, False),
        ((*LOST, *BUG), False),
        ((), False),
    ],
)
def test_a_secondary_failure_is_recognised_by_its_last_error(
    lines: tuple[str, ...], expected: bool
) -> None:
    assert is_secondary(ended(0, 1, lines)) is expected


@pytest.mark.parametrize(
    ("status", "words", "code"),
    [(3, "exit code 3", 3), (-9, "SIGKILL", 137), (-15, "SIGTERM", 143), (-40, "signal 40", 168)],
)
def test_the_report_gives_the_rank_how_it_ended_and_its_last_lines(
    status: int, words: str, code: int
) -> None:
    end = ended(2, status, BUG)
    assert end.exit_code == code
    text = failure_text(end)
    assert f"rank 2 failed with {words} (local rank 2, host host, pid 102)" in text
    assert text.endswith("\nnc10d-run: a.py:3: ValueError: boom\n")
    unseen = failure_text(dataclasses.replace(end, shown=False))
    assert unseen.endswith(
        "    Traceback (most recent call last):\n"
        '      File "a.py", line 3, in f\n    ValueError: boom\n'
    )


def test_without_a_traceback_the_last_lines_are_shown() -> None:
    text = failure_text(ended(0, 7, ("error: x", "about to fail")))
    assert text.endswith("last lines of its stderr:\n    error: x\n    about to fail\n")


def test_the_line_is_the_programs_not_a_librarys() -> None:
    package = report.__file__.removesuffix("run/report.py")
    libraries = f"{package}torch/ddp.py", "/x/lib/python3.11/site-packages/torch/nn/module.py"
    frames = [f'  File "{name}", line 7, in f' for name in ("/x/train.py", *libraries)]
    lines = [BUG[0], '  File "earlier.py", line 1, in f', "", BUG[0], *frames, "RuntimeError: no"]
    assert report.cause(lines) == "/x/train.py:7: RuntimeError: no"
    assert (
        report.cause([BUG[0], frames[2], "RuntimeError: no"])
        == f"{libraries[1]}:7: RuntimeError: no"
    )


def test_a_message_of_several_lines_is_repeated_in_part() -> None:
    lines = (*BUG, *(f"  more {n}" for n in range(9)))
    text = failure_text(ended(0, 1, lines))
    assert text.splitlines()[1:] == ["nc10d-run: a.py:3: ValueError: boom", *lines[3:6]]
