"""Gradients equal those of torch's DistributedDataParallel for all models.

Dense gradients are equal to the bit; for sparse gradients the order of additions differs.
"""

import copy
from itertools import product

import pytest
import torch
import torch.distributed
import zoo

from nc10d.testing import Ranks
from nc10d.torch import DistributedDataParallel, slots

STEPS = 4
VARYING = "branches", "repeats"
CASES = [
    (name, views, kind)
    for name, views in product(zoo.ZOO, [False, True])
    for kind in (["find"] if name in VARYING else ["plain", "static"])
]
OPTIONS = {"plain": {}, "find": {"find_unused_parameters": True}, "static": {"static_graph": True}}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with Ranks(2, "processes", timeout=60) as two:
        two.run(join_gloo, [str(tmp_path_factory.mktemp("gloo") / "meet")] * 2)
        yield two


def join_gloo(group, path):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{path}", rank=group.rank, world_size=group.size
    )


def state_of(model):
    """Return every gradient (or None) and every buffer."""
    return [
        *(x.grad if x.grad is None else x.grad.clone() for x in model.parameters()),
        *(x.clone() for x in model.buffers()),
    ]


def trained(model, name, rank, passes):
    """Train; `passes` has for each step whether it is reduced. Return the state after each step."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    found = []
    for step, reduced in enumerate(passes):
        if reduced:
            zoo.loss(model(*zoo.inputs(name, rank, step))).backward()
        else:
            with model.no_sync():
                zoo.loss(model(*zoo.inputs(name, rank, step))).backward()
        found.append(state_of(model.module))
        if reduced:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    return found


def same(a, b):
    if a is None or b is None:
        return a is b
    if a.layout is torch.strided and b.layout is torch.strided:
        return torch.equal(a, b)
    # Rows of the same place are added in another order.
    return a.layout is b.layout and torch.allclose(a.to_dense(), b.to_dense(), 1e-13, 1e-14)


def both(group, name, passes, options):
    """Train the same model by torch's DDP and by nc10d's; return the first difference.

    With the option `device_ids` the model is on that GPU.
    """
    torch.manual_seed(group.rank)  # ranks begin with different models
    model = zoo.make(name).to(*(f"cuda:{index}" for index in options.get("device_ids", ())))
    theirs = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(model), **options)
    ours = DistributedDataParallel(model, **options)
    each = zip(
        trained(theirs, name, group.rank, passes),
        trained(ours, name, group.rank, passes),
        strict=True,
    )
    for step, (wanted, found) in enumerate(each):
        for index, (a, b) in enumerate(zip(wanted, found, strict=True)):
            if not same(a, b):
                return step, index, a, b
    return None


@pytest.mark.parametrize(("name", "views", "kind"), CASES)
def test_gradients_and_buffers_are_torchs(ranks, name, views, kind):
    options = {"gradient_as_bucket_view": views, "bucket_cap_mb": 0.001, **OPTIONS[kind]}
    answers = ranks.run(both, [name] * 2, [[True] * STEPS] * 2, [options] * 2)
    assert answers == [None, None]


def both_as_on_a_device(*arguments):
    """As `both`, with buckets that are tensors, into which the Reducer copies, as on GPUs."""
    before, slots.MOVED = slots.MOVED, {"cpu"}
    try:
        return both(*arguments)
    finally:
        slots.MOVED = before


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("name", ["perceptron", "convolution", "branches", "repeats"])
def test_gradients_are_torchs_where_the_reducer_moves_them(ranks, name, views):
    options = {"gradient_as_bucket_view": views, "find_unused_parameters": name in VARYING}
    passes = [[True, False, True, True]] * 2
    assert ranks.run(both_as_on_a_device, [name] * 2, passes, [options] * 2) == [None, None]


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("name", ["perceptron", "convolution", "rows", "branches"])
def test_sums_of_passes_without_reduction_are_torchs(ranks, name, views):
    options = {"gradient_as_bucket_view": views, "find_unused_parameters": name in VARYING}
    passes = [[False, True, False, False, True, True]] * 2
    assert ranks.run(both, [name] * 2, passes, [options] * 2) == [None, None]
