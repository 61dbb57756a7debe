"""Ranks with different numbers of batches: Join blocks of any joinables, and of DDP."""

import numpy as np
import pytest
import torch
import torch.distributed as distributed
from torch import nn

import nc10d as dist
from nc10d.api.join import EarlyTermination
from nc10d.testing import run_local
from nc10d.torch import DistributedDataParallel, SyncBatchNorm, group_of

SIZE = 3


class Sums(dist.Joinable):
    """Adds numbers over the ranks; a rank that has joined adds nothing, and counts its shadows."""

    def __init__(self, group):
        super().__init__()
        self.group, self.sums, self.shadows, self.last, self.kwargs = group, [], 0, None, None

    def __call__(self, x):
        work = dist.Join.notify_join_context(self)
        total = np.array([float(x)])
        self.group.all_reduce(total)
        self.sums.append(total[0])
        return work

    def join_hook(self, **kwargs):
        self.kwargs = kwargs
        owner = self

        class Hook(dist.JoinHook):
            def main_hook(self):
                owner.shadows += 1
                owner.group.all_reduce(np.zeros(1))

            def post_hook(self, is_last_joiner):
                owner.last = is_last_joiner

        return Hook()

    @property
    def join_device(self):
        return "cpu"

    @property
    def join_process_group(self):
        return self.group


@pytest.mark.parametrize("batches", [(3, 1, 2), (0, 0, 2), (2, 2, 2), (0, 0, 0), (5, 0, 5)])
def test_a_rank_without_batches_makes_the_others_collectives_until_all_have_joined(batches):
    def run(group):
        first, second = Sums(group), Sums(group)
        counts = []
        with dist.Join([first, second], flavour=7):
            for _ in range(batches[group.rank]):
                counts.append(first(1).result()[0].item())
                assert second(10) is None
        outside = first(1)
        return first.sums, second.sums, first.shadows, first.last, counts, first.kwargs, outside

    most = max(batches)
    having = [sum(step < x for x in batches) for step in range(most)]
    for mine, found in zip(batches, run_local(run, SIZE), strict=True):
        sums, tens, shadows, last, counts, kwargs, outside = found
        assert sums == [*map(float, having[:mine]), float(SIZE)]
        assert tens == [10.0 * x for x in having[:mine]]
        assert (shadows, last, counts) == (most - mine, mine == most, having[:mine])
        assert (kwargs, outside) == ({"flavour": 7}, None)


def test_with_early_termination_every_rank_raises_and_the_group_goes_on():
    def run(group, enable):
        summing, steps = Sums(group), 0
        try:
            with dist.Join([summing], enable, throw_on_early_termination=True):
                for _ in range(2 if enable and group.rank == 1 else 4):
                    summing(1)
                    steps += 1
        except EarlyTermination as error:
            return steps, str(error), summing(1)
        return steps, "", None

    for rank, (steps, text, _) in enumerate(run_local(run, SIZE, [True] * SIZE)):
        said = "Rank 1 exhausted all inputs" if rank == 1 else "at least one rank that exhausted"
        assert steps == 2
        assert said in text
    assert run_local(run, SIZE, [False] * SIZE) == [(4, "", None)] * SIZE


def test_an_exception_ends_the_block_on_all_ranks_with_its_text():
    def run(group):
        summing = Sums(group)
        try:
            with dist.Join([summing]):
                for step in range(group.rank + 2):
                    if group.rank == 2 and step == 2:
                        raise ValueError("bad sample 17")
                    summing(1)
        except (ValueError, dist.DistError) as error:
            return f"{type(error).__name__}: {error}"
        return "went on"

    *others, own = run_local(run, SIZE)
    assert own == "ValueError: bad sample 17"
    assert all(x.startswith("Aborted") and "bad sample 17" in x for x in others), others


def test_a_block_of_wrong_joinables_is_refused_before_anything_is_sent():
    def run(group):
        other = Sums(group.split_group([[0], [1], [2]]))
        found = []
        for joinables in ([], [object()], [Sums(group), other], [Foreign(group)]):
            with pytest.raises((TypeError, ValueError)) as caught, dist.Join(joinables):
                found.append("entered")
            found.append(str(caught.value)[:20])
        return found

    class Foreign(Sums):
        @property
        def join_process_group(self):
            return "world"

    texts = run_local(run, SIZE)
    assert texts[0][:3] == ["Join needs at least ", "<class 'object'> is ", "joinables differ in "]
    assert texts[0][3:] == ["join_process_group m"]
    assert texts[0] == texts[1] == texts[2]


def model_of(kind):
    middle = nn.BatchNorm1d(4) if kind == "buffers" else nn.Tanh()
    model = nn.Sequential(nn.Linear(3, 4), middle, nn.Linear(4, 1))
    # Ranks are threads here, and torch's own generator is everybody's.
    own = torch.Generator().manual_seed(0)
    for x in model.parameters():
        nn.init.normal_(x.data, std=0.5, generator=own)
    return model


