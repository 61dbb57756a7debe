"""The arguments and methods of torch's DistributedDataParallel that choose buckets and groups."""

import contextvars

import pytest
import torch
from torch import nn

import nc10d as dist
from nc10d.reducer import hooks
from nc10d.testing import run_local
from nc10d.torch import DistributedDataParallel, MixedPrecision, apply_optimizer_in_backward

SMALL = 64 / (1 << 20)
"""Buckets of 64 bytes, in MiB."""


def net():
    module = nn.Sequential(*(nn.Linear(4, 4, dtype=torch.float64) for _ in range(4)))
    own = torch.Generator().manual_seed(0)  # ranks are threads
    for x in module.parameters():
        x.data.copy_(torch.randn(x.shape, generator=own) / 2)
    return module


def data_of(rank, step=0):
    own = torch.Generator().manual_seed(10 * rank + step)
    return torch.randn(3, 4, generator=own, dtype=torch.float64)


def train(model, rank, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        model.zero_grad()
        model(data_of(rank, step)).square().mean().backward()
        optimizer.step()
    return [x.detach().clone() for x in model.parameters()]


def same(first, second):
    return all(map(torch.equal, first, second))


@pytest.mark.parametrize("views", [False, True])
def test_delayed_parameters_are_reduced_together_behind_a_chosen_one(views):
    def run(group):
        plain, module = DistributedDataParallel(net()), net()
        late = [(name, x) for name, x in module.named_parameters() if name[0] in "03"]
        model = DistributedDataParallel(
            module,
            bucket_cap_mb=SMALL,
            gradient_as_bucket_view=views,
            delay_all_reduce_named_params=late,
            param_to_hook_all_reduce=module[1].weight,
        )
        equal = same(train(plain, group.rank), train(model, group.rank))
        plan = [
            [model.reducer.settings.names[p] for p in b.params] for b in model.reducer.plan.buckets
        ]
        return equal, [sorted(bucket) for bucket in plan]

    late = ["0.bias", "0.weight", "3.bias", "3.weight"]
    for equal, buckets in run_local(run, 2):
        assert equal
        place = buckets.index(late)
        assert "1.weight" in buckets[place - 1]


class Branch(nn.Module):
    """Two layers, of which the second is not used."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x):
        return self.used(x)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{"find_unused_parameters": True}, {"static_graph": True}])
def test_buckets_of_unused_parameters_are_skipped_on_request(world, options):
    caps = {"bucket_cap_mb_list": [24 / (1 << 20)], **options}
    model = DistributedDataParallel(Branch(), skip_all_reduce_unused_params=True, **caps)
    for _ in range(3):
        model.zero_grad()
        model(torch.full((1, 2), float(world.rank))).sum().backward()
    buckets = len(model.reducer.plan.buckets)
    reduced = model._get_ddp_logging_data()["num_buckets_reduced"]
    with pytest.raises(ValueError, match="skip_all_reduce_unused_params"):
        model.join()
    assert model.module.used.weight.grad.tolist() == [[0.5, 0.5]] * 2
    assert model.module.unused.weight.grad is None
    assert (buckets, reduced) == (2, 1)


def test_each_bucket_may_have_a_limit_of_its_own():
    def run(group):
        model = DistributedDataParallel(net(), bucket_cap_mb_list=[SMALL, 4 * SMALL, 1])
        train(model, group.rank, 2)
        sizes = [bucket.count * 8 for bucket in model.reducer.plan.buckets]
        return sizes, model.bucket_bytes_cap_list, model.bucket_bytes_cap

    sizes = [32 + 128, 32 + 128 + 32 + 128, 32 + 128]
    for found, limits, cap in run_local(run, 2):
        assert sorted(found) == sorted(sizes)
        assert limits == [64, 256, 1 << 20]
        assert cap == 1 << 20


@pytest.mark.ranks(1)
def test_wrong_options_are_refused_before_anything_is_sent():
    module, other = net(), net()
    weight = module[0].weight
    for options, words in [
        ({"param_to_hook_all_reduce": weight}, "give both"),
        ({"delay_all_reduce_named_params": [("w", weight)]}, "give both"),
        ({"bucket_cap_mb_list": [1, 0]}, "positive sizes"),
    ]:
        with pytest.raises(ValueError, match=words):
            DistributedDataParallel(module, **options)
    for late, until in [(other[0].weight, weight), (weight, other[0].weight)]:
        with pytest.raises(ValueError, match="is no parameter of the module that it trains"):
            DistributedDataParallel(
                module, delay_all_reduce_named_params=[("w", late)], param_to_hook_all_reduce=until
            )


def test_a_model_moves_to_another_group_and_takes_its_hook_along():
    calls = []

    def counting(state, bucket):
        calls.append(1)
        return hooks.allreduce_hook(state[0], bucket)

    def run(group):
        model, state = DistributedDataParallel(Branch(), find_unused_parameters=True), [group]
        model.register_comm_hook(state, counting)
        pair = dist.new_group([0, 2])
        found = []
        for other in (pair, group):
            model._update_process_group(other)
            state[0] = other
            if other is group or group.rank != 1:
                model.zero_grad()
                model(torch.full((1, 2), float(group.rank))).sum().backward()
                found.append(model.module.used.weight.grad[0, 0].item())
        return found

    assert run_local(run, 3) == [[1.0, 1.0], [1.0], [1.0, 1.0]]
    assert len(calls) == 5


@pytest.mark.ranks(2)
def test_a_failed_pass_may_be_followed_by_another_group(world):
    layer = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = DistributedDataParallel(layer, find_unused_parameters=True, bucket_cap_mb=SMALL)
    handle = layer[0].weight.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="is not over"):
        model._check_reducer_finalized()
    handle.remove()
    model._update_process_group(dist.new_group([0, 1]))
    model._check_reducer_finalized()
    model.zero_grad()
    model(torch.full((1, 2), float(world.rank))).sum().backward()
    assert layer[1].bias.grad.tolist() == [1.0, 1.0]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{}, {"mixed_precision": MixedPrecision(torch.bfloat16)}])
@pytest.mark.parametrize("some", [False, True])
def test_a_fused_optimizer_is_an_optimizer_in_the_backward_pass(world, some, options):
    found = []
    for fused in (False, True):
        module = net().float()
        chosen = list(module[3].parameters()) if some else None
        if not fused:
            given = {"lr": 0.1, "betas": (0.8, 0.9)}
            params = chosen or list(module.parameters())
            apply_optimizer_in_backward(torch.optim.Adam, params, given)
        model = DistributedDataParallel(module, **options)
        if fused:
            model._register_fused_optim(torch.optim.Adam, 0.1, (0.8, 0.9), optim_params=chosen)
        for step in range(3):
            model(data_of(world.rank, step).float()).sum().backward()
        found.append([x.detach().clone() for x in module.parameters()])
        with pytest.raises(RuntimeError, match="should be called before training loop starts"):
            model._register_fused_optim(torch.optim.Adam)
    assert same(*found)


NUMBER = contextvars.ContextVar("NUMBER", default=0)


@pytest.mark.ranks(2)
def test_a_hook_runs_in_the_state_of_its_registration(world):
    seen = []

    def looking(state, bucket):
        seen.append((NUMBER.get(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        return hooks.allreduce_hook(state, bucket)

    model = DistributedDataParallel(net())
    NUMBER.set(7)
    model.register_comm_hook(world, looking)
    NUMBER.set(8)
    with torch.autocast("cpu"):
        model(data_of(world.rank)).sum().backward()
        assert torch.is_autocast_enabled("cpu")
    assert (set(seen), NUMBER.get()) == ({(7, True, False)}, 8)


@pytest.mark.ranks(1)
def test_outputs_may_be_changed_in_place(world):
    model = DistributedDataParallel(net())
    model._set_ddp_sink_clone(False)
    output = model(data_of(world.rank)).sum()
    output *= 2
    output.backward()


@pytest.mark.parametrize("when", ["PRE_FORWARD", "POST_FORWARD"])
def test_a_buffer_hook_takes_the_place_of_rank_0s_buffers(when):
    places = torch.nn.parallel.distributed._BufferCommHookLocation

    def add_up(group, buffers):
        return [group.all_reduce(x, async_op=True).get_future() for x in buffers.values()]

    def run(group):
        module = nn.Linear(1, 1)
        module.register_buffer("count", torch.zeros(1))
        model = DistributedDataParallel(module)
        model._register_buffer_comm_hook(group, add_up, places[when])
        module.count.fill_(group.rank + 1.0)
        module.register_forward_hook(lambda layer, *_: seen.append(layer.count.item()))
        seen = []
        model(torch.ones(1, 1)).sum().backward()
        with pytest.raises(TypeError, match="must be callable"):
            model._register_buffer_comm_hook(None, 3)
        return seen[0], module.count.item()

    first = {"PRE_FORWARD": (3.0, 3.0), "POST_FORWARD": (1.0, 2.0)}[when]
    assert run_local(run, 2) == [(x, 3.0) for x in first]


@pytest.mark.parametrize("when", ["PRE_FORWARD", "POST_FORWARD"])
def test_a_buffer_hook_may_write_buffers_that_the_backward_pass_reads(when):
    places = torch.nn.parallel.distributed._BufferCommHookLocation

    def scale(_, buffers):
        for x in buffers.values():
            x.mul_(1)

    def run(_):
        model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
        model._register_buffer_comm_hook(None, scale, places[when])
        losses = [model(torch.ones(4, 2)).sum() for _ in range(2)]
        sum(losses).backward()

    run_local(run, 2)
