"""NCCL's calls in the flight recorder and in the diagnosis of dumps, over the emulators."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from device_ranks import after, once, ones
from emulated import emulated_ranks, needs_emulators

import nc10d as dist
from nc10d import cuda
from nc10d.debug.__main__ import read
from nc10d.debug.diagnosis import diagnose, report
from nc10d.errors import DistError
from nc10d.group.flight_recorder import COMPLETED, STARTED, Entry, FlightRecorder
from nc10d.group.process_group import ProcessGroup
from nc10d.testing.ranks import Ranks

pytestmark = needs_emulators


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dumps")


@pytest.fixture(scope="module")
def two(folder: Path) -> Iterator[Ranks]:
    with emulated_ranks(NC10D_DUMP_DIR=str(folder)) as ranks:
        yield ranks


def recorded(group: ProcessGroup) -> list[Entry]:
    x = ones(group, 8)
    group.all_reduce(x)
    for _ in range(2):
        group.all_reduce(x, async_op=True).wait_blocking()
    with group.coalescing_manager():
        group.all_reduce(x)
        group.broadcast(x, 1)
    if group.rank == 0:
        group.send(x, 1, tag=7)
    else:
        group.recv(x, 0, tag=7)
    group.all_reduce(x, async_op=True).wait_blocking()
    cuda.synchronize(x.device)
    return FlightRecorder(group, "cuda").entries()


def test_calls_are_recorded_with_numbers_times_and_lines(two: Ranks) -> None:
    call = "all_reduce(dtype=float32, count=8, op=SUM)"
    block = f"coalesced(2 calls, count=16: {call}, broadcast(dtype=float32, count=8, ro..."
    for rank, entries in enumerate(two.run(recorded)):
        peer = ("send", "dst=1") if rank == 0 else ("recv", "src=0")
        message = f"{peer[0]}(dtype=float32, count=8, {peer[1]}, tag=7)"
        calls = [(one.seq, one.call) for one in entries if not one.message]
        assert calls == [(1, call), (2, call), (3, call), (4, block), (5, call)]
        assert [one.call for one in entries if one.message] == [message]
        assert {one.state for one in entries} == {COMPLETED}
        assert all(0 < one.begun <= one.ended for one in entries)
        assert all("test_nccl_records.py:" in one.site for one in entries)


def one_rank_is_missing(whole: ProcessGroup) -> Entry:
    """Rank 1 never makes the second call; its record shows it."""
    group = dist.new_group(range(2))
    assert isinstance(group, ProcessGroup)
    try:
        return _pending_call(group)
    finally:
        dist.destroy_process_group(group)


def _pending_call(group: ProcessGroup) -> Entry:
    x = ones(group, 8)
    group.all_reduce(x)
    if group.rank == 0:
        work = group.all_reduce(x, async_op=True)
        pending = FlightRecorder(group, "cuda").entries()[-1]
        once(group, "launched")
        with pytest.raises(DistError, match="enough"):
            work.wait_blocking()
        return pending
    after(group, "launched")
    group.abort("enough")
    return Entry(0, "", STARTED)


def test_dumps_of_a_failed_group_show_the_late_rank(two: Ranks, folder: Path) -> None:
    pending, _ = two.run(one_rank_is_missing)
    assert (pending.state, pending.ended) == (STARTED, 0)
    groups = {dumps[0].group: dumps for dumps in read(folder)}
    (name,) = (name for name in groups if name.endswith(" on cuda"))
    found = diagnose(groups[name])
    assert (found.late, found.last) == ([1], {0: 2, 1: 1})
    assert found.reasons[0].endswith("rank 1: enough")
    assert "all_reduce(dtype=float32, count=8, op=SUM)" in report(groups[name])
