"""Optimizers that step in the backward pass: DDP lets them step by the means."""

import pytest
import torch
from torch import nn

import nc10d as dist
from nc10d.reducer import hooks
from nc10d.testing import run_local
from nc10d.torch import DistributedDataParallel, MixedPrecision, apply_optimizer_in_backward

SIZE, STEPS = 2, 4


class Net(nn.Module):
    """Three layers, of which one may be left out of a pass."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1)
        own = torch.Generator().manual_seed(0)
        for x in self.parameters():
            x.data.copy_(torch.randn(x.shape, generator=own) / 2)

    def forward(self, x, middle=True):
        x = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.middle(x)) if middle else x)


def data_of(rank, step):
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * rank + step))


def train(group, inside, names, leaves_out=False, hook=None, **options):
    """Train the parameters in `names` by Adam, inside of the backward pass or after it."""
    model = Net()
    chosen = [x for name, x in model.named_parameters() if name.startswith(names)]
    others = [x for name, x in model.named_parameters() if not name.startswith(names)]
    optimizers = []
    if inside:
        apply_optimizer_in_backward(torch.optim.Adam, chosen, {"lr": 0.1})
    else:
        optimizers = [torch.optim.Adam([x], lr=0.1) for x in chosen]
    optimizers += [torch.optim.SGD([x], 0.1) for x in others]
    ddp = DistributedDataParallel(model, **options)
    if hook is not None:
        ddp.register_comm_hook(group, hook)
    for step in range(STEPS):
        if step == 2:
            with ddp.no_sync():
                ddp(data_of(group.rank, 7)).float().square().mean().backward()
        middle = not (leaves_out and step % 2)
        ddp(data_of(group.rank, step), middle).float().square().mean().backward()
        assert [x.grad is None for x in chosen] == [inside] * len(chosen) or leaves_out
        for optimizer in optimizers:
            optimizer.step()
        ddp.zero_grad()
    return [x.detach().clone() for x in model.parameters()]


@pytest.mark.parametrize("names", [("first", "middle", "last"), ("middle",)], ids=["all", "some"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bucket_cap_mb": 1e-5},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-5},
        {"static_graph": True},
        {"find_unused_parameters": True, "leaves_out": True},
        {"hook": hooks.bf16_compress_hook, "bucket_cap_mb": 1e-5},
        {"mixed_precision": MixedPrecision(torch.bfloat16), "bucket_cap_mb": 1e-5},
    ],
    ids=["plain", "buckets", "views", "static", "unused", "hook", "mixed"],
)
def test_steps_inside_of_a_backward_pass_are_those_after_it(names, options):
    def run(group):
        return train(group, True, names, **options), train(group, False, names, **options)

    (inside, after), other = run_local(run, SIZE)
    assert all(map(torch.equal, inside, other[0]))
    for found, expected in zip(inside, after, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.ranks(SIZE)
def test_an_optimizer_steps_while_the_rest_of_the_backward_pass_runs(world):
    model = Net()
    apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-5)
    seen = []
    # Behind the buckets of the last layer, on every rank; the next launch looks at them.
    model.middle.weight.register_hook(lambda _: world.barrier())
    model.first.bias.register_hook(lambda _: seen.append(model.last.weight.detach().clone()))
    for step in range(3):  # later passes have the buckets of the first pass's order
        seen.append(model.last.weight.detach().clone())
        ddp(data_of(world.rank, step)).sum().backward()
    assert not torch.equal(seen[-2], seen[-1])


def test_gradients_are_kept_on_request(monkeypatch):
    monkeypatch.setenv("NC10D_KEEP_STEPPED_GRADIENTS", "1")

    def run(group):
        model = Net()
        apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        ddp = DistributedDataParallel(model)
        ddp(data_of(group.rank, 0)).sum().backward()
        return [x.grad for x in model.parameters()]

    first, second = run_local(run, SIZE)
    assert all(map(torch.equal, first, second))


@pytest.mark.ranks(SIZE)
def test_an_optimizer_may_be_applied_to_a_wrapped_module_until_its_first_pass(world):
    found = []
    for late in (False, True):
        model = Net()
        given = torch.optim.SGD, model.last.parameters(), {"lr": 0.1}
        if not late:
            apply_optimizer_in_backward(*given)
        ddp = DistributedDataParallel(model)
        ddp.register_comm_hook(world, hooks.bf16_compress_hook)
        if late:
            apply_optimizer_in_backward(*given)
        for step in range(2):
            ddp(data_of(world.rank, step)).sum().backward()
        found.append(model.last.weight.detach().clone())
    assert torch.equal(*found)


def test_an_optimizer_applied_after_the_first_pass_is_an_error_of_the_next_forward_pass():
    def run(group):
        model = Net()
        apply_optimizer_in_backward(torch.optim.SGD, model.last.parameters(), {"lr": 0.1})
        ddp = DistributedDataParallel(model)
        ddp(data_of(group.rank, 0)).sum().backward()
        apply_optimizer_in_backward(torch.optim.SGD, model.last.parameters(), {"lr": 0.1})
        with pytest.raises(RuntimeError, match="came after the first pass"):
            ddp(data_of(group.rank, 0))
        return dist.get_rank()

    assert run_local(run, SIZE) == [0, 1]
