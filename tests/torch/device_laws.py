"""Laws of nc10d.torch on the ranks' devices, for tests on the CPU and tools/gpu_check.py."""

import torch
from torch import nn

import nc10d as dist
from nc10d.torch import DistributedDataParallel, MixedPrecision, ZeroRedundancyOptimizer

STEPS = 3


def device_of(group):
    """Return the rank's device: ranks share devices where there are fewer; the CPU without any."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(group.rank % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


def model_on(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 4)).to(device)


def batch_of(rank, step, device):
    own = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(5, 6, generator=own).to(device)


def trained(group, model, optimizer, device):
    for step in range(STEPS):
        optimizer.zero_grad()
        model(batch_of(group.rank, step, device)).float().square().mean().backward()
        optimizer.step()
    return torch.cat([x.detach().flatten().cpu() for x in model.parameters()])


def mixed_precision_trains(group):
    """All ranks end with the same parameters, near those of full precision."""
    device, found = device_of(group), []
    for precision in (MixedPrecision(torch.bfloat16), None):
        model = DistributedDataParallel(
            model_on(device), process_group=group, mixed_precision=precision
        )
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        found.append(trained(group, model, optimizer, device))
    low, full = found
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, full, rtol=0.05, atol=0.02)
    whole = torch.zeros(group.size, low.numel())
    dist.all_gather_into_tensor(whole, low, group)
    assert all(torch.equal(row, low) for row in whole)


def zero_is_the_plain_optimizer(group):
    """A divided Adam gives the bits of the undivided one."""
    device, found = device_of(group), []
    for divided in (True, False):
        model = DistributedDataParallel(model_on(device), process_group=group)
        if divided:
            optimizer = ZeroRedundancyOptimizer(
                model.parameters(), torch.optim.Adam, group, lr=0.05
            )
        else:
            optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        found.append(trained(group, model, optimizer, device))
    assert torch.equal(*found)


def objects_come_to_the_device(group):
    """A state of rank 0 arrives on each rank's own device."""
    device = device_of(group)
    where = device if device.type == "cuda" else None
    objects = [{"weight": torch.arange(5.0, device=device)} if group.rank == 0 else None]
    dist.broadcast_object_list(objects, 0, group, map_location=where)
    weight = objects[0]["weight"]
    assert weight.device == device
    assert weight.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def a_captured_step_of_torch(group):
    """Backward pass, nc10d's all_reduce and capturable Adam in a graph give the eager numbers.

    While the graph is replayed, torch raises if anything waits for the device. Without a GPU the
    step runs eagerly, twice.
    """
    device, found = device_of(group), []
    for captured in (True, False):
        model = model_on(device)
        capturable = device.type == "cuda"
        optimizer = torch.optim.Adam(model.parameters(), 0.05, capturable=capturable)
        batch = batch_of(group.rank, 0, device)

        def step(model=model, optimizer=optimizer, batch=batch):
            model(batch).square().mean().backward()
            for x in model.parameters():
                dist.all_reduce(x.grad, dist.AVG, group)
            optimizer.step()
            for x in model.parameters():
                x.grad.zero_()

        if captured and capturable:
            replay(step)
        else:
            for _ in range(WARM + REPLAYS):
                step()
        found.append(torch.cat([x.detach().flatten().cpu() for x in model.parameters()]))
    torch.testing.assert_close(*found)


WARM, REPLAYS = 3, 5


def replay(step):
    """Run a step WARM times on a side stream, capture it, and replay it REPLAYS times."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(REPLAYS):
            graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


LAWS = [
    mixed_precision_trains,
    zero_is_the_plain_optimizer,
    objects_come_to_the_device,
    a_captured_step_of_torch,
]
