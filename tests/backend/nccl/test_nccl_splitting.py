"""New groups of a group on its device are split off its communicator, over the emulators."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from device_ranks import LONG, device, ones, value
from emulated import emulated_ranks, needs_emulators

import nc10d as dist
from nc10d import cuda
from nc10d.backend.backend_table import BackendTable
from nc10d.backend.nccl.backend import NcclBackend
from nc10d.backend.nccl.bindings.library import Library
from nc10d.backend.nccl.comm.communicator import Communicator
from nc10d.backend.nccl.comm.options import NCCLConfig, NcclOptions
from nc10d.backend.nccl.device_group import DeviceGroup
from nc10d.errors import Aborted, NCCLError, RendezvousError
from nc10d.group.process_group import ProcessGroup
from nc10d.testing.ranks import Ranks

pytestmark = needs_emulators
Law = Callable[[ProcessGroup], None]
INIT, SPLIT = "ncclCommInitRankConfig", "ncclCommSplit"


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count this rank's calls of NCCL by name."""
    calls: Counter[str] = Counter()
    real = Library.call

    def call(self: Library, name: str, *arguments: object) -> int:
        calls[name] += 1
        return real(self, name, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Library, "call", call)
        yield calls


def bound(group: ProcessGroup, **more: Any) -> ProcessGroup:
    device_id = f"cuda:{device(group)}"
    mine = dist.new_group(range(group.size), device_id=device_id, **more)
    assert isinstance(mine, ProcessGroup)
    group.barrier()  # a law may abort it, which would end a rank that still binds its device
    return mine


def parts(group: ProcessGroup) -> list[list[int]]:
    """Return two lists of all ranks."""
    return [[0], [*range(1, group.size)]]


def split(group: ProcessGroup, lists: list[list[int]], **more: Any) -> ProcessGroup:
    made = group.split_group(lists, **more)
    assert made is not None
    return made


def works(group: ProcessGroup) -> None:
    """Each kind of operation gives what it must."""
    size, rank, backend = group.size, int(group.rank), group.backend("cuda")
    gpu = backend.device if isinstance(backend, NcclBackend) else rank

    def array(filler: float, count: int = 100) -> cuda.DeviceArray:
        return cuda.to_device(np.full(count, filler, np.float32), gpu)

    x, y, gathered, got = array(1.0 + rank), array(rank), array(-1.0, size), array(-1.0)
    group.all_reduce(x)
    assert value(x) == size * (size + 1) / 2
    group.broadcast(y, size - 1)
    assert value(y) == size - 1
    group.all_gather_into_tensor(gathered, array(rank, 1))
    cuda.synchronize(gpu)
    assert cuda.to_host(gathered).tolist() == [*range(size)]
    if size > 1:
        send: Any = group.isend(y, (rank + 1) % size)
        group.recv(got, (rank - 1) % size)
        send.wait()
        assert value(got) == size - 1


def on_its_device(group: ProcessGroup) -> None:
    """Give the default group its device, as init_process_group's `device_id`."""
    group.device_id = f"cuda:{device(group)}"
    group.make_backends()


def new_groups_of_all_ranks_make_no_init(group: ProcessGroup) -> None:
    parent = bound(group)
    cuda.synchronize(device(group))
    with counted() as calls:
        child = split(parent, parts(group))
        other = split(parent, [[*range(group.size)]])
        grandchild = split(other, parts(group)[::-1])
    assert (calls[INIT], calls[SPLIT]) == (0, 3)
    assert child.ranks == grandchild.ranks
    for each in (parent, child, other, grandchild, parent):
        works(each)


def options_are_the_new_groups_own(group: ProcessGroup) -> None:
    for parent_blocks, blocking in ((1, 0), (0, 1)):
        options = NcclOptions(NCCLConfig(blocking=parent_blocks))
        parent = bound(group, backend="nccl", pg_options=options)
        own = NcclOptions(NCCLConfig(blocking=blocking, max_ctas=4))
        with counted() as calls:
            child = split(parent, parts(group), pg_options=own)
        assert (calls[INIT], calls[SPLIT]) == (0, 1)
        backend = child.backend("cuda")
        assert isinstance(backend, NcclBackend)
        assert backend.nonblocking == (blocking == 0)
        works(child)
        works(parent)


def groups_end_in_either_order(group: ProcessGroup) -> None:
    for first in (0, 1):
        parent = bound(group)
        child = split(parent, parts(group))
        pair = parent, child
        pair[first].close()
        works(pair[1 - first])
        pair[1 - first].close()


def an_abort_ends_one_group(group: ProcessGroup) -> None:
    parent = bound(group)
    child = split(parent, [[*range(group.size)]])
    group.barrier()
    child.abort("enough")
    with pytest.raises(dist.DistError, match="enough"):
        child.all_reduce(ones(group))
    works(parent)


def what_is_in_flight_is_not_waited_for(group: ProcessGroup) -> None:
    """Rank 0 launches before it makes the group, and the others afterwards."""
    parent, x = bound(group), ones(group)
    work: Any = parent.all_reduce(x, async_op=True) if group.rank == 0 else None
    with counted() as calls:
        child = split(parent, parts(group))
    assert (calls[INIT], calls[SPLIT]) == (1, 0)
    if group.rank:
        work = parent.all_reduce(x, async_op=True)
    work.wait_blocking()
    assert value(x) == group.size
    works(child)


