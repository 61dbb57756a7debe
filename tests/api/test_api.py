"""c10d's calls: results are right, and argument names and positions are c10d's."""

import inspect
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import nc10d as dist
from nc10d.errors import Aborted, ForkedGroupError, GroupClosed
from nc10d.group.world import NonMember, current_world, own_world, own_worlds
from nc10d.store import HashStore
from nc10d.testing import Ranks, reference
from nc10d.testing.local_backend import LocalHub, run_local

SIZES = [1, 2, 3, 5]
_SAME_SIGNATURE = """all_reduce reduce broadcast all_gather all_gather_into_tensor reduce_scatter
    reduce_scatter_tensor all_to_all all_to_all_single gather scatter barrier send recv isend
    irecv batch_isend_irecv new_group new_subgroups new_subgroups_by_enumeration split_group
    get_process_group_ranks get_global_rank get_group_rank destroy_process_group get_backend
    get_backend_config get_rank get_world_size all_gather_single reduce_scatter_single
    is_available is_initialized is_torchelastic_launched get_node_local_rank P2POp
    _coalescing_manager init_process_group"""
SAME_SIGNATURE = _SAME_SIGNATURE.split()
OURS = {"out"}
"""Parameters of nc10d's own, by keyword only."""


@pytest.mark.parametrize("name", SAME_SIGNATURE)
def test_arguments_have_c10ds_names_and_positions(name: str) -> None:
    torchs = pytest.importorskip("torch.distributed")
    theirs = getattr(torchs, name, None) or getattr(torchs.distributed_c10d, name)
    expected = {
        p.name: p.default is inspect.Parameter.empty
        for p in inspect.signature(theirs).parameters.values()
        if not p.name.startswith("_")
    }
    ours = inspect.signature(getattr(dist, name)).parameters.values()
    assert [p.name for p in ours if p.name not in OURS] == list(expected)
    assert all(p.kind is p.KEYWORD_ONLY for p in ours if p.name in OURS)
    needed = [p.name for p in ours if p.default is inspect.Parameter.empty]
    assert all(expected[name] for name in needed)


def x_of(rank: int, count: int = 4) -> np.ndarray[Any, Any]:
    return np.arange(count) + 10.0 * (rank + 1)


def check_results(
    size: int, body: Callable[[dist.ProcessGroup], list[Any]], expected: list[Any]
) -> None:
    """Run `body` on every rank; compare its results with the reference."""
    for found, right in zip(run_local(body, size), expected, strict=True):
        assert len(found) == len(right)
        for array, wanted in zip(found, right, strict=True):
            assert reference.same_bits(np.asarray(array), np.asarray(wanted))


@pytest.mark.parametrize("size", SIZES)
def test_gathers_and_scatters_reach_every_rank(size: int) -> None:
    def body(group: dist.ProcessGroup) -> list[Any]:
        me = group.rank
        ragged = [np.zeros(r) for r in range(size)]
        flat = np.zeros((size, 4))
        mine, share = np.zeros(me), np.zeros(4)
        dist.all_gather(ragged, x_of(me, me))
        dist.all_gather_into_tensor(flat, x_of(me))
        dist.reduce_scatter(mine, [x_of(me, r) for r in range(size)])
        dist.reduce_scatter_tensor(share, np.concatenate([x_of(me + r) for r in range(size)]))
        return [*ragged, flat, mine, share]

    expected = []
    for me in range(size):
        ragged = [x_of(r, r) for r in range(size)]
        flat = np.stack([x_of(r) for r in range(size)])
        mine = reference.fold([x_of(r, me) for r in range(size)], dist.SUM)
        share = reference.fold([x_of(r + me) for r in range(size)], dist.SUM)
        expected.append([*ragged, flat, mine, share])
    check_results(size, body, expected)


@pytest.mark.parametrize("size", SIZES)
def test_all_to_all_exchanges_blocks(size: int) -> None:
    def body(group: dist.ProcessGroup) -> list[Any]:
        me = group.rank
        outs = [np.zeros(me + 1) for _ in range(size)]
        flat, rows = np.zeros(size), np.zeros(((me + 1) * size, 2))
        dist.all_to_all(outs, [x_of(me, r + 1) for r in range(size)])
        dist.all_to_all_single(flat, x_of(me, size))
        sent = np.concatenate([np.full((r + 1, 2), 10.0 * me + r) for r in range(size)])
        splits = [r + 1 for r in range(size)]
        dist.all_to_all_single(rows, sent, [me + 1] * size, splits)
        return [*outs, flat, rows]

    expected = []
    for me in range(size):
        outs = [x_of(r, me + 1) for r in range(size)]
        flat = np.array([x_of(r, size)[me] for r in range(size)])
        rows = np.concatenate([np.full((me + 1, 2), 10.0 * r + me) for r in range(size)])
        expected.append([*outs, flat, rows])
    check_results(size, body, expected)


