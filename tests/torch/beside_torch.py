"""Train a model by torch's DistributedDataParallel and by nc10d's, and compare the results."""

import copy

import torch
import torch.distributed
import zoo

from nc10d.torch import DistributedDataParallel

VARYING = "branches", "repeats"


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