def a_rank_that_cannot_split_is_followed_by_all(group: ProcessGroup) -> None:
    """Rank 0 has a graph, or another backend."""
    parent, first = bound(group), group.rank == 0
    with pytest.MonkeyPatch.context() as patch, counted() as calls:
        if first:
            patch.setattr(DeviceGroup, "graphs_alive", 1)
        child = split(parent, parts(group))
    assert (calls[INIT], calls[SPLIT]) == (1, 0)
    with counted() as calls:
        other = split(parent, parts(group), backend="gloo" if first else None)
    assert not calls[SPLIT]
    works(child)
    works(other)


def a_group_whose_resources_would_be_shared_is_not_split(group: ProcessGroup) -> None:
    """An abort of the new group would stop the old group's kernels, too (NCCL's init.cc)."""
    options = NcclOptions(NCCLConfig(split_share=1))
    parent = bound(group, backend="nccl", pg_options=options)
    with counted() as calls:
        works(split(parent, parts(group)))
    assert not calls[SPLIT]


def mistaken_options_leave_the_group_alone(group: ProcessGroup) -> None:
    parent = bound(group)
    with pytest.raises(TypeError, match="pg_options of the backend 'nccl' must be NcclOptions"):
        parent.split_group(parts(group), backend="nccl", pg_options="fast")
    works(split(parent, parts(group)))


def what_was_split_off_is_released_if_its_group_is_not_made(group: ProcessGroup) -> None:
    parent, made = bound(group), []
    real = Communicator.split

    def kept(self: Communicator, *arguments: Any) -> Communicator:
        made.append(real(self, *arguments))
        return made[-1]

    def refused(*_: object) -> None:
        raise ValueError("no backend")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Communicator, "split", kept)
        patch.setattr(BackendTable, "make", refused)
        with pytest.raises(ValueError, match="no backend"):
            parent.split_group(parts(group))
    assert [comm.alive for comm in made] == [False]
    works(parent)


def a_rank_that_does_not_come_is_named(group: ProcessGroup) -> None:
    parent = bound(group)
    last = group.size - 1
    text = f"rank {last} did not come to .*new groups"
    if group.rank != last:
        with pytest.raises(RendezvousError, match=text):
            parent.split_group(parts(group), timeout=0.5)
    group.barrier()
    if group.rank == last:
        with pytest.raises(RendezvousError, match=text):
            parent.split_group(parts(group))
    works(parent)
    with counted() as calls:
        works(split(parent, parts(group)))
    assert calls[SPLIT] == 1


def a_failure_within_nccl_is_one_error_on_all(group: ProcessGroup) -> None:
    parent = bound(group)
    if group.rank == 1:
        os.environ["NC10D_EMULATED_FAULTS"] = f"{SPLIT}@1=fail:3"
    begin = time.monotonic()
    for call in (lambda: split(parent, parts(group)), lambda: parent.all_reduce(ones(group))):
        with pytest.raises(NCCLError, match=f"{SPLIT}.*a fault was asked for"):
            call()
    assert time.monotonic() - begin < LONG / 3, "the ranks waited for the deadline"
    os.environ.pop("NC10D_EMULATED_FAULTS", None)
    works(bound(group))


def an_abort_frees_ranks_that_wait_for_a_rank(group: ProcessGroup) -> None:
    parent = bound(group)
    if group.rank == 0:
        parent.abort("enough")
    begin = time.monotonic()
    with pytest.raises(Aborted, match="enough"):
        split(parent, parts(group))
    assert time.monotonic() - begin < LONG / 3, "the ranks waited for the deadline"


def a_device_that_is_not_there_is_refused(group: ProcessGroup) -> None:
    with pytest.raises(ValueError, match="device_id 'cuda:99': this machine has"):
        dist.new_group(range(group.size), device_id="cuda:99")
    works(bound(group))


def calls_on_the_default_group(group: ProcessGroup) -> None:
    on_its_device(group)
    with counted() as calls:
        every = dist.new_group(range(group.size)[::-1], sort_ranks=False)
        mine, _ = dist.new_subgroups(1)
    assert (calls[INIT], calls[SPLIT]) == (0, 2)
    assert isinstance(every, ProcessGroup)
    assert isinstance(mine, ProcessGroup)
    works(every)
    works(mine)
    with counted() as calls:
        local = dist.new_group(range(group.size), use_local_synchronization=True)
        part = dist.new_group([0])
    assert (calls[INIT], calls[SPLIT]) == (1 + (group.rank == 0), 0)
    assert isinstance(local, ProcessGroup)
    works(local)
    assert isinstance(part, ProcessGroup) == (group.rank == 0)


@pytest.fixture(scope="module", params=["2, blocking", "3, blocking", "2, not", "3, not"])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    size, _, how = request.param.partition(", ")
    with emulated_ranks(int(size), NC10D_NCCL_NONBLOCKING=str(int(how == "not"))) as found:
        yield found


LAWS: list[Law] = [
    new_groups_of_all_ranks_make_no_init,
    options_are_the_new_groups_own,
    groups_end_in_either_order,
    an_abort_ends_one_group,
    what_is_in_flight_is_not_waited_for,
    a_rank_that_cannot_split_is_followed_by_all,
    a_group_whose_resources_would_be_shared_is_not_split,
    mistaken_options_leave_the_group_alone,
    what_was_split_off_is_released_if_its_group_is_not_made,
    a_rank_that_does_not_come_is_named,
    a_failure_within_nccl_is_one_error_on_all,
    an_abort_frees_ranks_that_wait_for_a_rank,
    a_device_that_is_not_there_is_refused,
    calls_on_the_default_group,
]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_laws_of_splitting_hold(ranks: Ranks, law: Law) -> None:
    ranks.run(law)