def test_barrier_holds_every_rank_until_the_last_has_arrived() -> None:
    come: list[int] = []

    def body(group: dist.ProcessGroup) -> int:
        come.append(group.rank)
        dist.barrier()
        return len(come)

    assert run_local(body, 4) == [4] * 4


def test_messages_match_by_tag_and_can_come_from_any_rank() -> None:
    def body(group: dist.ProcessGroup) -> Any:
        me = group.rank
        out = np.zeros(1)
        if me == 0:
            senders = sorted(dist.recv(out, tag=3) for _ in range(2))
            return senders, dist.recv(out, 2, tag=9), out.tolist()
        early = dist.isend(np.array([50.0]), 0, tag=9) if me == 2 else None
        dist.send(np.array([5.0]), 0, tag=3)
        return early is None or early.wait()

    assert run_local(body, 3) == [([1, 2], 2, [50.0]), True, True]


def test_recv_names_the_global_rank_and_irecv_the_group_rank() -> None:
    def body(group: dist.ProcessGroup) -> Any:
        me = group.rank
        group = dist.new_group([1, 2])
        out = np.zeros(1)
        if me == 1:
            dist.send(np.ones(1), dst=2, group=group)
            dist.send(np.ones(1), group_dst=1, group=group)
        elif me == 2:
            sender = dist.recv(out, group=group)
            work = dist.irecv(out, group_src=0, group=group)
            assert work is not None
            return sender, work.result()
        return None

    assert run_local(body, 3)[2] == (1, 0)


@pytest.mark.ranks(3)
def test_abort_ends_the_waits_of_every_rank(world: dist.ProcessGroup) -> None:
    if world.rank == 0:
        dist.abort_process_group(reason="stop")
    with pytest.raises(Aborted, match="stop"):
        dist.barrier()


def test_new_group_numbers_its_ranks_in_ascending_order_by_default() -> None:
    def body(group: dist.ProcessGroup) -> Any:
        me = group.rank
        group = dist.new_group([3, 1])
        ordered = dist.new_group([3, 1], sort_ranks=False)
        if me not in (1, 3):
            assert group is dist.GroupMember.NON_GROUP_MEMBER
            return dist.get_rank(group), dist.get_world_size(group)
        x = np.array([float(me)])
        dist.all_reduce(x, group=group)
        assert x[0] == 4
        ranks = [dist.get_process_group_ranks(g) for g in (group, ordered)]
        return dist.get_rank(group), dist.get_rank(ordered), ranks

    assert run_local(body, 4) == [
        (-1, -1),
        (0, 1, [[1, 3], [3, 1]]),
        (-1, -1),
        (1, 0, [[1, 3], [3, 1]]),
    ]


def test_calls_of_a_non_member_warn_and_do_nothing() -> None:
    outside = dist.GroupMember.NON_GROUP_MEMBER
    assert isinstance(outside, NonMember)
    x = np.ones(1)
    calls: list[Callable[[], Any]] = [
        lambda: dist.all_reduce(x, group=outside),
        lambda: dist.broadcast(x, 5, group=outside),
        lambda: dist.barrier(outside),
    ]
    for call in calls:
        with pytest.warns(RuntimeWarning, match="not in the group"):
            assert call() is None
    with pytest.warns(RuntimeWarning, match="recv"):
        assert dist.recv(x, group=outside) == -1
    with pytest.raises(ValueError, match="not in the group"):
        dist.get_global_rank(outside, 0)
    with own_world():
        dist.destroy_process_group(outside)


def test_groups_that_members_alone_make_need_no_other_rank() -> None:
    def body(group: dist.ProcessGroup) -> Any:
        if group.rank == 2:
            return None
        group = dist.new_group([0, 1], use_local_synchronization=True)
        again = dist.new_group([0, 1], use_local_synchronization=True)
        assert group is not None
        assert again is not None
        x = np.ones(1)
        dist.all_reduce(x, group=again)
        assert isinstance(group, dist.ProcessGroup)
        assert isinstance(again, dist.ProcessGroup)
        return x[0], group.name == again.name

    assert run_local(body, 3) == [(2.0, False), (2.0, False), None]


