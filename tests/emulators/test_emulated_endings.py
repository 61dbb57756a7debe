"""An end of a communicator waits for the device, for graphs and for the node, as in NCCL."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from aside import Aside
from driving import Gpu, Nccl
from emulated import needs_emulators
from nccl_world import World, fresh

from nc10d.group.process_group import ProcessGroup
from nc10d.testing import Ranks

SIZE, THREAD_LOCAL = 2, 1

pytestmark = needs_emulators


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(SIZE, "processes", "fake") as found:  # only the group's store is used
        yield found


# The device


def two_stuck(group: ProcessGroup) -> tuple[World, int]:
    """Return a World whose communicator, and a second one, wait for rank 1 in vain."""
    here = fresh(group)
    other = here.nccl.init(group)
    if group.rank == 0:
        here.add_up()
        here.add_up(other, here.gpu.stream())
    return here, other


def end_both(here: World, other: int, end: Callable[[World, int], bool]) -> bool:
    """Let rank 0 end both communicators, then rank 1 its own; return rank 0's answer."""
    seen = end(here, other) if here.group.rank == 0 else False
    key = f"ended {end.__name__}"
    if here.group.rank == 0:
        here.group.store.set(key, "")
        return seen
    here.group.store.wait([key])
    for comm in (here.comm, other):
        here.nccl("ncclCommAbort", comm)
    return seen


def one_after_the_other(here: World, other: int) -> bool:
    first = Aside(lambda: here.nccl("ncclCommAbort", here.comm))
    stuck = first.is_stuck()
    here.nccl("ncclCommAbort", other)  # now nothing is on the device that does not end
    first.join()
    return stuck


def as_a_group(here: World, other: int) -> bool:
    here.nccl("ncclGroupStart")
    here.nccl("ncclCommAbort", here.comm)
    here.nccl("ncclCommAbort", other)
    here.nccl("ncclGroupEnd")
    return True


def as_a_group_where_there_is_none(here: World, other: int) -> bool:
    def group_of_one() -> None:
        here.nccl("ncclGroupStart")
        here.nccl("ncclCommAbort", here.comm)
        reached.append("the group's end")
        here.nccl("ncclGroupEnd")

    reached: list[str] = []
    os.environ["NC10D_EMULATED_NCCL_VERSION"] = "22105"
    first = Aside(group_of_one)
    stuck = first.is_stuck() and not reached
    here.nccl("ncclCommAbort", other)
    first.join()
    del os.environ["NC10D_EMULATED_NCCL_VERSION"]
    return stuck


def aborts(group: ProcessGroup, end: Callable[[World, int], bool]) -> bool:
    return end_both(*two_stuck(group), end)


@pytest.mark.parametrize("end", [one_after_the_other, as_a_group, as_a_group_where_there_is_none])
def test_an_abort_waits_for_all_that_is_on_its_device(
    ranks: Ranks, end: Callable[[World, int], bool]
) -> None:
    assert ranks.run(aborts, [end] * SIZE)[0]


# Graphs


def capture(gpu: Gpu, launch: Callable[[int], object]) -> tuple[int, int]:
    """Return a graph and its executable."""
    stream = gpu.stream()
    gpu("cuStreamBeginCapture", stream, THREAD_LOCAL)
    launch(stream)
    graph = gpu.end_capture(stream)
    return graph, gpu.out("cuGraphInstantiate", graph, 0)


def captured_end(group: ProcessGroup, name: str) -> list[bool]:
    """End a communicator with a live graph, and destroy the graph's two parts meanwhile."""
    gpu, nccl = Gpu(), Nccl()
    comm = nccl.init_rank(1, nccl.unique_id(), 0, blocking=True)[0]
    at = gpu.put(np.ones(4))
    call = "ncclAllReduce", at, at, 4, 8, 0, comm
    graph, runs = capture(gpu, lambda stream: nccl(*call, stream))
    end = Aside(lambda: nccl(name, comm))
    stuck = [end.is_stuck()]
    gpu("cuGraphDestroy", graph)
    stuck.append(end.is_stuck())
    gpu("cuGraphExecDestroy", runs)
    end.join()
    return stuck


