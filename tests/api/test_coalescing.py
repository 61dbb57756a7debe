"""Coalescing: a block launches its calls together, with the effect of the same calls alone."""

import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import nc10d as dist
from nc10d.arrays.buffer import as_buffer, register
from nc10d.backend.config import BackendConfig
from nc10d.backend.fake import FakeBackend
from nc10d.base.deadline import NEVER, Deadline
from nc10d.errors import Aborted, GroupClosed
from nc10d.group.coalescing import BatchedWork
from nc10d.group.process_group import ProcessGroup
from nc10d.group.world import own_world
from nc10d.ops import AllReduce, Barrier, Broadcast, Recv, Send
from nc10d.store import HashStore
from nc10d.testing.local_backend import LocalBackend, run_local
from nc10d.work import Work


@pytest.fixture
def group() -> Iterator[ProcessGroup]:
    with own_world():
        dist.init_process_group("fake", rank=0, world_size=4)
        yield dist.get_default_group()
        dist.destroy_process_group()


def launched(group: ProcessGroup) -> list[type]:
    return [type(op) for op in cast(FakeBackend, group.backend("cpu")).launched]


class DeviceArray:
    """An array of a type that is always on a device."""

    def __init__(self) -> None:
        self.x = np.zeros(3)


register(DeviceArray, lambda a: as_buffer(a.x), "cuda")


def on_host() -> Any:
    return np.zeros(3)


@pytest.mark.parametrize("first", [DeviceArray, on_host])
@pytest.mark.parametrize("second", [DeviceArray, on_host])
def test_arrays_join_a_block_only_of_their_own_kind_of_device(
    group: ProcessGroup, first: Callable[[], Any], second: Callable[[], Any]
) -> None:
    arrays = [first(), first(), second()]

    def block() -> None:
        with dist.coalescing_manager():
            for x in arrays:
                dist.all_reduce(x)

    if first is second:
        block()
    else:
        with pytest.raises(ValueError, match="one kind of device"):
            block()


def test_a_block_is_one_launch_of_its_operations_in_order(group: ProcessGroup) -> None:
    x = np.zeros(3)
    with dist.coalescing_manager():
        assert dist.all_reduce(x) is None
        assert dist.broadcast(x, 1) is None
        assert dist.barrier() is None
        assert dist.send(x, 2) is None
        assert dist.recv(x, 3) == -1
        assert group.seq == 0
    assert launched(group) == [AllReduce, Broadcast, Barrier, Send, Recv]
    assert group.seq == 1


def test_an_empty_block_launches_nothing(group: ProcessGroup) -> None:
    with dist.coalescing_manager(async_ops=True) as cm:
        pass
    assert (cm.works, group.seq) == ([], 0)
    cm.wait()


def test_an_async_call_inside_returns_a_work_that_waits_for_the_block(group: ProcessGroup) -> None:
    x = np.zeros(3)
    called = []
    with dist.coalescing_manager():
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        work.add_done_callback(called.append)
        assert not work.is_completed()
        for refused in (work.wait, work.result, work.synchronize):
            with pytest.raises(ValueError, match="block has not ended"):
                refused()
    assert work.wait()
    assert work.result()[0] is x
    assert called == [work]


def test_async_ops_gives_one_work_for_the_block(group: ProcessGroup) -> None:
    with dist.coalescing_manager(async_ops=True) as cm:
        dist.all_reduce(np.zeros(1))
        with pytest.raises(ValueError, match="comes after the block"):
            cm.wait()
    assert [work.is_completed() for work in cm.works] == [True]
    cm.wait()


@pytest.mark.parametrize("kind", ["nested", "new_group", "split_group", "plan"])
def test_calls_that_make_or_repeat_blocks_or_groups_raise_in_a_block(
    group: ProcessGroup, kind: str
) -> None:
    with dist.coalescing_manager(async_ops=True) as earlier:
        dist.barrier()
    calls: dict[str, Any] = {
        "nested": lambda: dist.coalescing_manager().__enter__(),
        "new_group": lambda: dist.new_group([0]),
        "split_group": lambda: dist.split_group(None, [[0]]),
        "plan": lambda: earlier.plan().launch(),
    }
    with dist.coalescing_manager():
        dist.all_reduce(np.zeros(1))
        with pytest.raises(ValueError, match="coalescing block"):
            calls[kind]()
    assert launched(group) == [AllReduce]


