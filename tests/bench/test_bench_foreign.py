"""The load of others: the machine's time, less one's own and one's children's."""

from __future__ import annotations

import pytest

from benchmarks.compare import foreign
from benchmarks.compare.foreign import Foreign, busy

STAT = "cpu  100 10 40 5000 900 3 7 20 0 0\ncpu0 50 5 20 2500 450 1 3 10 0 0\n"


def test_waiting_is_not_work_and_stolen_time_is() -> None:
    assert busy(STAT, 100) == (100 + 10 + 40 + 3 + 7 + 20) / 100


def test_another_file_is_told() -> None:
    with pytest.raises(ValueError, match=r"begins with .'intr'., not with cpu"):
        busy("intr 5", 100)


@pytest.mark.parametrize(("whole", "mine", "cores"), [(10.0, 4.0, 3.0), (4.0, 4.1, 0.0)])
def test_foreign_load_is_what_is_left(
    whole: float, mine: float, cores: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two seconds, in which the machine worked `whole` seconds and we `mine`."""
    readings = {"_whole": iter([100.0, 100.0 + whole]), "own": iter([7.0, 7.0 + mine])}
    for name, values in readings.items():
        monkeypatch.setattr(foreign, name, lambda values=values: next(values))
    clock = iter([50.0, 52.0])
    monkeypatch.setattr(foreign.time, "monotonic", lambda: next(clock))
    with Foreign() as load:
        pass
    assert load.cores == pytest.approx(cores)
