"""Programs of torch.distributed on nc10d in processes: DDP, FSDP, DTensor, messages, hooks."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.nn.parallel import DistributedDataParallel

import nc10d
import nc10d.torch
from nc10d.errors import CollectiveMismatch
from nc10d.torch.backend.torch_versions import PYTHON_BACKENDS

RANKS = {"world_size": 2, "kind": "processes"}


def start(group):
    torch.set_num_threads(1)
    nc10d.torch.as_torch_group()


def model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2))


def batch(rank):
    torch.manual_seed(100 + rank)
    return torch.randn(4, 8)


def mean_gradients():
    """Return the gradients that data-parallel training of two ranks has."""
    alone = model()
    (sum(alone(batch(rank)).square().mean() for rank in range(2)) / 2).backward()
    return [p.grad for p in alone.parameters()]


def ddp(group):
    net = DistributedDataParallel(model(seed=group.rank()), bucket_cap_mb=0.0005)
    with torch.no_grad():
        for own, first in zip(net.module.parameters(), model().parameters(), strict=True):
            assert torch.equal(own, first), "rank 0's parameters have been broadcast"
    net(batch(group.rank())).square().mean().backward()
    return [p.grad for p in net.parameters()]


def ddp_with_hook(group):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    net = DistributedDataParallel(model())
    net.register_comm_hook(None, fp16_compress_hook)
    net(batch(group.rank())).square().mean().backward()
    return [p.grad for p in net.parameters()]


def ddp_with_built_in_hook(group):
    net = DistributedDataParallel(model())
    net._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    net(batch(group.rank())).square().mean().backward()
    return [p.grad for p in net.parameters()]


def fsdp(group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net = model()
    mesh = init_device_mesh("cpu", (2,))
    for layer in net:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    net(batch(group.rank())).square().mean().backward()
    return [p.grad.full_tensor() for p in net.parameters()]


@pytest.mark.parametrize("train", [ddp, ddp_with_hook, ddp_with_built_in_hook, fsdp])
def test_training_gives_the_mean_gradients(ranks, train):
    tolerance = 1e-3 if train is ddp_with_hook else 1e-6
    for found in ranks.run(train):
        for grad, expected in zip(found, mean_gradients(), strict=True):
            assert torch.allclose(grad, expected, atol=tolerance)


def tensor_parallel(group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2,))
    net = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return torch.allclose(net(batch(0)), model()(batch(0)), atol=1e-6)


def functional(group):
    import torch.distributed._functional_collectives as funcol

    name = dist.group.WORLD.group_name
    x = torch.full((2,), group.rank() + 1.0)
    summed = funcol.all_reduce(x, "sum", dist.group.WORLD)
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(x, 2, name)
    shared = torch.ops._c10d_functional.reduce_scatter_tensor(torch.ones(4), "sum", 2, name)
    swapped = funcol.all_to_all_single(x, None, None, dist.group.WORLD)
    first = funcol.broadcast(x, 0, dist.group.WORLD)
    both = funcol.all_reduce_coalesced([x, x], "sum", dist.group.WORLD)
    found = [summed, gathered, shared, swapped, first, *both]
    for x in gathered, shared:
        torch.ops._c10d_functional.wait_tensor(x)
    return [x.tolist() for x in found]


def functional_into_output(group):
    out = torch.zeros(4)
    x = torch.full((2,), group.rank() + 1.0)
    name = dist.group.WORLD.group_name
    torch.ops._c10d_functional.all_gather_into_tensor_out(x, 2, name, out=out)
    torch.ops._c10d_functional.wait_tensor(out)
    return out.tolist()


def test_dtensor_and_functional_collectives_run(ranks):
    assert ranks.run(tensor_parallel) == [True, True]
    expected = [[3, 3], [1, 1, 2, 2], [2, 2], [1, 2], [1, 1], [3, 3], [3, 3]]
    assert ranks.run(functional) == [expected] * 2
    assert ranks.run(functional_into_output) == [[1, 1, 2, 2]] * 2


def groups(group):
    pair = dist.new_group([1, 0], sort_ranks=False)
    own = dist.new_group([group.rank()], use_local_synchronization=True)
    half = dist.split_group(split_ranks=[[0], [1]])
    assert dist.get_world_size(half) == dist.get_world_size(own) == 1
    assert nc10d.torch.group_of(pair).ranks == (1, 0)
    found = []
    for _ in range(3):  # the same name again
        again = dist.new_group([0, 1], use_local_synchronization=True)
        objects = [None, None]
        dist.all_gather_object(objects, {"rank": group.rank()}, group=again)
        found += objects
        dist.destroy_process_group(again)
    return found


def test_groups_come_and_go(ranks):
    assert ranks.run(groups) == [[{"rank": 0}, {"rank": 1}] * 3] * 2


def own_calls_between(group):
    x = torch.ones(2)
    dist.all_reduce(x)
    with nc10d.coalescing_manager() as block:
        nc10d.all_reduce(x)
    block.plan().launch()
    dist.monitored_barrier(timeout=timedelta(seconds=20))
    return x.tolist()


def test_calls_of_both_libraries_have_one_order(ranks):
    assert ranks.run(own_calls_between) == [[8.0, 8.0]] * 2


def profile(group):
    with torch.profiler.profile(record_shapes=True) as seen:
        dist.all_reduce(torch.ones(3))
        dist.barrier()
    found = {event.name: event.input_shapes for event in seen.events()}
    return found["nc10d:all_reduce"], "nc10d:barrier" in found


def test_operations_are_events_of_the_profiler(ranks):
    assert ranks.run(profile) == [([[3]], True)] * 2


def mismatch_in_backward(group):
    pair = dist.new_group([0, 1])
    net = DistributedDataParallel(model(), process_group=pair)
    loss = net(batch(0)).square().mean()

    def other_call():
        dist.broadcast(torch.zeros(3), 0, group=pair)

    with pytest.raises(dist.DistBackendError) as caught:
        (other_call if group.rank() else loss.backward)()
    dist.barrier()  # the other groups go on
    return type(caught.value.__cause__)


def test_a_mismatch_comes_out_of_backward_with_its_cause(ranks):
    assert ranks.run(mismatch_in_backward) == [CollectiveMismatch] * 2


def with_torchs_power_sgd(group, name, kind):
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import (
        PowerSGDState,
        powerSGD_hook,
    )

    given = {"none": None, "world": dist.group.WORLD}[name]
    state = PowerSGDState(given, matrix_approximation_rank=1, start_powerSGD_iter=2)
    net = kind(torch.nn.Linear(1, 5))
    net.register_comm_hook(state, powerSGD_hook)
    found = []
    for _ in range(4):
        net.zero_grad()
        net(torch.full((1,), float(group.rank()))).sum().backward()
        found.append(net.module.weight.grad.flatten().tolist())
    return found, state.process_group is given


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [DistributedDataParallel, nc10d.torch.DistributedDataParallel])
@pytest.mark.parametrize("name", ["none", "world"])
def test_torchs_power_sgd_on_a_group_of_torchs_averages(ranks, name, kind):
    for found, same in ranks.run(with_torchs_power_sgd, [name] * 2, [kind] * 2):
        assert same
        assert found == [pytest.approx([0.5] * 5)] * 4


def meets_a_failure(group):
    """Return how often each hook was called when calls differ."""
    pair = dist.new_group([0, 1])
    called = []
    pair.register_abort_hook(1, lambda: called.append("abort"))
    pair.register_abort_hook(2, lambda: called.append("never"))
    pair.unregister_abort_hook(2)
    pair.register_pre_hook(3, lambda given: called.append("before"))
    pair.register_post_hook(4, lambda given: called.append("after"))
    x = torch.ones(2)
    dist.all_reduce(x, group=pair)
    with pytest.raises(dist.DistBackendError):
        dist.all_reduce(torch.ones(2 + dist.get_rank()), group=pair)
    return called[:2], called.count("abort"), "never" in called


@pytest.mark.skipif(not PYTHON_BACKENDS, reason="hooks are new in torch 2.14")
def test_hooks_are_called_before_and_after_a_call_and_at_a_failure(ranks):
    assert hasattr(c10d.ProcessGroup, "register_pre_hook")
    assert ranks.run(meets_a_failure) == [(["before", "after"], 1, False)] * 2


def messages_with_hooks(group):
    """Return what the hooks of a group saw of messages, and the sender that a receive names."""
    pair = dist.new_group([0, 1])
    seen = []
    pair.register_pre_hook(1, lambda given: seen.append((given.name.name, given.op_id)))
    pair.register_post_hook(2, lambda given: seen.append((given.name.name, given.op_id)))
    x = torch.full((2,), 3.0)
    if dist.get_rank() == 0:
        dist.send(x, 1, pair)
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1, pair)])
        sender = 0
    else:
        y, z = torch.zeros(2), torch.zeros(2)
        sender = dist.recv(y, None, pair)
        works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, z, 0, pair)])
    for work in works:
        work.wait()
    assert dist.get_rank() == 0 or (torch.equal(x, y) and torch.equal(x, z))
    return sender, [name for name, _ in seen], len({number for _, number in seen})


@pytest.mark.skipif(not PYTHON_BACKENDS, reason="hooks are new in torch 2.14")
def test_hooks_see_messages(ranks):
    expected = [(0, [name] * 4, 2) for name in ("SEND", "RECV")]
    assert ranks.run(messages_with_hooks) == expected


def starts_after_a_refused_call(group):
    """Return whether messages that nobody takes yet start without blocking, after an error."""
    rank = dist.get_rank()
    for call in (dist.send, dist.recv):
        with pytest.raises(ValueError, match="rank"):
            call(torch.ones(2), rank)
    large = torch.full((1 << 18,), float(rank))
    work = dist.isend(large, 1 - rank, tag=5)
    dist.barrier()
    early = work.is_completed()
    dist.barrier()
    received = torch.empty_like(large)
    dist.recv(received, 1 - rank, tag=5)
    work.wait()
    return early, bool((received == 1 - rank).all())


def test_only_blocking_calls_wait_for_their_message(ranks):
    """isend does not block, even after a send that was refused before it reached the group."""
    assert ranks.run(starts_after_a_refused_call) == [(False, True)] * 2


def leave(x, device):
    """Begin calls in a block, and raise."""
    if device is not None:
        dist.send(x, 1 - dist.get_rank())
    dist.all_reduce(torch.full((2,), 100.0))
    raise KeyError


def blocks(group):
    """Exchange in a block by torch's waiting calls; then leave blocks by an exception."""
    peer, x, y = 1 - dist.get_rank(), torch.full((2,), float(dist.get_rank())), torch.zeros(2)
    with dist._coalescing_manager(device=x.device):
        dist.send(x, peer)
        dist.recv(y, peer)
    for device in (x.device, None):
        with pytest.raises(KeyError), dist._coalescing_manager(device=device):
            leave(x, device)
    total = y.clone()
    dist.all_reduce(total)
    return y.tolist(), total.tolist()


def test_waiting_messages_join_a_block_and_an_exception_ends_it(ranks):
    assert ranks.run(blocks) == [([1.0, 1.0], [1.0, 1.0]), ([0.0, 0.0], [1.0, 1.0])]
