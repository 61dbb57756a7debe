"""Each library is asked for the same collectives, and its mistakes are counted."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.compare import call_times, coalescing_ways
from benchmarks.compare.compare import COLLECTIVES, GLOO_LACKS, MORE, parse
from benchmarks.libraries import NAMES, make
from benchmarks.libraries.base import both_ways, there_and_back
from benchmarks.libraries.c10d import c10d_calls, object_calls
from benchmarks.libraries.tcp import SHARES, cut
from nc10d.testing import run_local

Array = np.ndarray[Any, np.dtype[Any]]
PARTS = [name for name in COLLECTIVES if name != "barrier"]


class OnGroup:
    """A library on a group, which can spoil a collective's result."""

    def __init__(self, group: Any, spoilt: str = "") -> None:
        self.rank, self.size, self.dist = group.rank, group.size, group
        self._spoilt = spoilt

    def bind(self, out: Array, x: Array) -> dict[str, Callable[[], object]]:
        calls = c10d_calls(self.dist, self.rank, self.size, out, x)
        calls |= {"scan": partial(self.dist.scan, out), "exscan": partial(self.dist.exscan, out)}
        if self._spoilt and out.size > 1:  # but not the all_reduce that counts mistakes
            calls[self._spoilt] = self._spoil(calls[self._spoilt], out)
        return calls

    def _spoil(self, call: Callable[[], object], out: Array) -> Callable[[], object]:
        def spoilt() -> None:
            call()
            out[-1] += 1

        return spoilt

    def close(self) -> None:
        """Nothing to do."""


