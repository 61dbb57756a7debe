"""A gradient gets into its slot divided, and its mean gets back, whatever its layout and dtype."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nc10d.torch import slots

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
    if slot.divide(x, count):
        assert torch.equal(slot.view, values / count)
    else:
        slot.take(x)
        assert torch.equal(slot.view, values)
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
    assert not slot.divide(x, 2)
    assert torch.equal(bucket, torch.ones(4))


@pytest.mark.parametrize("dtype", FLOATS)
def test_gradients_of_the_parameters_layout_are_divided_by_their_copy(dtype):
    """The quick way is the usual one: it is taken for every dtype, and for any number of ranks."""
    x = torch.nn.Parameter(torch.zeros(3, 5, dtype=dtype))
    x.grad = torch.ones_like(x)
    slot = slots.Dense(x, torch.zeros(15, dtype=dtype), False)
    assert slot.divide(x, 1)
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
    assert not slot.divide(x, 2)
    assert slot.row(gradient) is None
