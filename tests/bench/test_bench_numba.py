"""The table of calls in compiled code measures both libraries, and finds wrong results."""

from typing import Any

import pytest

from benchmarks.compare import numba_calls


@pytest.mark.slow
def test_both_libraries_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert numba_calls.main(["--rounds", "1", "--sizes", "8", "--budget", "0.001"]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[3:]]
    assert tuple(row[0] for row in cells) == numba_calls.CALLS
    assert all(float(row[2].split()[0]) > 0 < float(row[3].split()[0]) for row in cells)


def test_a_wrong_result_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def job(*_: Any) -> list[list[Any]]:
        return [["all_reduce", 8, 1e-6, 1.0]]

    monkeypatch.setattr(numba_calls, "run_job", job)
    with pytest.raises(RuntimeError, match="all_reduce: wrong elements of 8 bytes"):
        numba_calls.main(["--rounds", "1"])