def test_calls_of_other_groups_are_not_coalesced(group: ProcessGroup) -> None:
    other = dist.new_group([0, 1])
    with dist.coalescing_manager(group):
        dist.all_reduce(np.zeros(1))
        dist.barrier(other)
        assert launched(other) == [Barrier]
        with dist.coalescing_manager(other):
            dist.barrier(other)
    assert launched(group) == [AllReduce]


def test_calls_of_other_threads_are_not_coalesced(group: ProcessGroup) -> None:
    with dist.coalescing_manager(group):
        group.all_reduce(np.zeros(1))
        thread = threading.Thread(target=group.barrier)
        thread.start()
        thread.join()
        assert launched(group) == [Barrier]
    assert launched(group) == [AllReduce]


def test_an_exception_drops_the_batch_and_the_group_goes_on(group: ProcessGroup) -> None:
    works: list[Any] = []

    def body() -> None:
        with dist.coalescing_manager():
            works.append(dist.all_reduce(np.zeros(1), async_op=True))
            raise KeyError

    with pytest.raises(KeyError):
        body()
    assert group.seq == 0
    with pytest.raises(RuntimeError, match="nothing was launched"):
        works[0].wait()
    dist.barrier()
    assert (launched(group), group.seq) == ([Barrier], 1)


def test_a_launch_that_is_refused_fails_the_pending_works(group: ProcessGroup) -> None:
    works: list[Any] = []

    def body() -> None:
        with dist.coalescing_manager():
            works.append(dist.all_reduce(np.zeros(1), async_op=True))
            group.abort("enough")

    for fails in (body, lambda: works[0].wait()):
        with pytest.raises(Aborted, match="enough"):
            fails()


def test_the_shortest_timeout_of_a_block_is_the_blocks() -> None:
    seen: list[float] = []

    class Spy(FakeBackend):
        def launch(self, ops: Any, timeout: float, async_op: bool) -> Any:
            seen.append(timeout)
            return super().launch(ops, timeout, async_op)

    group = ProcessGroup("spied", range(2), 0, HashStore(), 9.0, BackendConfig("fake"))
    group._backends.make("cpu", NEVER, lambda *_: Spy(0, 2))
    with dist.coalescing_manager(group):
        group.all_reduce(np.zeros(1))
        group.all_reduce(np.zeros(1), timeout=2)
        group.all_reduce(np.zeros(1), timeout=5)
    assert seen == [2.0]


def test_a_block_cannot_be_entered_twice(group: ProcessGroup) -> None:
    cm = dist.coalescing_manager()
    with cm:
        dist.barrier()
    with pytest.raises(ValueError, match="once"), cm:
        pass


def test_a_block_on_a_destroyed_group_is_refused() -> None:
    group = ProcessGroup("gone", range(2), 0, HashStore(), 9.0, BackendConfig("fake"))
    group.close()
    with pytest.raises(GroupClosed), dist.coalescing_manager(group):
        group.barrier()


@pytest.mark.ranks(2)
def test_a_plan_repeats_the_block_on_the_arrays_of_the_moment(world: ProcessGroup) -> None:
    x = np.array([float(world.rank + 1)])
    with dist.coalescing_manager() as cm:
        dist.all_reduce(x)
    plan = cm.plan()
    plan.launch()
    work = plan.launch(async_op=True)
    assert work is not None
    work.wait()
    assert x.tolist() == [12.0]


def test_a_sync_block_with_async_calls_blocks_until_all_are_done() -> None:
    left = threading.Event()

    def rank(group: ProcessGroup) -> bool:
        if group.rank == 1:
            early = left.wait(0.2)
            dist.all_reduce(np.ones(1))
            return early
        with dist.coalescing_manager():
            dist.all_reduce(np.ones(1), async_op=True)
        left.set()
        return False

    assert run_local(rank, 2) == [False, False]


