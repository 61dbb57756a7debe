"""The race check of the debug level DETAIL on device arrays, over the emulators."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from device_ranks import afresh, full, ones, value
from emulated import emulated_ranks, needs_emulators

from nc10d.group.process_group import ProcessGroup
from nc10d.testing.ranks import Ranks

pytestmark = needs_emulators


def results_are_as_without_the_check(group: ProcessGroup) -> None:
    x, out, inp = ones(group, 8), full(group, 0.0, 16), full(group, 1.0 + group.rank, 8)
    first = group.all_reduce(x, async_op=True)
    second = group.all_reduce(x, async_op=True)  # waits for the first, which shares its memory
    first.wait()
    second.block_current_stream()
    assert value(x) == 4.0
    group.all_gather_into_tensor(out, inp, async_op=True).wait_blocking()
    assert (value(out[:8]), value(out[8:]), value(inp)) == (1.0, 2.0, 1.0 + group.rank)
    done = group.broadcast(x, 1, async_op=True).get_future().then(lambda _: "done")
    assert done.wait() == "done"
    group.all_reduce(x)
    assert value(x) == 8.0


def a_write_in_flight_is_an_error(group: ProcessGroup) -> None:
    x = ones(group, 8)
    work = group.all_reduce(x, async_op=True)
    x.fill_from(np.full(8, 5.0, np.float32))
    with pytest.raises(ValueError, match="all_reduce: an array of 8 float32 was written to while"):
        work.wait()
    assert value(x) == 5.0
    group.all_reduce(x)
    assert value(x) == 10.0


def a_read_in_flight_is_none(group: ProcessGroup) -> None:
    """The array has its old elements until the operation is waited for."""
    x = ones(group, 8)
    work = group.all_reduce(x, async_op=True)
    assert value(x) == 1.0
    work.wait()
    assert value(x) == 2.0


LAWS = [results_are_as_without_the_check, a_write_in_flight_is_an_error, a_read_in_flight_is_none]


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with emulated_ranks(NC10D_DEBUG="DETAIL") as ranks:
        yield ranks


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_device_arrays_in_flight_are_watched(two: Ranks, law: Callable[..., None]) -> None:
    two.run(afresh, [law] * 2)