@pytest.mark.parametrize("local", [True, False])
def test_ranks_of_any_integer_type_make_the_same_group(local: bool) -> None:
    def body(group: dist.ProcessGroup) -> Any:
        me = group.rank
        ranks: Any = np.arange(2) if me else [0, 1]
        group = dist.new_group(ranks, use_local_synchronization=local)
        assert isinstance(group, dist.ProcessGroup)
        assert {type(rank) for rank in (*group.ranks, group.rank())} == {int}
        x = np.full(1, me)
        root: Any = np.int64(1) if me else 1
        dist.broadcast(x, root, group)
        return group.name, int(x[0])

    first, second = run_local(body, 2)
    assert first == second == (first[0], 1)


FLOAT: Any = 1.0  # equal to a rank, but no integer


@pytest.mark.parametrize(
    "call",
    [
        lambda x: dist.broadcast(x, FLOAT),
        lambda x: dist.broadcast(x, group_src=FLOAT),
        lambda x: dist.get_default_group().broadcast(x, FLOAT),
        lambda x: dist.reduce(x, FLOAT),
        lambda x: dist.get_default_group().reduce(x, FLOAT),
        lambda x: dist.gather(x, None, FLOAT),
        lambda x: dist.scatter(x, None, FLOAT),
        lambda x: dist.get_default_group().gather(x, None, FLOAT),
        lambda x: dist.get_default_group().scatter(x, None, FLOAT),
        lambda x: dist.send(x, FLOAT),
        lambda x: dist.get_default_group().send(x, FLOAT),
        lambda x: dist.get_default_group().isend(x, 1, FLOAT),
        lambda x: dist.get_default_group().recv(x, FLOAT),
        lambda x: dist.get_default_group().irecv(x, 1, FLOAT),
        lambda x: dist.P2POp(dist.isend, x, FLOAT),
        lambda x: dist.P2POp(dist.isend, x, group_peer=FLOAT),
        lambda x: dist.get_global_rank(None, FLOAT),
        lambda x: dist.get_group_rank(None, FLOAT),
        lambda x: dist.new_group([FLOAT, FLOAT]),
        lambda x: dist.new_subgroups(FLOAT),
        lambda x: dist.new_subgroups_by_enumeration([[FLOAT]]),
        lambda x: dist.split_group(None, [[0, FLOAT]]),
    ],
)
def test_floats_are_no_ranks_on_any_path(call: Callable[[Any], Any]) -> None:
    with own_world():
        dist.init_process_group("fake", rank=0, world_size=2)
        with pytest.raises(TypeError, match="must be an integer"):
            call(np.ones(1))
        dist.destroy_process_group()


@pytest.mark.ranks(4)
def test_new_subgroups_cut_the_ranks_into_runs(world: dist.ProcessGroup) -> None:
    mine, every = dist.new_subgroups(2)
    assert len(every) == 2
    assert dist.get_process_group_ranks(mine) == [[0, 1], [0, 1], [2, 3], [2, 3]][world.rank]


@pytest.mark.ranks(3)
def test_new_subgroups_by_enumeration_may_leave_ranks_out_but_not_repeat_them(
    world: dist.ProcessGroup,
) -> None:
    with pytest.raises(ValueError, match="twice"):
        dist.new_subgroups_by_enumeration([[0, 1], [1, 2]])
    mine, _ = dist.new_subgroups_by_enumeration([[0, 2]])
    assert (None if mine is None else dist.get_rank(mine)) == [0, None, 1][world.rank]


def test_split_group_takes_ranks_of_the_parent() -> None:
    def body(group: dist.ProcessGroup) -> Any:
        parent = dist.new_group([1, 2, 3])
        if not isinstance(parent, dist.ProcessGroup):
            return None
        mine = dist.split_group(parent, [[2, 0]])
        return mine if mine is None else (dist.get_process_group_ranks(mine), mine.rank)

    assert run_local(body, 4) == [None, ([1, 3], 0), None, ([1, 3], 1)]


