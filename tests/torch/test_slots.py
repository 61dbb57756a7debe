"""A gradient gets into its slot divided, and its mean gets back, whatever its layout and dtype."""

import sys
from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from nc10d.testing import run_local
from nc10d.torch import DistributedDataParallel, ZeroRedundancyOptimizer, slots

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
LAYOUTS = {
    "plain": torch.clone,
    "channels last": lambda x: x.to(memory_format=torch.channels_last),
    "permuted": lambda x: x.permute(1, 0, 3, 2).contiguous().permute(1, 0, 3, 2),
    "with gaps": lambda x: torch.stack([x, x], -1)[..., 0],
    "lazily negative": lambda x: torch._neg_view(-x),
}
layouts = st.sampled_from(list(LAYOUTS))


@given(
    dtype=st.sampled_from(FLOATS),
    own=layouts,
    given_layout=layouts,
    count=st.integers(1, 5),
    past=st.booleans(),
    records=st.booleans(),
)
def test_a_slot_has_the_quotient_and_the_gradient_the_mean(
    dtype, own, given_layout, count, past, records
):
    values = torch.arange(-17, 19).to(dtype).reshape(1, 4, 3, 3)
    x = torch.nn.Parameter(LAYOUTS[own](torch.zeros_like(values)).resolve_neg())
    x.grad = LAYOUTS[given_layout](values).requires_grad_(records)
    bucket = torch.zeros(36, dtype=dtype)
    slot = slots.Dense(x, bucket.numpy() if dtype.itemsize > 2 else bucket, False, past)
    gradient, divided = slot.move(x, count, False)
    assert gradient is None
    assert torch.equal(slot.view, values / count if divided else values)
    before, version = x.grad, x.grad._version
    slot.view.copy_(values * 2)
    slots.write_means([(slot, x)])
    assert x.grad is before
    assert torch.equal(x.grad.detach(), values * 2)
    assert x.grad._version > version, "autograd would not notice the change"


def test_a_gradient_that_is_its_own_slot_is_divided_with_its_bucket():
    """It may be marked several times in a pass, and is divided once."""
    x = torch.nn.Parameter(torch.zeros(4))
    bucket = torch.ones(4)
    x.grad = bucket.view(4)
    slot = slots.Dense(x, bucket.numpy(), False)
    assert slot.move(x, 2, False) == (None, False)
    assert torch.equal(bucket, torch.ones(4))


@pytest.mark.parametrize("dtype", FLOATS)
def test_gradients_of_the_parameters_layout_are_divided_by_their_copy(dtype):
    """The quick way is the usual one: it is taken for every dtype, and for any number of ranks."""
    x = torch.nn.Parameter(torch.zeros(3, 5, dtype=dtype))
    x.grad = torch.ones_like(x)
    slot = slots.Dense(x, torch.zeros(15, dtype=dtype), False)
    assert slot.move(x, 1, False) == (None, True)
    assert slot.row(x.grad) is not None


@pytest.mark.parametrize(
    "gradient",
    [
        torch.ones(2, 4),
        torch.ones(8, 4),
        torch._efficientzerotensor((4, 4)),
        torch.ones(4, 4).to_sparse(),
    ],
    ids=["shorter", "longer", "zero tensor", "sparse"],
)
def test_a_gradient_without_the_slots_memory_is_left_to_torch(gradient):
    """A parameter's data may be replaced by another shape; no byte beside the gradient is read."""
    x = torch.nn.Parameter(torch.zeros(4, 4))
    slot = slots.Dense(x, torch.zeros(16).numpy(), False)
    x.data = torch.zeros(gradient.shape)
    x.grad = gradient
    with suppress(RuntimeError):  # torch's own, of another shape
        assert slot.move(x, 2, False) == (None, False)
    assert slot.row(gradient) is None


def other_data(x):
    x.grad.data = x.grad * 3


def other_storage(x):
    x.grad.set_(x.grad * 3)


def other_object(x):
    x.grad = x.grad * 3


def own_memory(x):
    x.grad.mul_(3)


@pytest.mark.parametrize("change", [other_data, other_storage, other_object, own_memory])
@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("both", [False, True])
def test_gradients_with_other_memory_are_averaged_as_without_bucket_views(
    change, accumulates, both
):
    def run(group, as_views):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        for x in model.parameters():
            x.data.copy_(torch.linspace(-1, 1, x.numel()).view(x.shape))
        model = DistributedDataParallel(model, gradient_as_bucket_view=as_views)
        found = []
        for step in range(4):
            if not accumulates:
                model.zero_grad(set_to_none=step % 2 == 0)
            model(torch.full((1, 3), 1.0 + step + group.rank)).sum().backward()
            found += [x.grad.clone() for x in model.parameters()]
            if both or group.rank == step % 2:
                change(model.module[0].weight)
            found += [x.grad.clone() for x in model.parameters()]
        return found

    own, views = (run_local(run, 2, [flag] * 2) for flag in (False, True))
    torch.testing.assert_close(views, own)


@pytest.mark.ranks(2)
def test_a_hook_may_give_the_tensor_of_a_bucket_other_memory(world):
    def replaced(group, bucket):
        buffer = bucket.buffer()
        buffer.data = buffer + group.rank
        group.all_reduce(buffer)
        done = torch.futures.Future()
        done.set_result(buffer)
        return done

    model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
    model.register_comm_hook(world, replaced)
    model(torch.ones(1, 1)).sum().backward()
    assert model.module.weight.grad.item() == 3.0


@pytest.mark.ranks(2)
@pytest.mark.parametrize("view", [False, True])
def test_parameters_with_other_memory_step_on_all_ranks(view):
    params = [nn.Parameter(torch.ones(2, 2)) for _ in range(4)]
    zero = ZeroRedundancyOptimizer(params, torch.optim.SGD, parameters_as_bucket_view=view, lr=1.0)
    for _ in range(3):
        for x in params:
            x.data = x.data * 2
            x.grad = torch.ones_like(x)
        zero.step()
    assert [x.tolist() for x in params] == [[[1.0] * 2] * 2] * 4


@pytest.mark.ranks(2, kind="processes", strict=False)
@pytest.mark.parametrize("as_views", [False, True])
def test_a_gradient_of_the_third_pass_enters_at_most_eight_python_functions(as_views):
    """Of the gradients that launch and begin nothing."""
    layers = [nn.Linear(3, 3) for _ in range(5)]
    model = DistributedDataParallel(nn.Sequential(*layers), gradient_as_bucket_view=as_views)
    found = []

    def note(frame, event, _):
        if event == "call":
            if frame.f_code.co_name == "ready":  # autograd's hook
                found.append(0)
            if found:
                found[-1] += 1

    for _ in range(3):
        loss = model(torch.ones(1, 3)).sum()
        found.clear()
        sys.setprofile(note)
        try:
            loss.backward()
        finally:
            sys.setprofile(None)
    assert len(found[1:-1]) == 8
    assert max(found[1:-1]) <= 8
