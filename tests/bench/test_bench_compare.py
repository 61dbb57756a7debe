"""nc10d beside other libraries: the options, the table, and each library's checked calls."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nc10d.bench import compare, peers
from nc10d.testing import run_local

Array = np.ndarray[Any, np.dtype[Any]]
PARTS = ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "exchange"]


class OnGroup:
    """A library made of a group: what `peers` asks of one, and one call can be spoilt."""

    def __init__(self, group: Any, spoilt: str = "") -> None:
        self._group = group
        self._spoilt = spoilt
        self.rank, self.size = group.rank, group.size
        self.barrier = group.barrier
        self.all_reduce = self._spoiling("all_reduce", group.all_reduce)
        self.all_gather = self._spoiling("all_gather", group.all_gather_into_tensor)
        self.reduce_scatter = self._spoiling("reduce_scatter", group.reduce_scatter_tensor)
        self.broadcast = self._spoiling("broadcast", lambda x: group.broadcast(x, 0))
        self.all_to_all = self._spoiling("all_to_all", group.all_to_all_single)
        self.exchange = self._spoiling("exchange", self._exchange)

    def _spoiling(self, name: str, call: Callable[..., None]) -> Callable[..., None]:
        def spoilt(out: Array, *arguments: Array) -> None:
            call(out, *arguments)
            if name == self._spoilt and out.size > 1:  # not the sum of the counts of mistakes
                out[-1] += 1

        return spoilt

    def _exchange(self, out: Array, x: Array) -> None:
        if self.rank == 0:
            self._group.send(x, 1)
            self._group.recv(out, 1)
        elif self.rank == 1:
            self._group.recv(out, 0)
            self._group.send(x, 0)

    def close(self) -> None:
        """Nothing to do."""


@pytest.mark.parametrize("name", PARTS)
def test_a_librarys_mistakes_are_counted(name: str) -> None:
    def wrong(group: Any, spoilt: str) -> int:
        library: Any = OnGroup(group, spoilt)
        _, check = peers.prepare(library, name, 96)
        return check()

    assert run_local(wrong, 2, ["", ""]) == [0, 0]
    assert run_local(wrong, 2, [name, ""]) == [1, 0]


def test_a_measurement_is_the_slowest_ranks_mean_and_the_wrong_elements_of_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "BUDGET", 0.0)

    def measured(group: Any) -> tuple[float, int]:
        return peers.measure(OnGroup(group, "broadcast"), "broadcast", 64)

    (seconds, wrong), other = run_local(measured, 2)
    assert seconds > 0
    assert wrong == 2
    assert other == (seconds, wrong)


def test_options_name_the_peers_and_the_sizes() -> None:
    options = compare.parse(["--compare", "gloo,openmpi", "--ranks", "3"])
    assert options.libraries == ["nc10d", "gloo", "openmpi"]
    assert options.ranks == 3
    assert set(PARTS) | {"barrier"} == set(compare.COLLECTIVES) <= set(dir(peers.Library))


@pytest.mark.parametrize("library", peers.LIBRARIES)
def test_every_library_has_its_starter(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NC10D_OPENMPI_RUN", "/opt/ompi/bin/mpirun")
    words = compare.command(library, 4)
    assert "4" in words
    assert words[-2:] == ["-m", "nc10d.bench.peers"]
    assert sys.executable in words
    assert (words[0] == "/opt/ompi/bin/mpirun") == (library == "openmpi")


def test_the_table_has_medians_their_range_and_the_ratio_to_the_best_peer() -> None:
    cells: list[compare.Cell] = [("all_reduce", 8), ("barrier", 0)]
    samples: compare.Samples = {
        "nc10d": {cells[0]: [1e-6, 4e-6, 2e-6], cells[1]: [1e-6]},
        "gloo": {cells[0]: [8e-6] * 3, cells[1]: [5e-7]},
        "mpich": {cells[0]: [6e-6] * 3, cells[1]: [2e-6]},
    }
    head, rule, *rows = compare.table(samples, cells)
    assert head == "| collective | bytes | nc10d µs | gloo µs | mpich µs | best/nc10d |"
    assert rule.count("---|") == head.count("|") - 1
    assert rows[0] == "| all_reduce | 8 | 2.0 (1.0–4.0) | 8.0 (8.0–8.0) | 6.0 (6.0–6.0) | 3.00 |"
    assert rows[1].endswith("| 0.50 |")


def test_a_library_that_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NC10D_OPENMPI_RUN", "/nowhere/mpirun")
    with pytest.raises(SystemExit, match="openmpi: /nowhere/mpirun is not installed"):
        compare.main(["--compare", "openmpi"])


def test_a_job_that_fails_is_told_with_its_last_words() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)gloo: .*KeyError.*'no_such_thing'"):
        compare.run_job("gloo", 1, [("no_such_thing", 8)], 100.0)


def test_the_comparison_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "samples.json"
    few = ["--rounds", "1", "--max-bytes", "8", "--collectives", "all_reduce,barrier"]
    assert compare.main(["--compare", "gloo,mpich", *few, "--json", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "| all_reduce | 8 | " in shown
    assert "| barrier | 0 | " in shown
    samples = json.loads(out.read_text())
    assert {name: len(rows) for name, rows in samples.items()} == dict.fromkeys(
        ["nc10d", "gloo", "mpich"], 2
    )
