"""Formation: a group exists on all of its members or on none, whichever are late or die."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from at_once import at_once
from hypothesis import given, settings
from hypothesis import strategies as st
from jobs import Job

import nc10d as dist
from nc10d.backend.cpu.backend import CpuBackend
from nc10d.backend.cpu.bootstrap import heartbeats
from nc10d.backend.cpu.membership import formation
from nc10d.backend.cpu.membership.formation import GroupSpec, form
from nc10d.backend.cpu.native import entry_points
from nc10d.base import deadline as clocks
from nc10d.base.deadline import Deadline
from nc10d.errors import DistError, PeerLost, RendezvousError
from nc10d.group.world import current_world, own_world
from nc10d.ops import AllReduce
from nc10d.store import HashStore
from nc10d.testing import Ranks, run_ranks

NOT_THE_GROUPS = 15.0
"""Seconds. A longer wait means that the group's own timeout, 20 or 30 s, has ended it."""


def used(group: Any) -> int:
    backend = group.backend("cpu")
    assert isinstance(backend, CpuBackend)
    return backend.group.context.arena.used()


def without_rank_2(group: dist.ProcessGroup) -> str:
    """Make a group of all three ranks in which rank 2 never comes; return the error's text."""
    before = used(group)
    text = ""
    if group.rank != 2:
        with pytest.raises(RendezvousError) as caught:
            dist.new_group([1, 0, 2], timeout=0.4, sort_ranks=False)
        assert (caught.value.rank, caught.value.group) == (2, "world/1")
        text = str(caught.value)
        assert used(group) == before
        assert len(current_world().groups) == 1
    else:
        group.agree_on_call("new_group([1, 0, 2])")  # it goes on as if it had called
    after = dist.new_group([0, 1, 2])
    assert isinstance(after, dist.ProcessGroup)
    after.barrier()
    return text


def test_a_member_that_never_arrives_is_named_and_everything_is_given_back() -> None:
    texts = run_ranks(without_rank_2, 3)
    assert texts[0] == texts[1]
    assert re.fullmatch(
        r"rank [01] .*timed out after 0\.\d s at .*test_formation\.py:\d+: "
        r"rank 2 did not join the group 'world/1'.*",
        texts[0],
    )


def late_for_a_split(group: dist.ProcessGroup) -> tuple[float, str]:
    """Ranks 1 and 3 split off, and only rank 1 calls."""
    start = time.monotonic()
    if group.rank != 1:
        return 0.0, ""
    with pytest.raises(RendezvousError) as caught:
        group.split_group([[1, 3]], timeout=0.3)
    return time.monotonic() - start, str(caught.value)


def test_a_missing_member_is_named_by_its_global_rank_too() -> None:
    took, text = run_ranks(late_for_a_split, 4)[1]
    assert "rank 1 (global rank 3) did not join the group 'world/split1-1'" in text
    assert 0.3 <= took < NOT_THE_GROUPS


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(3, timeout=20.0) as three:
        yield three


def try_to_form(group: Any, store: Any, name: str, timeout: float, late: float) -> str:
    """Form a group whose members have different timeouts and come at different times."""
    host = group.backend("cpu").group.context
    before = host.arena.used()
    assert not threading.Event().wait(late)
    deadline = Deadline.after(timeout)
    try:
        areas = form(GroupSpec(host, name, range(3), group.rank, store, deadline, lambda: None))
    except DistError as error:
        assert host.arena.used() == before
        return f"{type(error).__name__}: {error}"
    assert host.arena.used() > before
    host.arena.free(areas.offset)
    return "formed"


@settings(max_examples=25, deadline=None)
@given(
    timeouts=st.tuples(*[st.floats(0.0, 0.03)] * 3), lates=st.tuples(*[st.floats(0.0, 0.03)] * 3)
)
def test_all_members_get_the_same_answer_however_close_it_is(
    ranks: Ranks, timeouts: tuple[float, ...], lates: tuple[float, ...]
) -> None:
    answers = ranks.run(try_to_form, [HashStore()] * 3, ["g"] * 3, timeouts, lates)
    assert len(set(answers)) == 1, answers


def slot_sizes(group: dist.ProcessGroup) -> list[int]:
    """Return the bytes of the staging slots of overlapping groups."""
    found = [dist.new_group(ranks) for ranks in ([0, 1], [0, 2], [0, 1, 2], [1, 2])]
    backends = [made.backend("cpu") for made in found if group.rank in getattr(made, "ranks", ())]
    for backend in backends:
        sums = np.ones(100_000)
        backend.launch((AllReduce(sums),), 20.0, False)
        assert (sums == backend.size).all()
    return [backend.group.memory.slot_bytes for backend in backends]


def test_a_group_has_large_staging_if_all_its_ranks_have_few_groups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(formation, "LARGE_STAGING_GROUPS", 3)
    large, small = formation.LARGE_SLOT, formation.SMALL_SLOT
    # Rank 0 is in three groups when [0, 1, 2] is formed; 1 and 2 are then when [1, 2] is.
    wanted = [[large, large, small], [large, small, small], [large, small, small]]
    assert run_ranks(slot_sizes, 3) == wanted


def leave_early(group: dist.ProcessGroup) -> float:
    """Rank 1 destroys the default group while rank 0 makes another."""
    if group.rank == 1:
        dist.destroy_process_group()
        return 0.0
    start = time.monotonic()
    with pytest.raises(PeerLost, match="rank 1 cannot join the group 'world/1': it has left"):
        dist.new_group([0, 1], timeout=20.0)
    return time.monotonic() - start


