"""What torch promises of every backend's Works and groups, on each supported version of torch."""

import json
import pickle
import time

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards

import nc10d.torch
from nc10d.testing import Ranks
from nc10d.torch.backend.flight_traces import FILE
from nc10d.torch.backend.group_methods import HOOKS
from nc10d.torch.backend.torch_versions import (
    NO_MEMBER,
    PYTHON_BACKENDS,
    SELF_RECORDING,
    SPLIT_KEEPS_ORDER,
)

SIZE = 3
CPU = torch.device("cpu")
only_backends = pytest.mark.skipif(not PYTHON_BACKENDS, reason="needs a Backend in Python")
only_recorded = pytest.mark.skipif(not SELF_RECORDING, reason="needs the recorder of torch 2.15")


RANKS = {"world_size": SIZE, "kind": "processes", "timeout": 90.0}


def start(group):
    nc10d.torch.as_torch_group()


def ended(work):
    """Return whether a loop that polls a Work comes to its end."""
    until = time.monotonic() + 60
    while not work.is_completed():
        assert time.monotonic() < until
    return work.is_success() and work.exception() is None


def coalesced(x):
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(x)
    return manager.works[0]


LAUNCHES = {
    "all_reduce": lambda x: dist.all_reduce(x, async_op=True),
    "broadcast": lambda x: dist.broadcast(x, 1, async_op=True),
    "all_gather_into_tensor": lambda x: dist.all_gather_into_tensor(
        torch.zeros(2 * SIZE), x, async_op=True
    ),
    "all_to_all_single": lambda x: dist.all_to_all_single(
        torch.zeros(SIZE), torch.ones(SIZE), async_op=True
    ),
    "barrier": lambda x: dist.barrier(async_op=True),
    "a block": coalesced,
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", LAUNCHES)
def test_a_loop_that_polls_a_work_ends(ranks, name):
    assert ranks.run(lambda group: ended(LAUNCHES[name](torch.ones(2)))) == [True] * SIZE


def splits(group):
    """Return for each split rank, members and description, or what a rank outside gets."""
    found = []
    for lists in ([[2, 0]], [[0, 1]], [[1, 0], [2]]):
        new = dist.split_group(None, lists)
        if isinstance(new, dist.ProcessGroup):
            dist.all_reduce(torch.ones(1), group=new)
            found.append((new.rank(), dist.get_process_group_ranks(new), new.group_desc[-7:]))
        else:
            found.append(new)
    return found


def test_a_split_has_torchs_order_description_and_answer_to_others(ranks):
    """Also where a rank has been outside of an earlier split."""
    rank0, rank1, rank2 = ranks.run(splits)
    back = SPLIT_KEEPS_ORDER
    assert rank1[0] == NO_MEMBER == rank2[1]
    pair = [2, 0] if back else [0, 2]
    assert rank0[0] == (int(back), pair, "split:0")
    assert rank2[0] == (1 - int(back), pair, "split:0")
    assert rank0[1][2] == rank1[1][2] == "split:1"
    assert rank1[2] == (0, [1, 0], "split:2") if back else rank1[2] == (1, [0, 1], "split:2")
    assert rank2[2] == (0, [2], "split:2")


def gathered(group):
    """Return on rank 0 a tensor that torch gathers from shards, by the group's preferred device."""
    rank, whole = dist.get_rank(), torch.zeros(SIZE, 2)
    place = ShardMetadata([rank, 0], [1, 2], f"rank:{rank}/cpu")
    shards = [Shard(torch.full((1, 2), float(rank)), place)]
    sharded = init_from_local_shards(shards, SIZE, 2)
    sharded.gather(0, whole if rank == 0 else None)
    return whole[:, 0].tolist()


@pytest.mark.filterwarnings("ignore")
def test_the_backend_serves_the_devices_that_there_are(ranks):
    claimed = dist.Backend.backend_capability["nc10d"]
    assert claimed == ["cpu", "cuda"][: 1 + torch.cuda.is_available()]
    if claimed == ["cpu"]:
        assert ranks.run(gathered)[0] == [0.0, 1.0, 2.0]


@pytest.mark.skipif(not hasattr(dist, "gather_single"), reason="new in torch 2.14")
@pytest.mark.parametrize("hooked", [False, True])
def test_a_gather_into_one_tensor_has_each_ranks_rows(ranks, hooked):
    def body(group):
        above = dist.new_group([*range(SIZE)])
        if hooked:
            above.register_pre_hook(1, lambda given: None)
        out = torch.zeros(SIZE, 2) if dist.get_rank() == 1 else None
        x = torch.full((2,), float(dist.get_rank()))
        dist.gather_single(x, out, dst=1, group=above)
        work = dist.gather_single(x, out, dst=1, group=above, async_op=True)
        assert ended(work)
        return None if out is None else out.tolist()

    assert ranks.run(body) == [None, [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]], None]