@given(st.sampled_from(sorted(SHARES)), st.integers(2, 5), st.integers(0, 1 << 27), st.data())
def test_the_bytes_of_a_plain_copy_lie_in_its_array(
    name: str, hosts: int, nbytes: int, data: st.DataObject
) -> None:
    host, peer = data.draw(st.permutations(range(hosts)))[:2]
    part = cut(name, hosts, host, peer, nbytes)
    assert 0 <= part.low <= part.low + part.nbytes <= part.whole <= nbytes
    assert part.nbytes == min(part.whole, int(SHARES[name](hosts, host, peer) * nbytes))
    if name in ("reduce_scatter", "all_to_all") and nbytes % hosts == 0:
        assert (part.low, part.nbytes) == (peer * nbytes // hosts, nbytes // hosts)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", PARTS)
def test_a_librarys_mistakes_are_counted(name: str, size: int) -> None:
    def wrong(group: Any, spoilt: str) -> int:
        _, _, check = call_times.prepare(OnGroup(group, spoilt), name, 96)
        return check()

    assert run_local(wrong, size, [""] * size) == [0] * size
    assert run_local(wrong, size, [name, *[""] * (size - 1)]) == [1, *[0] * (size - 1)]


def test_a_measurement_is_the_slowest_ranks_and_the_wrong_elements_of_all() -> None:
    def measured(group: Any) -> tuple[float, int]:
        return call_times.measure(OnGroup(group, "broadcast"), "broadcast", 64, 0.0)

    (seconds, wrong), other = run_local(measured, 2)
    assert seconds > 0
    assert wrong == 4  # two ranks, before and after the rounds
    assert other == (seconds, wrong)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", PARTS)
def test_arrays_can_be_written_before_each_call(world: Any, name: str) -> None:
    assert call_times.measure(OnGroup(world), name, 96, 0.0, untouched=False)[1] == 0


def test_time_before_each_call_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(call_times.time, "perf_counter", lambda: now[0])

    def measured(group: Any) -> float:
        def call() -> None:
            now[0] += 1

        def before() -> None:
            now[0] += 5

        return call_times.timed(OnGroup(group), "all_reduce", call, 0.0, before)

    assert run_local(measured, 1) == [1]


def test_time_of_another_rank_before_its_call_is_not_counted_either(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 writes for 5 seconds and calls for 1, which rank 1 sees as a call of 6."""
    clocks = threading.local()
    clock = SimpleNamespace(perf_counter=lambda: clocks.now)
    monkeypatch.setattr(call_times, "time", clock)

    def measured(group: Any) -> float:
        clocks.now = 0.0

        def passes(seconds: float) -> None:
            clocks.now += seconds

        before, call = ((5, 1), (0, 6))[group.rank]
        calls = partial(passes, call), 0.0, partial(passes, before)
        return call_times.timed(OnGroup(group), "broadcast", *calls)

    assert run_local(measured, 2) == [1, 1]


@pytest.mark.ranks(3)
def test_every_rank_learns_the_slowest_ranks_time(world: Any) -> None:
    assert call_times.slowest(OnGroup(world), [0.5, 2.0, 1.0][world.rank]) == 2.0


def test_every_library_has_every_collective_and_no_other() -> None:
    import nc10d

    x = np.zeros(2)
    calls = c10d_calls(nc10d, 0, 2, x, x) | object_calls(nc10d, 0, 2, x, x)
    assert set(calls) | GLOO_LACKS == {*COLLECTIVES, *MORE}
    assert set(COLLECTIVES) == set(SHARES)
    assert set(NAMES) == set(coalescing_ways.WAYS)
    assert [make(name).name for name in NAMES] == list(NAMES)


def logged(log: list[str], word: str) -> Callable[[], Any]:
    def record() -> Any:
        log.append(word)
        return SimpleNamespace(wait=logged(log, "wait"))

    return record


def test_the_first_rank_sends_and_its_peer_answers_or_both_send_first() -> None:
    log: list[str] = []
    send, recv = logged(log, "send"), logged(log, "recv")
    for call in (there_and_back(send, recv, True), there_and_back(send, recv, False)):
        call()
    both_ways(send, recv)()
    assert log == ["send", "recv", "recv", "send", "send", "recv", "wait"]


LOCAL_WAYS = {"blocking": coalescing_ways.blocking, "block": coalescing_ways.block}


@pytest.mark.parametrize("way", LOCAL_WAYS)
@pytest.mark.parametrize("spoilt", ["", "all_reduce"])
def test_a_way_to_reduce_many_is_checked(way: str, spoilt: str) -> None:
    import nc10d

    def wrong(group: Any) -> int:
        library: Any = OnGroup(group, spoilt)
        library.dist = nc10d
        return coalescing_ways.mistakes(library, LOCAL_WAYS[way], 32)

    spoils = bool(spoilt) and way != "block"  # a block calls the group, not the library
    found = run_local(wrong, 2)
    assert all(bool(count) == spoils for count in found), found


def test_asynchronous_calls_are_all_started_before_any_is_waited_for() -> None:
    log: list[str] = []
    dist = SimpleNamespace(all_reduce=lambda x, async_op: logged(log, f"start {x}")())
    arrays: Sequence[Any] = ["a", "b"]
    wait = coalescing_ways.separately(SimpleNamespace(dist=dist), arrays)()
    assert log == ["start a", "start b"]
    wait()
    assert log[2:] == ["wait", "wait"]


class WithObjects(OnGroup):
    """A library whose object calls are nc10d's, on the default group."""

    def bind(self, out: Array, x: Array) -> dict[str, Callable[[], object]]:
        import nc10d

        return super().bind(out, x) | object_calls(nc10d, self.rank, self.size, out, x)


@pytest.mark.parametrize("nbytes", [8, 96, 6000])
@pytest.mark.parametrize("name", MORE)
def test_lists_and_objects_end_where_the_plain_collective_ends(name: str, nbytes: int) -> None:
    def wrong(group: Any) -> int:
        _, write, check = call_times.prepare(WithObjects(group), name, nbytes)
        write()
        return check()

    for size in (2, 3):
        assert run_local(wrong, size) == [0] * size


def test_gloo_is_not_asked_for_uneven_lists(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["gloo", "--collectives", "gather_uneven"])
    assert "gloo has no gather_uneven" in capsys.readouterr().err
