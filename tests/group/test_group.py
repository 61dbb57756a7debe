"""Groups: their members, the backends of their operations, and their end."""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from at_once import at_once

import nc10d
from nc10d.backend.config import BackendConfig
from nc10d.backend.fake import FakeBackend
from nc10d.backend.protocol import BackendSetup
from nc10d.backend.registry import find_backend, load_factory, register_backend, unregister_backend
from nc10d.base.deadline import Deadline
from nc10d.errors import Aborted, ForkedGroupError, GroupClosed, PeerLost, UnsupportedPlatform
from nc10d.group.process_group import ProcessGroup
from nc10d.ops import AllReduce, Barrier, Op, Recv
from nc10d.store import HashStore
from nc10d.work import Work


def make(ranks: Sequence[int] = (0, 1), rank: int = 0, backend: str = "fake") -> ProcessGroup:
    return ProcessGroup("g", ranks, rank, HashStore(), 5.0, BackendConfig(backend))


@contextlib.contextmanager
def registered(name: str, factory: Any, **more: Any) -> Iterator[None]:
    """Register a backend for the time of a test."""
    register_backend(name, factory, **more)
    try:
        yield
    finally:
        unregister_backend(name)


@pytest.mark.parametrize(
    ("asked", "devices"),
    [
        (None, {"cpu": "cpu", "cuda": "nccl"}),
        ("cpu", {"cpu": "cpu"}),
        ("NCCL", {"cuda": "nccl"}),
        ("fake", {"cpu": "fake", "cuda": "fake"}),
        ("gloo", {"cpu": "cpu", "cuda": "staged"}),
        ("cpu:gloo, cuda:gloo", {"cpu": "cpu", "cuda": "staged"}),
        ("cpu:fake,cuda:nccl", {"cpu": "fake", "cuda": "nccl"}),
    ],
)
def test_a_backend_string_is_a_table_of_devices(asked: str | None, devices: dict[str, str]) -> None:
    assert dict(BackendConfig(asked).devices) == devices


def test_the_name_asked_for_is_remembered() -> None:
    assert BackendConfig("gloo").asked == "gloo"
    assert repr(BackendConfig("gloo")) == "cpu:cpu,cuda:staged"


@pytest.mark.parametrize("asked", ["carrier-pigeon", "cpu:", ":cpu", "cpu:cpu:cpu", "cpu:x", "a:,"])
def test_a_malformed_or_unknown_backend_is_the_callers_mistake(asked: str) -> None:
    with pytest.raises(ValueError, match="backend"):
        BackendConfig(asked)


def test_a_device_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="twice"):
        BackendConfig("cpu:cpu,cpu:fake")


def test_an_unknown_backend_lists_the_registered_backends() -> None:
    with pytest.raises(ValueError, match=r"known are: .*cpu.*fake.*nccl"):
        find_backend("mpi9")


def test_a_backend_that_is_not_installed_raises() -> None:
    missing = pytest.raises(UnsupportedPlatform, match="absent")
    with registered("absent", "nc10d.backend.absent:make"), missing:
        load_factory(find_backend("absent"))


@pytest.mark.parametrize("name", ["", "a:b", "a,b", "cpu"])
def test_a_backend_needs_a_name_that_is_free_and_readable(name: str) -> None:
    with pytest.raises(ValueError, match="backend"):
        register_backend(name, "x:y")


def test_ranks_translate_both_ways_and_strangers_are_named() -> None:
    group = make([5, 2, 9], rank=1)
    assert [group.global_rank(r) for r in range(3)] == [5, 2, 9]
    assert [group.group_rank(r) for r in (5, 2, 9)] == [0, 1, 2]
    with pytest.raises(ValueError, match="global rank 3 is not in group 'g'"):
        group.group_rank(3)
    for rank in (-1, 3):
        with pytest.raises(ValueError, match="ranks 0 to 2"):
            group.global_rank(rank)