def data_of(rank, step):
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(100 * rank + step))


def train(group, batches, static, *, kind="plain", accumulate=False, **options):
    """Train on `batches[rank]` batches in a join block; return the final state."""
    model = DistributedDataParallel(model_of(kind), **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with model.join(divide_by_initial_world_size=static):
        for step in range(batches[group.rank]):
            if accumulate and step % 2 == 0:
                with model.no_sync():
                    model(data_of(group.rank, step)).square().mean().backward()
                continue
            model(data_of(group.rank, step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(data_of(group.rank, step))
    return {name: x.clone() for name, x in model.module.state_dict().items()}


def reference(batches, static):
    """Return the parameters after the same training on one process."""
    model = model_of("plain")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(max(batches)):
        having = [rank for rank, count in enumerate(batches) if step < count]
        losses = [model(data_of(rank, step)).square().mean() for rank in having]
        (sum(losses) / (SIZE if static else len(having))).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("batches", [(3, 1, 4), (0, 2, 2), (1, 1, 1), (4, 0, 0)])
@pytest.mark.parametrize(
    "options",
    [{}, {"static_graph": True}, {"find_unused_parameters": True}, {"bucket_cap_mb": 1e-5}],
    ids=["default", "static", "unused", "buckets"],
)
def test_uneven_training_equals_the_same_training_on_a_single_process(batches, static, options):
    states = run_local(lambda group: train(group, batches, static, **options), SIZE)
    expected = reference(batches, static)
    for state in states:
        for name, x in expected.items():
            torch.testing.assert_close(state[name], x)


@pytest.mark.parametrize("accumulate", [False, True])
def test_after_a_block_every_rank_has_the_state_of_the_last_rank_with_a_batch(accumulate):
    batches = (4, 2, 6)
    states = run_local(
        lambda group: train(group, batches, False, kind="buffers", accumulate=accumulate), SIZE
    )
    for state in states:
        for name, x in states[2].items():
            assert torch.equal(state[name], x), name


def test_a_joined_rank_leaves_its_gradients_alone_and_a_failing_rank_ends_the_block():
    def run(group):
        model = DistributedDataParallel(model_of("plain"))
        try:
            with model.join():
                for step in range(group.rank + 1):
                    model(data_of(group.rank, step)).mean().backward()
                    kept = [x.grad.clone() for x in model.parameters()]
                    if step == 2:
                        raise KeyError("end")
        except (KeyError, dist.DistError) as error:
            own = [x.grad for x in model.parameters()]
            return all(map(torch.equal, kept, own)), "end" in str(error)

    assert run_local(run, SIZE) == [(True, True)] * SIZE


@pytest.mark.ranks(SIZE, strict=False)
def test_a_module_that_raises_on_every_rank_gives_each_rank_its_own_exception(world):
    class Failing(nn.Linear):
        def forward(self, x):
            raise KeyError(f"rank {x}")

    model = DistributedDataParallel(Failing(2, 2))
    if world.rank:  # it comes when rank 0 has ended the block
        with pytest.raises(dist.Aborted):
            world.recv(torch.ones(1), 0)
    with pytest.raises(KeyError, match=f"rank {world.rank}"), model.join():
        model(world.rank)


@pytest.mark.parametrize("throw", [False, True])
def test_a_module_whose_layers_communicate_needs_early_termination(throw):
    def run(group):
        layers = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        model = DistributedDataParallel(SyncBatchNorm.convert_sync_batchnorm(layers))
        steps = 0
        try:
            with model.join(throw_on_early_termination=throw):
                for step in range(2 + group.rank):
                    model(data_of(group.rank, step)).square().mean().backward()
                    steps += 1
        except (ValueError, EarlyTermination) as error:
            return steps, type(error)

    expected = (2, EarlyTermination) if throw else (0, ValueError)
    assert run_local(run, SIZE) == [expected] * SIZE


class OnTorchsGroup(Sums):
    @property
    def join_process_group(self):
        return distributed.group.WORLD


def test_a_group_of_torch_distributed_takes_part_in_joins_and_ddp():
    def run(rank, store):
        distributed.init_process_group("nc10d", store=store, rank=rank, world_size=1)
        try:
            summing = OnTorchsGroup(group_of(distributed.group.WORLD))
            with dist.Join([summing]):
                summing(3)
            model = DistributedDataParallel(model_of("plain"))
            assert model.process_group is distributed.group.WORLD
            assert model.reducer.group is group_of()
            model(data_of(0, 0)).sum().backward()
            with pytest.raises(TypeError, match="with the backend 'nc10d'"):
                DistributedDataParallel(model_of("plain"), process_group=object())
            return summing.sums
        finally:
            distributed.destroy_process_group()

    assert run(0, distributed.HashStore()) == [3.0]