def test_a_group_without_a_world_has_all_calls_as_methods() -> None:
    hub, store = LocalHub(), HashStore()

    def rank(me: int) -> Any:
        group = dist.ProcessGroup(
            "g", [4, 5, 6], me, store, 20.0, dist.BackendConfig("local"), options=hub
        )
        assert not dist.is_initialized()
        x, out = np.full(1, me), np.zeros(3, int)
        group.all_gather_single(out, x)
        group.reduce_scatter_single(x, out)
        with group.coalescing_manager(async_ops=True) as block:
            group.all_reduce(x)
        block.wait()
        y = np.zeros(1, int)
        ops = [
            dist.P2POp(dist.isend, np.full(1, me), group_peer=(me + 1) % 3, group=group),
            dist.P2POp(dist.irecv, y, group_peer=(me - 1) % 3, group=group),
        ]
        for work in group.batch_isend_irecv(ops):
            work.wait()
        pair = group.split([[0, 2]])
        kept = dist.split_group(group, [[0, 2]])
        assert (pair is None) == (kept is None) == (me == 1)
        z = np.ones(1, int)
        if pair is not None and kept is not None:
            assert pair.ranks == kept.ranks == (4, 6)
            pair.all_reduce(z)
            kept.all_reduce(z)
            dist.abort_process_group(kept, "enough")
            dist.destroy_process_group(kept)
            pair.close()
        group.close()
        return int(x[0]), int(y[0]), int(z[0])

    def in_a_world_of_its_own(me: int) -> Any:
        with own_world():
            return rank(me)

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(in_a_world_of_its_own, range(3)))
    assert found == [(9, 2, 4), (9, 0, 1), (9, 1, 4)]


def test_a_subgroup_can_be_destroyed_alone() -> None:
    def body(group: dist.ProcessGroup) -> None:
        group = dist.new_group()
        assert isinstance(group, dist.ProcessGroup)
        dist.destroy_process_group(group)
        with pytest.raises(GroupClosed):
            dist.barrier(group)
        with pytest.raises(ValueError, match="destroyed already"):
            dist.destroy_process_group(group)
        dist.barrier()

    run_local(body, 2)