class Spy(FakeBackend):
    """A fake that records how it was launched and ended."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.calls: list[Any] = []

    def launch(self, ops: Sequence[Op], timeout: float, async_op: bool) -> Any:
        self.calls.append((type(ops[0]), len(ops), timeout, async_op))
        return super().launch(ops, timeout, async_op)

    def abort(self, reason: BaseException) -> None:
        self.calls.append(("abort", str(reason)))
        super().abort(reason)

    def close(self) -> None:
        self.calls.append("close")
        super().close()


def test_a_backend_that_derives_from_no_backend_is_refused_as_it_is_made() -> None:
    refused = pytest.raises(TypeError, match="'stranger': object does not derive from")
    with registered("stranger", lambda setup: object(), devices=["cpu"]), refused:
        ProcessGroup("g", [0], 0, HashStore(), 5.0, BackendConfig("stranger")).backend("cpu")


@pytest.fixture
def spies() -> Iterator[list[Spy]]:
    made: list[Spy] = []

    def factory(setup: BackendSetup) -> Spy:
        made.append(Spy(setup.rank, setup.size))
        return made[-1]

    with registered("spy", factory, devices=["cpu"]):
        yield made


def test_a_backend_is_made_at_first_need_and_once_though_many_threads_need_it() -> None:
    made: list[Spy] = []
    alone = threading.Barrier(2)

    def factory(setup: BackendSetup) -> Spy:
        with pytest.raises(threading.BrokenBarrierError):
            alone.wait(0.2)  # a second factory call at the same time would get through
        made.append(Spy(setup.rank, setup.size))
        return made[-1]

    with registered("careful", factory, devices=["cpu"]):
        group = make(backend="careful")
        assert not made
        at_once(*[group.barrier] * 4)
    assert len(made) == 1
    assert len(made[0].calls) == group.seq == 4


def test_a_call_is_one_launch_with_its_timeout(spies: list[Spy]) -> None:
    group = make(backend="spy")
    x = np.zeros(2)
    group.all_reduce(x)
    group.all_reduce(x)
    group.all_reduce(x, timeout=2)
    assert group.all_reduce(x, async_op=True) is not None
    group.all_reduce([x])  # a list is the backend's to refuse, but not the group's to drop
    ops = [(AllReduce, 1, 5.0, False)] * 2 + [(AllReduce, 1, 2.0, False)]
    assert spies[0].calls == [*ops, (AllReduce, 1, 5.0, True), (AllReduce, 1, 5.0, False)]


def test_no_backend_for_a_device_is_the_callers_mistake(spies: list[Spy]) -> None:
    class OnDevice:
        def __init__(self) -> None:
            self.__cuda_array_interface__ = {"data": (64, False), "shape": (1,), "typestr": "<f4"}

    group = make(backend="spy")
    with pytest.raises(ValueError, match="no backend for cuda arrays"):
        group.all_reduce(OnDevice())
    assert group.seq == 0


def test_an_observer_sees_every_launch_until_it_is_taken_off(spies: list[Spy]) -> None:
    group = make(backend="spy")
    seen: list[tuple[str, int]] = []
    group.barrier()
    stop = group.observe(lambda g, ops, n: seen.append((type(ops[0]).__name__, n)))
    group.barrier()
    group.all_reduce(np.zeros(1))
    stop()
    group.barrier()
    assert seen == [("Barrier", 1), ("AllReduce", 2)]
    assert group.seq == 4


def test_looking_at_the_sequence_number_does_not_change_it() -> None:
    group = make()
    for launches in range(4):
        assert [group.seq, group.seq] == [launches, launches]
        group.barrier()


def test_abort_fails_all_that_follows_and_the_first_reason_stays(spies: list[Spy]) -> None:
    group = make(backend="spy")
    group.barrier()
    group.abort("the fan broke")
    group.abort("another")
    for _ in range(2):
        with pytest.raises(Aborted, match="rank 0: the fan broke") as caught:
            group.barrier()
        assert (caught.value.group, caught.value.rank) == ("g", 0)
    assert spies[0].calls[1] == ("abort", "group 'g' was aborted by its rank 0: the fan broke")


def test_abort_keeps_its_cause() -> None:
    group = make()
    group.abort(KeyError("why"))
    with pytest.raises(Aborted) as caught:
        group.barrier()
    root = caught.value.__cause__
    assert root is not None
    assert isinstance(root.__cause__, KeyError)


def test_abort_before_the_first_call_holds_and_does_not_wait_for_a_backend_being_made() -> None:
    entered, release = threading.Event(), threading.Event()
    made: list[Spy] = []

    def slow(setup: BackendSetup) -> Spy:
        entered.set()
        assert release.wait(10)
        made.append(Spy(setup.rank, setup.size))
        return made[-1]

    with registered("slow", slow, devices=["cpu"]):
        group = make(backend="slow")
        failed: list[type] = []

        def call() -> None:
            try:
                group.barrier()
            except Aborted as error:
                failed.append(type(error))

        caller = threading.Thread(target=call)
        caller.start()
        assert entered.wait(10)
        group.abort("now")
        release.set()
        caller.join()
    assert failed == [Aborted]
    assert made[0].calls[0][0] == "abort"


def test_close_is_idempotent_and_ends_everything(spies: list[Spy]) -> None:
    group = make(backend="spy")
    group.barrier()
    group.close()
    group.close()
    assert spies[0].calls == [(Barrier, 1, 5.0, False), "close"]
    with pytest.raises(GroupClosed, match="'g' has been destroyed"):
        group.all_reduce(np.zeros(1))


def test_a_forked_child_may_not_use_the_group_and_the_parent_may(spies: list[Spy]) -> None:
    group = make(backend="spy")
    x = np.zeros(1)
    group.all_reduce(x)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            group.all_reduce(x)
        except ForkedGroupError as error:
            os.write(write, b"refused " if "init_process_group" in str(error) else b"unclear ")
        group.close()
        os.write(write, str(spies[0].calls[1:]).encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(read, 100) == b"refused []"
    os.close(read)
    os.close(write)
    group.all_reduce(x)
    assert group.seq == 2


def test_a_split_asks_the_parents_backend_and_another_name_the_registry(spies: list[Spy]) -> None:
    parent = make([0, 1, 2], rank=2, backend="spy")
    splits: list[Any] = []

    def split(
        ranks: Sequence[int], name: str, store: Any, deadline: Deadline, options: Any
    ) -> FakeBackend:
        splits.append((list(ranks), name, 2.5 < deadline.remaining() <= 3.0))
        return FakeBackend(0, len(ranks))

    parent.backend("cpu")
    spies[0].split = split  # type: ignore[method-assign]
    store = HashStore()
    child = ProcessGroup("c", [2, 0], 0, store, 3.0, parent.config, parent=parent)
    child.barrier()
    other = ProcessGroup("o", [2, 0], 0, store, 3.0, BackendConfig("fake"), parent=parent)
    other.barrier()
    assert splits == [([2, 0], "c", True)]


def test_each_backend_gets_its_options() -> None:
    seen: list[Any] = []

    class Split(FakeBackend):
        def split(self, ranks: Any, name: str, store: Any, deadline: Any, options: Any) -> Any:
            seen.append((name, options))
            return FakeBackend(0, len(ranks))

    def factory(setup: BackendSetup) -> FakeBackend:
        seen.append((setup.group_name, setup.options))
        return Split(setup.rank, setup.size)

    with registered("picky", factory, devices=["cpu"], options=(int,)):
        store, config = HashStore(), BackendConfig("cpu:picky,cuda:fake")
        options = {"picky": 3, "fake": "any"}
        parent = ProcessGroup("p", [0, 1], 0, store, 3.0, config, options=options)
        for name, given in (("same", None), ("other", {"picky": 4})):
            parent.child(name, [0], 3.0, config, given).backend("cpu")
        alone = parent.child("alone", [0], 3.0, BackendConfig("picky"), 5)
        alone.backend("cpu")
        assert seen == [("p", 3), ("same", 3), ("other", 4), ("alone", 5)]
        for wrong in ({"picky": "no"}, {"mpi": 1}, 3):
            with pytest.raises(TypeError, match=r"pg_options of .*picky"):
                parent.child("wrong", [0], 3.0, config, wrong)


def parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


CALLS = [
    name
    for module in ("api.calls", "api.batch_p2p")
    for name in nc10d._NAMES[module].split()
    if name not in ("P2POp", "batch_isend_irecv")
]


@pytest.mark.parametrize("name", CALLS)
def test_a_call_and_its_method_differ_in_how_they_name_groups_ranks_and_times(name: str) -> None:
    by_group = {"group", "group_src", "group_dst", "device_ids", "timeout", "out"}
    call, method = (parameters(getattr(nc10d, name)), parameters(getattr(ProcessGroup, name)))
    assert [p for p in call if p not in by_group] == [p for p in method if p != "timeout"]
    assert "group" in call
    assert method[-1] == "timeout"
    assert getattr(ProcessGroup, name).__doc__


@pytest.mark.parametrize("made", [True, False])
def test_a_backend_is_split_whichever_backends_exist(spies: list[Spy], made: bool) -> None:
    config = BackendConfig("cpu:spy,cuda:spy")
    parent = ProcessGroup("p", [0, 1], 0, HashStore(), 3.0, config)
    if made:
        parent.backend("cpu")
        parent.backend("cuda")
    child = ProcessGroup("c", [0], 0, HashStore(), 3.0, config, parent=parent)
    assert type(child.backend("cpu")) is FakeBackend  # the result of a Spy's split
    assert type(child.backend("cuda")) is Spy


def test_a_failure_that_aborts_several_groups_stays_the_callers_own() -> None:
    reason = PeerLost("rank 1 died", rank=1, seq=3)
    groups = [ProcessGroup(n, [0], 0, HashStore(), 5.0, BackendConfig("fake")) for n in "ab"]
    for group in groups:
        group.barrier()
        group.abort(reason)
    for group in groups:
        with pytest.raises(PeerLost, match="rank 1 died") as caught:
            group.barrier()
        assert (caught.value.group, caught.value.seq) == (group.name, 3)
    assert reason.group is None


def test_an_interrupt_while_receiving_from_anyone_fails_the_group() -> None:
    group = make()

    class Interrupted(Work):
        def _block(self, deadline: Any) -> None:
            raise KeyboardInterrupt

    backend = group.backend("cpu")
    backend.launch = lambda ops, *_: Interrupted(ops)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        group.recv(np.zeros(1))
    with pytest.raises(Aborted, match="rank 0 was interrupted in recv") as caught:
        group.barrier()
    assert (caught.value.op, caught.value.group) == ("recv", "g")


def test_the_result_of_a_fakes_batch_has_one_entry_per_operation() -> None:
    backend = FakeBackend(0, 3)
    x = np.zeros(1)
    work = backend.launch((Barrier(), Recv(x, None), Recv(x, 2)), 1.0, True)
    assert work is not None
    assert work.result() == [None, 1, 2]


def test_a_group_can_be_used_from_several_threads() -> None:
    group = make()
    x = np.zeros(1)

    def calls() -> None:
        for _ in range(200):
            group.all_reduce(x)
            work = group.all_reduce(x, async_op=True)
            assert work is not None
            assert work.wait()

    at_once(*[calls] * 4)
    assert group.seq == 4 * 400
