"""The benchmark of objects: both ways give the same object, and each row has its figures."""

import numpy as np
import pytest

from benchmarks.micro import objects
from nc10d.testing import run_local


@pytest.mark.parametrize("name", objects.OBJECTS)
def test_both_ways_give_the_object(name: str) -> None:
    value = objects.OBJECTS[name]()
    np.testing.assert_equal(objects.through_codec(value), value)
    np.testing.assert_equal(objects.through_pickle(value), value)


@pytest.mark.parametrize("way", objects.BY_BROADCAST.values())
def test_both_broadcasts_give_every_rank_the_object(way: objects.Way) -> None:
    values = [objects.settings(), None]
    assert run_local(lambda group, value: way(value), 2, values) == [objects.settings()] * 2


def test_a_row_has_both_times_and_their_ratio() -> None:
    row = objects.line("an object", "alone", {"codec": 2.0, "pickle": 5.0})
    assert row.split() == ["an", "object", "alone", "2.000", "5.000", "2.50"]
    assert len(row) == len(objects.HEADER)
