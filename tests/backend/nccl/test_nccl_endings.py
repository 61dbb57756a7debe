"""Groups end while NCCL forms a communicator or runs a call, over the emulators."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from device_ranks import LONG, after, full, once, ones, value
from emulated import emulated_ranks, needs_emulators
from ending_ranks import ENDINGS as AMONG_RANKS
from ending_ranks import groups_end_in_any_order

import nc10d as dist
from nc10d.backend.nccl.backend import NcclBackend
from nc10d.errors import Aborted, CollectiveTimeout, NCCLError
from nc10d.group.process_group import ProcessGroup
from nc10d.ops import premul_sum
from nc10d.testing.ranks import Ranks

pytestmark = needs_emulators


def a_group_that_ends_before_it_is_formed_leaves_arrays_alone(group: ProcessGroup) -> None:
    """NCCL's init returns after the abort, when the caller owns the array again."""
    _is_left_alone(group, lambda: group.abort("enough"), "enough")


def a_group_that_is_closed_before_it_is_formed_leaves_arrays_alone(group: ProcessGroup) -> None:
    mine = dist.new_group(range(group.size))
    assert isinstance(mine, ProcessGroup)
    _is_left_alone(mine, mine.close, "closed")


def _is_left_alone(group: ProcessGroup, end: Callable[[], None], words: str) -> None:
    x = ones(group)
    work = group.all_reduce(x, async_op=True)
    backend = group.backend("cuda")
    assert isinstance(backend, NcclBackend)
    forming = [
        thread for thread in threading.enumerate() if thread.name.startswith("nc10d-nccl-form")
    ]
    once(group, f"launched-{group.rank}")
    for rank in range(group.size):
        after(group, f"launched-{rank}")
    end()
    with pytest.raises(dist.DistError, match=words):
        work.wait_blocking()
    for thread in forming:
        thread.join(LONG)
        assert not thread.is_alive()
    assert value(x) == 1.0
    assert backend.device_group is not None
    comm_streams = backend.device_group.comm_streams.all()
    assert not any(
        comm_stream.comm.alive for comm_stream in comm_streams if comm_stream.comm is not None
    )
    assert not any(comm_stream.queue for comm_stream in comm_streams)


def the_failure_of_a_launch_behind_forming_is_its_cause(group: ProcessGroup) -> None:
    """The emulator refuses to create the operator; a rank creates it once the group is formed."""
    work = group.all_reduce(full(group, 1.0), premul_sum(0.5), async_op=True)
    with pytest.raises(NCCLError, match="ncclRedOpCreatePreMulSum"):
        work.wait_blocking()


def a_thread_that_is_stuck_in_nccl_is_freed_by_an_abort(group: ProcessGroup) -> None:
    """Each rank's second all_reduce stays inside NCCL's call."""
    x = ones(group)
    group.all_reduce(x)
    caught: list[BaseException] = []

    def launch() -> None:
        once(group, f"goes-{group.rank}")
        try:
            group.all_reduce(x)
        except dist.DistError as error:
            caught.append(error)

    stuck = threading.Thread(target=launch, daemon=True)
    stuck.start()
    for rank in range(group.size):
        after(group, f"goes-{rank}")
    group.abort("enough")
    stuck.join(LONG)
    assert not stuck.is_alive()
    with pytest.raises(Aborted, match="enough"):
        raise caught[0]
    with pytest.raises(Aborted, match="enough"):
        group.all_reduce(x)


def a_thread_that_is_stuck_in_nccl_is_a_timeout(group: ProcessGroup) -> None:
    x = ones(group)
    group.all_reduce(x)
    with pytest.raises(CollectiveTimeout, match="all_reduce"):
        group.all_reduce(x, timeout=0.3)


SLOW = "ncclCommInitRankConfig@1=slow:1500"
ENDINGS = [
    (a_group_that_ends_before_it_is_formed_leaves_arrays_alone, SLOW),
    (a_group_that_is_closed_before_it_is_formed_leaves_arrays_alone, SLOW),
    (the_failure_of_a_launch_behind_forming_is_its_cause, "ncclRedOpCreatePreMulSum@1=fail:3"),
    (a_thread_that_is_stuck_in_nccl_is_freed_by_an_abort, "ncclAllReduce@2=stuck"),
    (a_thread_that_is_stuck_in_nccl_is_a_timeout, "ncclAllReduce@2=stuck"),
]


@pytest.mark.parametrize(("law", "faults"), ENDINGS, ids=lambda x: getattr(x, "__name__", ""))
def test_groups_end_by_their_laws(law: Callable[..., None], faults: str) -> None:
    with emulated_ranks(NC10D_EMULATED_FAULTS=faults, NC10D_NCCL_NONBLOCKING="0") as ranks:
        ranks.run(law)


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with emulated_ranks() as ranks:
        yield ranks


@pytest.mark.parametrize("law", AMONG_RANKS, ids=lambda law: law.__name__)
def test_groups_end_among_ranks(two: Ranks, law: Callable[..., None]) -> None:
    two.run(law)


def test_groups_end_in_any_order() -> None:
    with emulated_ranks() as ranks:
        ranks.run(groups_end_in_any_order)
