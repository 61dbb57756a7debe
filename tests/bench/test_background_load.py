"""The load of other processes: the machine's time, less this process's and its children's."""

import pytest

from benchmarks import background_load
from benchmarks.background_load import BackgroundLoad, busy

STAT = "cpu  100 10 40 5000 900 3 7 20 0 0\ncpu0 50 5 20 2500 450 1 3 10 0 0\n"


def test_waiting_is_not_work_and_stolen_time_is() -> None:
    assert busy(STAT, 100) == (100 + 10 + 40 + 3 + 7 + 20) / 100


def test_a_file_of_another_kind_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"begins with .'intr'., not with cpu"):
        busy("intr 5", 100)


@pytest.mark.parametrize(("whole", "own", "cores"), [(10.0, 4.0, 3.0), (4.0, 4.1, 0.0)])
def test_the_rest_of_the_machines_time_is_the_load_of_others(
    whole: float, own: float, cores: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two seconds, in which the machine worked `whole` seconds and this process `own`."""
    readings = {"_whole": iter([100.0, 100.0 + whole]), "own": iter([7.0, 7.0 + own])}
    for name, values in readings.items():
        monkeypatch.setattr(background_load, name, lambda values=values: next(values))
    clock = iter([50.0, 52.0])
    monkeypatch.setattr(background_load.time, "monotonic", lambda: next(clock))
    with BackgroundLoad() as load:
        pass
    assert load.cores == pytest.approx(cores)