programs = st.lists(
    st.sampled_from(["all_reduce", "broadcast", "all_gather", "reduce_scatter", "ring"]),
    min_size=1,
    max_size=6,
)


Arrays = list[np.ndarray[Any, Any]]


def play(program: list[str], me: int, size: int) -> tuple[Arrays, list[dist.Work]]:
    """Make the calls of a program; return its arrays, and the Works of its sends and receives."""
    arrays: Arrays = []
    works: list[Any] = []
    for step, name in enumerate(program):
        x = np.arange(size) + 10 * me + 100 * step
        out = np.zeros(size * size, x.dtype)
        if name == "all_reduce":
            dist.all_reduce(x)
        elif name == "broadcast":
            dist.broadcast(x, step % size)
        elif name == "all_gather":
            dist.all_gather_into_tensor(out, x)
        elif name == "reduce_scatter":
            dist.reduce_scatter_tensor(out[:1], x)
        else:
            works.append(dist.isend(x, (me + 1) % size, tag=step))
            works.append(dist.irecv(out[:size], (me - 1) % size, tag=step))
        arrays += [x, out]
    return arrays, [work for work in works if work is not None]


@settings(max_examples=25, deadline=None)
@given(programs, st.integers(2, 4), st.booleans())
def test_a_block_computes_what_its_calls_compute_alone(
    program: list[str], size: int, async_ops: bool
) -> None:
    def alone(group: ProcessGroup) -> list[Any]:
        arrays, works = play(program, group.rank, size)
        for work in works:
            work.wait()
        return [array.tolist() for array in arrays]

    def together(group: ProcessGroup) -> list[Any]:
        with dist.coalescing_manager(async_ops=async_ops) as cm:
            arrays, works = play(program, group.rank, size)
        cm.wait()
        assert all(work.is_success() for work in works)
        backend = cast(LocalBackend, dist.get_default_group().backend("cpu"))
        assert len(backend.launched) == 1
        return [array.tolist() for array in arrays]

    assert run_local(together, size) == run_local(alone, size)


def test_batch_isend_irecv_is_one_launch_with_a_work_for_each() -> None:
    def rank(group: ProcessGroup) -> tuple[int, list[int], int]:
        me = group.rank
        out, x = np.zeros(1, int), np.array([me])
        ops = [dist.P2POp(dist.irecv, out, (me - 1) % 3), dist.P2POp(dist.isend, x, (me + 1) % 3)]
        works = dist.batch_isend_irecv(ops)
        assert len(works) == 2
        for work in works:
            work.wait()
        backend = cast(LocalBackend, dist.get_default_group().backend("cpu"))
        return int(out[0]), [len(ops) for ops in backend.launched], works[0].result()

    assert run_local(rank, 3) == [(2, [2], 2), (0, [2], 0), (1, [2], 1)]


class CountingWork(Work):
    """The Work of a batch, which counts the waits for it."""

    __slots__ = ("waits",)

    def __init__(self) -> None:
        super().__init__()
        self.waits = 0

    def _poll(self) -> None:
        """Stay pending."""

    def _block(self, deadline: Deadline) -> None:
        self.waits += 1
        self._finish(None, [None] * 3)


def test_only_a_single_work_of_a_batch_waits_for_the_batch() -> None:
    whole, works = CountingWork(), [BatchedWork(Barrier(), place) for place in range(3)]
    for work in works:
        work.bind(whole)
    assert not any(work.is_completed() for work in works)
    assert all(work.wait() for work in works[::-1])
    assert whole.waits == 1


def test_a_block_of_a_non_member_warns_and_does_nothing(group: ProcessGroup) -> None:
    outside: Any = dist.GroupMember.NON_GROUP_MEMBER
    with pytest.warns(RuntimeWarning), dist.coalescing_manager(outside):
        dist.all_reduce(np.zeros(1), group=outside)
    assert launched(group) == []


def test_batch_isend_irecv_joins_an_open_block(group: ProcessGroup) -> None:
    x = np.zeros(1)
    with dist.coalescing_manager():
        dist.all_reduce(x)
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1)])
        assert not works[0].is_completed()
    assert works[0].wait()
    assert launched(group) == [AllReduce, Send]
