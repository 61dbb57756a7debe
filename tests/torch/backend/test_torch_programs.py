"""Programs of torch.distributed on nc10d, ranks as processes: DDP, FSDP, DTensor, groups."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import nc10d
import nc10d.torch
from nc10d.errors import CollectiveMismatch

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


def coalesced(group):
    xs, out = [torch.ones(2), torch.ones(3)], torch.zeros(4)
    with dist._coalescing_manager():
        for x in xs:
            dist.all_reduce(x)
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_gather_into_tensor(out, xs[0])
    manager.wait()
    other = 1 - group.rank()
    y = torch.zeros(3)
    batch_of = [dist.P2POp(dist.irecv, y, other), dist.P2POp(dist.isend, xs[1], other)]
    for work in dist.batch_isend_irecv(batch_of):
        work.wait()
    z = torch.zeros(2)
    sender = None
    if group.rank():
        dist.send(out[:2], 0)
    else:
        sender = dist.recv(z)
    return torch.cat([*xs, out, y]).tolist(), sender


def test_blocks_and_messages(ranks):
    first, second = ranks.run(coalesced)
    assert first[0] == second[0] == [2.0] * 12
    assert (first[1], second[1]) == (1, None)


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