def test_threads_make_their_calls_on_groups_of_their_own() -> None:
    def body(group: dist.ProcessGroup) -> list[float]:
        groups = [dist.new_group() for _ in range(4)]
        sums = [np.array([float(group.rank + n)]) for n in range(4)]

        def calls(n: int) -> None:
            group = groups[n]
            assert isinstance(group, dist.ProcessGroup)
            group.all_reduce(sums[n])
            work = group.all_reduce(sums[n], async_op=True)
            assert work is not None
            work.wait()

        threads = [threading.Thread(target=calls, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [float(x[0]) for x in sums]

    assert run_local(body, 2) == [[2.0, 6.0, 10.0, 14.0]] * 2


def test_init_makes_a_world_and_destroy_ends_it() -> None:
    with own_world():
        assert not dist.is_initialized()
        with pytest.raises(ValueError, match="init_process_group"):
            dist.get_rank()
        dist.init_process_group("fake", rank=2, world_size=5, group_name="mine")
        assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (2, 5, "fake")
        assert dist.get_backend_config() == "cpu:fake,cuda:fake"
        assert dist.group.WORLD is dist.GroupMember.WORLD is dist.get_default_group()
        with pytest.raises(ValueError, match="exists already"):
            dist.init_process_group("fake", rank=0, world_size=1)
        dist.destroy_process_group()
        assert not dist.is_initialized()
        assert dist.group.WORLD is None
        dist.init_process_group("fake", rank=0, world_size=1)
        dist.destroy_process_group()


def test_a_second_init_on_one_store_has_keys_of_its_own_and_the_same_names() -> None:
    store, names = HashStore(), []
    with own_world():
        for _ in range(2):
            dist.init_process_group("fake", store=store, rank=0, world_size=2)
            group = dist.new_group([0])
            assert isinstance(group, dist.ProcessGroup)
            names.append(group.name)
            assert not group.store.check(["key"])
            assert not dist.get_default_group().store.check(["key"])
            group.store.set("key", b"1")
            dist.get_default_group().store.set("key", b"1")
            dist.destroy_process_group()
    assert names[0] == names[1]


def test_a_forked_child_can_make_a_world_of_its_own() -> None:
    class Precious(HashStore):
        closed = False

        def close(self) -> None:
            type(self).closed = True

    with own_world() as world:
        dist.init_process_group("fake", rank=0, world_size=2)
        world.owned_store = Precious()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                dist.barrier()
            except ForkedGroupError:
                dist.init_process_group("fake", rank=0, world_size=3)
                dist.barrier()
                status = 0 if dist.get_world_size() == 3 and not Precious.closed else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        dist.barrier()
        dist.destroy_process_group()


def test_destroy_closes_the_latest_group_first(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    with own_world():
        dist.init_process_group("fake", rank=0, world_size=2)
        groups = [dist.get_default_group(), dist.new_group([0]), dist.new_group([0])]
        names = [group.name for group in groups if isinstance(group, dist.ProcessGroup)]
        monkeypatch.setattr(dist.ProcessGroup, "_close", lambda group: closed.append(group.name))
        dist.destroy_process_group()
    assert closed == names[::-1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"store": HashStore(), "init_method": "env://", "rank": 0, "world_size": 1},
        {"store": HashStore(), "rank": 0},
        {"store": HashStore(), "world_size": 2},
        {"store": HashStore(), "world_size": 2, "rank": 2},
        {"backend": "pigeon", "store": HashStore(), "world_size": 1, "rank": 0},
        {"timeout": -1, "store": HashStore(), "world_size": 1, "rank": 0},
    ],
)
def test_init_refuses_arguments_that_do_not_fit_and_leaves_no_world(wrong: dict[str, Any]) -> None:
    with own_world():
        with pytest.raises(ValueError, match=r"rank|world_size|store|backend|timeout"):
            dist.init_process_group(**({"backend": "fake"} | wrong))
        assert not dist.is_initialized()


def test_an_init_whose_backend_fails_leaves_no_world() -> None:
    def broken(setup: Any) -> Any:
        raise OSError("no memory")

    from nc10d.backend.registry import unregister_backend

    dist.register_backend("broken", broken)
    try:
        with own_world():
            with pytest.raises(OSError, match="no memory"):
                dist.init_process_group("broken", store=HashStore(), rank=0, world_size=1)
            assert not dist.is_initialized()
            assert not current_world().groups
    finally:
        unregister_backend("broken")


def test_a_thread_sees_the_process_world_and_a_rank_thread_only_its_own() -> None:
    with own_world() as world:
        seen = []
        thread = threading.Thread(target=lambda: seen.append(current_world()))
        thread.start()
        thread.join()
        assert current_world() is world
        assert seen[0] is not world
    assert seen[0] is current_world()


@pytest.mark.parametrize("group", [0, False, "", [], "x", 3, [0]])
def test_a_group_argument_of_another_type_is_refused(group: Any) -> None:
    calls: list[Callable[[], object]] = [
        lambda: dist.all_reduce(np.ones(1), group=group),
        lambda: dist.broadcast(np.ones(1), 0, group=group),
        lambda: dist.isend(np.ones(1), 1, group=group),
        lambda: dist.get_rank(group),
        lambda: dist.coalescing_manager(group),
        lambda: dist.barrier(group),
    ]
    with own_world():
        dist.init_process_group("fake", rank=0, world_size=2)
        for call in calls:
            with pytest.raises(TypeError, match="group must be a ProcessGroup or None"):
                call()
        dist.destroy_process_group()


def messages_of_the_default_group(group: dist.ProcessGroup) -> None:
    """Send header and payload in turns, so that neither is the latest; then recv inside a block."""
    assert not own_worlds, "threads find their group another way"
    me, peer = group.rank, 1 - group.rank
    for turn in range(20):
        for size in (2, 300):
            x, got = np.full(size, 10 * turn + me, np.float32), np.empty(size, np.float32)
            if me == 0:
                dist.send(x, peer, tag=turn)
            assert me == 0 or dist.recv(got, peer, tag=turn) == peer
            if me == 1:
                dist.send(x, peer, tag=turn)
            assert me == 1 or dist.recv(got, peer, tag=turn) == peer
            assert (got == 10 * turn + peer).all()
    got = np.zeros(2, np.float32)
    with dist.coalescing_manager():
        dist.send(np.full(2, 5, np.float32), peer)
        assert dist.recv(got, peer) == -1, "nothing has come yet"
    assert (got == 5).all()
    for call in (dist.send, dist.recv):
        with pytest.raises(ValueError, match="tag"):
            call(got, peer, tag=-1)
        with pytest.raises(ValueError, match="7"):
            call(got, 7)


def test_messages_of_the_default_group_arrive_whatever_is_prepared() -> None:
    with Ranks(2, "processes") as ranks:
        ranks.run(messages_of_the_default_group)