def test_a_member_that_has_left_is_not_waited_for() -> None:
    assert run_ranks(leave_early, 2)[0] < NOT_THE_GROUPS


DYING = """
group = join()
group.barrier()
if rank == 2:
    say("waits")
    hear()
else:
    say("forms")
    start = time.monotonic()
    try:
        dist.new_group([0, 1, 2])
    except dist.PeerLost as error:
        say(f"{time.monotonic():.3f} {error.rank} {error}")
"""


def test_a_death_while_a_group_forms_is_noticed_at_once_by_all() -> None:
    with Job(DYING, size=3) as processes:
        for process in processes:
            process.line()
        for process in processes[:2]:
            assert process.asleep("futex")  # another thread forms the group
        processes[2].kill()
        killed = time.monotonic()
        for process in processes[:2]:
            when, rank, texts = process.line().split(maxsplit=2)
            assert rank == "2"
            assert "killed by signal 9" in texts
            assert float(when) - killed < NOT_THE_GROUPS


TOLD_AND_GONE = """
from nc10d.backend.cpu.backend import check_parent

group = join()
whole = group.backend("cpu").group
group.barrier()
say("together")
if rank == 2:
    hear()
elif rank == 0:
    try:
        group.barrier()
    except dist.PeerLost:
        pass  # it exits
else:
    while whole.context.lost([0]) is None or whole.context.lost([2]) is None:
        time.sleep(0.001)
    try:
        check_parent(whole, "another", [0, 1, 2])
    except dist.PeerLost as error:
        say(f"{error.rank} {error}")
"""


def test_a_member_that_has_exited_because_of_a_death_is_not_blamed() -> None:
    with Job(TOLD_AND_GONE, size=3) as processes:
        for process in processes:
            process.line()
        processes[2].kill()
        rank, text = processes[1].line().split(maxsplit=1)
        assert rank == "2"
        assert "killed by signal 9" in text


INTERRUPTED = """
from nc10d.backend.cpu.membership import formation

group, arrive = join(), formation.arrive
group.barrier()


def gate(*arguments):
    say("forms")
    return arrive(*arguments)


formation.arrive = gate
if rank == 0:
    try:
        dist.new_group([0, 1, 2])
    except KeyboardInterrupt:
        say("interrupted")
        hear()
elif rank == 1:
    try:
        dist.new_group([0, 1, 2])
    except dist.Aborted as error:
        say(error)
else:
    say("stays away")
    hear()
"""


def test_an_interrupt_while_a_group_forms_ends_it_for_all() -> None:
    with Job(INTERRUPTED, size=3) as processes:
        for process in processes:
            process.line()
        assert processes[0].asleep("futex")
        processes[0].kill(2)
        assert processes[0].line() == "interrupted"
        assert processes[1].line().startswith("rank 0 gave up while the group 'world/1' formed")


DEAD_ON_ARRIVAL = """
from nc10d.backend.cpu.membership import formation

group = join()
if rank == 0:
    areas, host = formation.GroupMemory, group.backend("cpu").group.context

    def gate(*arguments):
        # The group is formed, and this rank has not looked at it yet.
        say("formed")
        while host.lost([1]) is None:
            time.sleep(0.001)
        return areas(*arguments)

    formation.GroupMemory = gate
    after = dist.new_group([0, 1])
    try:
        after.barrier(timeout=20.0)
    except dist.PeerLost as error:
        say(error)
else:
    kept = dist.new_group([0, 1])
    say("made")
    hear()
"""


def test_a_member_that_died_right_after_the_group_was_formed_is_not_waited_for() -> None:
    with Job(DEAD_ON_ARRIVAL) as processes:
        for process in processes:
            process.line()
        killed = time.monotonic()
        processes[1].kill()
        texts = processes[0].line()
        assert texts.startswith("rank 1 of group 'world/1' is lost: killed by signal 9")
        assert time.monotonic() - killed < NOT_THE_GROUPS


def test_ranks_that_compile_for_longer_than_the_timeout_form_their_group(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late, monotonic, store = [0.0], clocks.monotonic, HashStore()
    compiled = threading.Barrier(2, lambda: late.__setitem__(0, 1000.0))
    for module in (clocks, heartbeats):
        monkeypatch.setattr(module, "monotonic", lambda: monotonic() + late[0])
    monkeypatch.setattr(entry_points, "prepare", compiled.wait)

    def live(rank: int) -> None:
        with own_world():
            dist.init_process_group("cpu", store=store, rank=rank, world_size=2, timeout=60.0)
            x = np.ones(3)
            dist.all_reduce(x)
            assert (x == 2).all()
            dist.destroy_process_group()

    at_once(lambda: live(0), lambda: live(1))


def test_a_rank_that_ends_while_it_compiles_is_told_at_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compilers, store = [entry_points.prepare, "the compiler is killed"], HashStore()

    def prepare() -> None:
        compile_all = compilers.pop()
        if not callable(compile_all):
            raise SystemExit(compile_all)
        compile_all()

    monkeypatch.setattr(entry_points, "prepare", prepare)
    errors: list[BaseException] = []

    def live(rank: int) -> None:
        with own_world(), pytest.raises((SystemExit, RendezvousError)) as caught:
            dist.init_process_group("cpu", store=store, rank=rank, world_size=2, timeout=3.0)
        errors.append(caught.value)

    at_once(lambda: live(0), lambda: live(1))
    assert isinstance(errors[0], SystemExit)
    assert re.search("timed out after 3 s.*did not get ready", str(errors[1]))