@pytest.mark.parametrize("name", ["ncclCommDestroy", "ncclCommAbort"])
def test_an_end_waits_for_the_graphs_that_have_its_launches(name: str) -> None:
    with Ranks(1, "processes", "fake") as one:
        assert one.run(captured_end, [name]) == [[True, True]]


def broken_capture(group: ProcessGroup) -> None:
    """A capture that fails lets the communicator go."""
    gpu, nccl = Gpu(), Nccl()
    comm = nccl.init_rank(1, nccl.unique_id(), 0, blocking=True)[0]
    at, stream = gpu.put(np.ones(4)), gpu.stream()
    gpu("cuStreamBeginCapture", stream, THREAD_LOCAL)
    nccl("ncclAllReduce", at, at, 4, 8, 0, comm, stream)
    assert gpu.code("cuCtxSynchronize")
    assert gpu.code("cuStreamEndCapture", stream, np.zeros(1, np.uint64).ctypes.data)
    Aside(lambda: nccl("ncclCommDestroy", comm)).join()


def test_a_broken_capture_holds_no_communicator() -> None:
    with Ranks(1, "processes", "fake") as one:
        one.run(broken_capture)


# The node


def destroy(group: ProcessGroup, hosts: bool) -> bool:
    """Rank 0 destroys first; return whether that came back only with rank 1's call."""
    here = fresh(group, hosts)
    stuck, key = False, f"rank 0 destroys, {hosts}"
    if group.rank:
        group.store.wait([key])
        here.nccl("ncclCommDestroy", here.comm)
        return False
    end = Aside(lambda: here.nccl("ncclCommDestroy", here.comm))
    stuck = end.is_stuck()
    group.store.set(key, "")
    end.join()
    return stuck


@pytest.mark.parametrize("hosts", [False, True])
def test_a_destroy_waits_for_the_ranks_of_its_host(ranks: Ranks, hosts: bool) -> None:
    assert ranks.run(destroy, [hosts] * SIZE)[0] is not hosts


def destroy_beside_the_dead(group: ProcessGroup) -> None:
    here = fresh(group)
    if group.rank:
        os._exit(3)
    here.nccl("ncclCommDestroy", here.comm)


def test_a_destroy_does_not_wait_for_the_dead() -> None:
    with (
        Ranks(SIZE, "processes", "fake") as ranks,
        pytest.raises(RuntimeError, match="the process ended with code 3") as error,
    ):
        ranks.run(destroy_beside_the_dead)
    assert "rank 0" not in str(error.value)


# Deaths


def one_leaves(group: ProcessGroup, ends: str) -> None:
    """Rank 0 waits for a rank of its host that has gone, and is not told."""
    here = fresh(group)
    if group.rank:
        if ends:
            here.nccl(ends, here.comm)
            return
        os._exit(3)
    here.add_up()
    stuck = Aside(lambda: here.gpu.enter()("cuStreamSynchronize", here.stream)).is_stuck()
    state = here.nccl.state(here.comm)
    here.nccl("ncclCommAbort", here.comm)
    assert (stuck, state) == (True, 0)


def test_nobody_of_a_host_is_told_that_a_rank_of_it_has_aborted(ranks: Ranks) -> None:
    ranks.run(one_leaves, ["ncclCommAbort"] * SIZE)


def test_nobody_of_a_host_is_told_that_a_rank_of_it_has_died() -> None:
    with (
        Ranks(SIZE, "processes", "fake") as ranks,
        pytest.raises(RuntimeError, match="the process ended with code 3") as error,
    ):
        ranks.run(one_leaves, [""] * SIZE)
    assert "rank 0" not in str(error.value)
