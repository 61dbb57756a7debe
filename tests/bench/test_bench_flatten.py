"""The calls that `flatten` and `coalescing` time are right, and appear in their tables."""

from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.compare import coalescing, coalescing_ways
from benchmarks.estimates import estimate
from benchmarks.libraries.nc10d import Nc10d
from benchmarks.micro import flatten
from nc10d.testing import Ranks


def test_the_tensors_fill_the_bucket() -> None:
    sizes = flatten.counts()
    assert len(sizes) == flatten.TENSORS
    assert 4 * sum(sizes) == flatten.NBYTES
    assert min(sizes) > 0


def test_every_call_copies_and_divides_right() -> None:
    sizes = flatten.counts(8, 4000)
    arrays = [np.full(count, index + 1, np.float32) for index, count in enumerate(sizes)]
    flat = np.zeros(sum(sizes), np.float32)
    found = flatten.calls(arrays, flat, 4)
    whole = np.concatenate(arrays)
    for name, divisor in [("divide into", 4), ("torch._foreach_copy_ into", 1)]:
        if name in found:
            flat[:] = 0
            found[name]()
            assert np.array_equal(flat, whole / divisor), name
    for name in ("copy back", "torch._foreach_copy_ back"):
        if name in found:
            flat[:] = np.arange(flat.size)
            found[name]()
            assert np.array_equal(np.concatenate(arrays), flat), name
    found[flatten.MEMCPY]()
    assert (flat == 1).all()


def test_lines_have_times_and_shares_of_memcpy() -> None:
    found = {flatten.MEMCPY: estimate([1e-3]), "copy back": estimate([2e-3])}
    lines = flatten.report(found, 1_000_000)
    assert lines[1].split()[-2:] == ["2.00", "1.00"]
    assert lines[2].split()[-2:] == ["1.00", "0.50"]


def measured(group: object) -> dict[str, tuple[int, coalescing_ways.Cost]]:
    import nc10d as dist

    library, ways = Nc10d(), coalescing_ways
    library.rank, library.size = dist.get_rank(), dist.get_world_size()
    return {
        name: (ways.mistakes(library, way, 64), ways.cost(library, way, 64, 0.001))
        for name, way in ways.WAYS["nc10d"].items()
    }


def test_nc10ds_ways_are_right_and_issuing_is_a_part_of_the_wall_time() -> None:
    with Ranks(2) as ranks:
        for found in ranks.run(measured):
            assert set(found) == set(coalescing_ways.NAMES)
            for wrong, (wall, cpu, issue) in found.values():
                assert wrong == 0
                assert wall >= issue > 0
                assert cpu > 0


def test_a_table_has_a_row_for_each_measure_and_names_the_best_peer() -> None:
    costs = {"nc10d": 2e-6, "gloo": 8e-6, "mpich": 6e-6}
    found = {
        (library, way, 1024, measure): estimate([seconds])
        for library, seconds in costs.items()
        for way in coalescing_ways.NAMES
        for measure in coalescing.MEASURES
        if (library, way) != ("mpich", coalescing_ways.BLOCK)
    }
    rows = coalescing.table(found)
    assert len(rows) == 2 + 3 * (len(coalescing_ways.NAMES) + 1)
    assert rows[2].split(" | ")[-2:] == ["–", "4.00 |"]
    assert rows[-1].endswith("| 3.00 |")
    assert [row.split(" | ")[1] for row in rows[-3:]] == [coalescing.QUICKEST] * 3


def test_the_fastest_way_of_each_library_is_compared() -> None:
    wall = {("nc10d", "plan"): 2e-6, ("gloo", "block"): 9e-6, ("gloo", "flattened"): 3e-6}
    found = {(*key, 1024, "wall"): estimate([seconds]) for key, seconds in wall.items()}
    last = coalescing.table(found)[-1].split(" | ")
    assert [word.split()[0] for word in last[3:5]] == ["2.00", "3.00"]
    assert last[5] == "1.50 |"


def test_a_wrong_element_ends_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [["block", 64, 1e-6, 1e-6, 1e-6, 3]]
    monkeypatch.setattr(coalescing, "run_job", lambda *_: rows)
    options = SimpleNamespace(rounds=1, libraries=["gloo"], ranks=2, budget=1, limit=1, sizes=[64])
    with pytest.raises(RuntimeError, match="gloo, block: 3 wrong elements of 64 bytes"):
        coalescing.collect(options)  # type: ignore[arg-type]
