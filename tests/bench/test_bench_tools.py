"""The smaller benchmarks run, and print their rows."""

import re

import pytest

from benchmarks.micro import engine, imports


@pytest.mark.slow
def test_each_floor_of_a_call_has_its_figure(capsys: pytest.CaptureFixture[str]) -> None:
    assert engine.main([]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert re.fullmatch(r"# 2 ranks on \d+ cores, load \d+\.\d\d", head)
    found = [re.fullmatch(r"(\S.*?) +(-?\d+\.\d\d) us", row) for row in rows]
    figures = {match[1]: float(match[2]) for match in found if match}
    assert len(figures) == len(rows) == 12
    more = figures.pop("more than of an ndarray")
    assert all(value > 0 for value in figures.values())
    assert more < figures["of a torch tensor"]


def test_imports_are_reported_beside_numpys(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imports, "ROUNDS", 1)
    assert imports.main([]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row[:40].rstrip() for row in rows] == list(imports.STATEMENTS)
    assert rows[0].endswith("1.00")
    assert all(re.fullmatch(r" +\d+\.\d ms +\d+\.\d\d", row[40:]) for row in rows)
