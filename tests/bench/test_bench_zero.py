"""The table of steps of divided optimizers: its figures are those of the measured times."""

import pytest

from benchmarks.micro import zero


def test_a_row_shows_medians_and_ratios():
    seconds = {zero.PLAIN: 1.0, zero.TORCH: 2.0, zero.OURS: 1.5}
    seconds |= {zero.TORCH + zero.VIEWS: 4.0, zero.OURS + zero.VIEWS: 1.0}
    times = {way: [9.0, value / 1e3, 0.0] for way, value in seconds.items()}
    row = zero.line(zero.Size(2, 1000, True, 1), 2, times)
    assert row == "| 2.0 M in 4 | 2 | 1.00 | 2.00 | 1.50 | 4.00 | 1.00 | 0.75 | 0.25 |"
    assert zero.HEADER.count("|") == 2 * (row.count("|"))


@pytest.mark.long
def test_the_table_runs_and_all_ways_lead_to_the_same_parameters(monkeypatch, capsys):
    monkeypatch.setattr(zero, "SIZES", [zero.Size(3, 8, True, 1)])
    assert zero.main(["--ranks", "2", "--rounds", "1", "--steps", "1"]) == 0
    assert "in 6 | 2 |" in capsys.readouterr().out
