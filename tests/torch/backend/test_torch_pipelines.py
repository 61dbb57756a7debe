"""torch's pipelines on nc10d: a model in stages on several ranks trains as the whole model does.

The law, for each schedule that torch has: for each of two batches, the outputs, the losses and the
gradients of all stages equal those of the whole model on one process. Four ranks run pipelines of
two ranks, two pipelines at once in groups of their own, and one pipeline of four.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

import nc10d.torch

pytestmark = pytest.mark.slow
SCHEDULES = [name for name in pipelining.__all__ if name.startswith("Schedule")]
CHUNKS, WIDTH = 8, 6


RANKS = {"world_size": 4, "kind": "processes", "timeout": 60}


def start(group):
    torch.set_num_threads(1)
    nc10d.torch.as_torch_group()


def layers(count):
    torch.manual_seed(0)
    parts = (
        torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Tanh()) for _ in range(count)
    )
    return [*parts]


def batches():
    torch.manual_seed(1)
    return [torch.randn(2, 2 * CHUNKS, WIDTH) for _ in range(2)]


def taken_gradients(part):
    """Return the gradients of a part of the model, which has none afterwards."""
    grads = [p.grad for p in part.parameters()]
    part.zero_grad()
    return grads


def stages_of(schedule, rank, size):
    """Return the stages that a rank has, and the number of all."""
    if issubclass(schedule, PipelineScheduleSingle):
        return [rank], size
    if schedule in (pipelining.ScheduleZBVZeroBubble, pipelining.ScheduleDualPipeV):
        return [rank, 2 * size - 1 - rank], 2 * size  # down the ranks and up again
    return [rank, rank + size], 2 * size


def pipeline(world, name, size):
    """Train a part of the model; return its gradients by batch and stage, outputs and losses."""
    schedule = getattr(pipelining, name)
    group, _ = dist.new_subgroups(size)
    here, count = stages_of(schedule, dist.get_rank(group), size)
    parts = {i: layers(count)[i] for i in here}
    device = torch.device("cpu")
    stages = [
        pipelining.PipelineStage(part, i, count, device, group=group) for i, part in parts.items()
    ]
    single = issubclass(schedule, PipelineScheduleSingle)
    run = schedule(stages[0] if single else stages, CHUNKS, loss_fn=torch.nn.MSELoss())
    found = {}
    for number, (x, target) in enumerate(batches()):
        losses = []
        given = {"target": target, "losses": losses} if count - 1 in here else {}
        out = run.step(*([x] if 0 in here else []), **given)
        if given:
            found[number, "output"] = out.detach()
            found[number, "loss"] = torch.stack(losses).mean().detach()
        found |= {(number, i): taken_gradients(part) for i, part in parts.items()}
    return found


def whole(count):
    """Return what pipelines of so many stages have to find."""
    parts, found = layers(count), {}
    for number, (x, target) in enumerate(batches()):
        out = torch.nn.Sequential(*parts)(x)
        loss = torch.nn.functional.mse_loss(out, target)
        loss.backward()
        found[number, "output"], found[number, "loss"] = out.detach(), loss.detach()
        found |= {(number, i): taken_gradients(part) for i, part in enumerate(parts)}
    return found


@pytest.mark.parametrize(
    ("name", "size"), [*((name, 2) for name in SCHEDULES), ("ScheduleInterleaved1F1B", 4)]
)
def test_a_pipeline_trains_as_the_whole_model_does(ranks, name, size):
    found = ranks.run(pipeline, [name] * 4, [size] * 4)
    _, count = stages_of(getattr(pipelining, name), 0, size)
    for first in range(0, 4, size):
        together = {key: x for own in found[first : first + size] for key, x in own.items()}
        torch.testing.assert_close(together, whole(count))
