"""The cost of communication in a step: the difference to a step without it, round by round."""

import pytest

from benchmarks.micro import ddp


def test_ratios_are_of_added_times_and_rounds_are_compared_in_pairs():
    times = {
        "alone": [1.0, 5.0, 1.0],
        "torch over gloo": [4.0, 8.0, 4.0],
        "nc10d": [2.0, 6.0, 2.0],
        "alone, CPU": [1.0] * 3,
        "torch over gloo, CPU": [3.0] * 3,
        "nc10d, CPU": [2.0] * 3,
    }
    row = ddp.line(ddp.Size(2, 1000, True, 1), 2, times)
    assert row == "| 2.0 M in 4 | 2 | 1000.00 | 3000.00 | 1000.00 | 0.33 | 0.50 | yes |"


@pytest.mark.long
def test_the_table_has_a_row_for_each_size(monkeypatch, capsys):
    monkeypatch.setattr(ddp, "SIZES", [ddp.Size(3, 8, True, 4), ddp.Size(2, 16, False, 4)])
    assert ddp.main(["--ranks", "2", "--rounds", "2", "--steps", "2"]) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| 0.0 M")]
    assert [row[:11] for row in rows] == ["| 0.0 M in ", "| 0.0 M in "]