def test_a_hook_that_would_fail_in_a_pass_is_refused_when_it_is_registered(ranks):
    def body(group):
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        with pytest.raises(ValueError, match="fp16_compress_hook"):
            model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)

    ranks.run(body)


@only_backends
def test_every_property_of_a_backend_can_be_read(ranks):
    def body(group):
        backend = dist.group.WORLD._get_backend(CPU)
        names = [name for name in dir(c10d.Backend) if name.lstrip("_").startswith("supports_")]
        found = {
            name for name in names if name != "supports_tensor_alloc" and getattr(backend, name)
        }
        return len(names) > 5, found

    assert ranks.run(body) == [(True, {"supports_coalescing"})] * SIZE


@pytest.mark.skipif(len(HOOKS) < 2, reason="new in torch 2.14")
def test_torchs_own_hooks_see_messages(ranks):
    def body(group):
        above = dist.new_group([*range(SIZE)])
        c10d.NanCheckHook.attach(above)
        if dist.get_rank() == 0:
            with pytest.raises(RuntimeError, match="NaN"):
                dist.send(torch.tensor([float("nan")]), 1, above)

    ranks.run(body)


@only_backends
def test_a_hook_is_given_a_work_of_a_blocking_call(ranks):
    def body(group):
        above, seen = dist.new_group([*range(SIZE)]), []
        above.register_post_hook(1, lambda given: seen.append(given.work is not None))
        dist.all_reduce(torch.ones(1), group=above)
        dist.barrier(above)
        return seen

    assert ranks.run(body) == [[True, True]] * SIZE


def recorded(group):
    """Return this rank's records of a collective and a message, by both of torch's functions."""
    above = dist.new_group([0, 1])
    if dist.get_rank() > 1:
        return []
    dist.all_reduce(torch.ones(2), group=above)
    if dist.get_rank() == 0:
        dist.send(torch.ones(2), 1, above)
    else:
        dist.recv(torch.ones(2), 0, above)
    entries = json.loads(c10d._dump_fr_trace_json(True, False, "nc10d"))["entries"]
    pickled = pickle.loads(c10d._dump_fr_trace(True, True, False, "nc10d"))["entries"]
    assert len(entries) == len(pickled)
    assert json.loads(c10d._dump_fr_trace_json(True, True, "nc10d"))["entries"] == []
    assert pickled[-1]["frames"]
    return [(entry["profiling_name"], entry["state"], entry["retired"]) for entry in entries[-2:]]


@only_recorded
def test_records_have_messages_and_the_end_of_blocking_calls(ranks):
    first, second, _ = ranks.run(recorded)
    done = ("completed", True)
    assert first == [("nc10d:all_reduce", *done), ("nc10d:send 0->1", *done)]
    assert second == [("nc10d:all_reduce", *done), ("nc10d:recv 1<-0", *done)]


@only_recorded
def test_torch_attaches_no_recorder_of_its_own(ranks):
    def body(group):
        return (
            dist.new_group([*range(SIZE)]) in dist.distributed_c10d._world.pg_flight_recorder_hooks
        )

    assert ranks.run(body) == [False] * SIZE


def fails(group, folder):
    """Make calls that differ, and return the kind of error before and after."""
    above = dist.new_group([*range(SIZE)])
    backend = above._get_backend(CPU)
    before = backend.get_error().name
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(torch.ones(2 + dist.get_rank()), group=above)
    return before, backend.get_error().name


@only_backends
def test_a_failed_group_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv(FILE, str(tmp_path / "rank"))
    with Ranks(SIZE, "processes") as started:
        started.run(start)
        assert started.run(fails, [str(tmp_path)] * SIZE) == [("SUCCESS", "COMM_ERROR")] * SIZE
    if SELF_RECORDING:
        for rank in range(SIZE):
            trace = pickle.loads((tmp_path / f"rank{rank}").read_bytes())
            assert trace["entries"][-1]["profiling_name"] == "nc10d:all_reduce"
