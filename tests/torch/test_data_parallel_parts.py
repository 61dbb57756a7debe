"""The sampler and the batch normalisation of a data-parallel program ask nc10d, not torch."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nc10d as dist
import nc10d.torch
from nc10d.testing import run_local
from nc10d.torch import DistributedDataParallel, DistributedSampler, SyncBatchNorm


@pytest.mark.ranks(2)
def test_samplers_without_arguments_share_the_dataset_out(world: dist.ProcessGroup) -> None:
    sampler = DistributedSampler(range(10), shuffle=False)
    assert isinstance(sampler, torch.utils.data.DistributedSampler)
    sampler.set_epoch(3)
    assert (sampler.rank, sampler.num_replicas) == (world.rank, 2)
    assert DistributedSampler([1, 2, 3], 3, 2).rank == 2
    assert list(sampler) == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]][world.rank]


def test_a_sampler_without_a_group_is_an_error() -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        DistributedSampler(range(3))


SHAPES = {"1d": (), "2d": (3, 2), "3d": (2, 1, 2)}


def passed(layer: torch.nn.Module, x: torch.Tensor, factors: torch.Tensor) -> list[torch.Tensor]:
    """Return result and input gradient of a pass whose loss weighs each element differently."""
    x = x.clone().requires_grad_()
    y = layer(x)
    (y * factors).sum().backward()
    return [y.detach(), x.grad]


@settings(deadline=None, max_examples=15)
@given(
    sizes=st.lists(st.integers(0, 4), min_size=2, max_size=3).filter(lambda n: sum(n) != 1),
    shape=st.sampled_from([*SHAPES.values()]),
    affine=st.booleans(),
    momentum=st.sampled_from([0.1, None]),
)
def test_it_is_the_batch_norm_of_all_batches(
    sizes: list[int], shape: tuple[int, ...], affine: bool, momentum: float | None
) -> None:
    torch.manual_seed(sum(sizes))
    kind = {0: torch.nn.BatchNorm1d, 2: torch.nn.BatchNorm2d, 3: torch.nn.BatchNorm3d}[len(shape)]
    whole = kind(5, affine=affine, momentum=momentum, dtype=torch.float64)
    if affine:
        torch.nn.init.normal_(whole.weight)
    x = torch.randn(sum(sizes), 5, *shape, dtype=torch.float64) + 100
    factors = torch.randn_like(x)
    layers = [SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(whole)) for _ in sizes]
    shares = [list(part) for part in zip(x.split(sizes), factors.split(sizes), strict=True)]

    def body(group: dist.ProcessGroup) -> list[torch.Tensor]:
        layer = layers[group.rank]
        assert type(layer) is SyncBatchNorm
        assert isinstance(layer, torch.nn.SyncBatchNorm)
        return passed(layer, *shares[group.rank])

    expected = passed(whole, x, factors)
    got = [torch.cat(parts) for parts in zip(*run_local(body, len(sizes)), strict=True)]
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)
    for layer in layers:
        for name, buffer in whole.named_buffers():
            torch.testing.assert_close(layer.get_buffer(name), buffer)
    for name, parameter in whole.named_parameters():
        parts = [layer.get_parameter(name).grad for layer in layers]
        torch.testing.assert_close(sum(parts), parameter.grad, rtol=1e-6, atol=1e-9)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_have_the_inputs_type(dtype: torch.dtype) -> None:
    y, grad = passed(SyncBatchNorm(2), torch.randn(4, 2).to(dtype), torch.ones(4, 2).to(dtype))
    assert (y.dtype, grad.dtype) == (dtype, dtype)


def test_in_evaluation_and_alone_it_is_batch_norm() -> None:
    torch.manual_seed(0)
    x, plain = torch.randn(6, 3), torch.nn.BatchNorm1d(3)
    alone = SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    assert torch.equal(alone(x), plain(x))  # no group at all
    assert torch.equal(alone.running_var, plain.running_var)

    def body(group: dist.ProcessGroup) -> bool:
        layer = copy.deepcopy(alone).eval()
        return group.rank == 1 or torch.equal(layer(x), copy.deepcopy(plain).eval()(x))

    assert all(run_local(body, 2))  # a single rank calls


def test_under_ddp_two_ranks_train_as_one_rank_on_both_batches() -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.ReLU(), torch.nn.Linear(4, 1)
    )
    x = torch.randn(8, 3)
    models = [SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(model)) for _ in range(2)]

    def body(group: dist.ProcessGroup) -> None:
        wrapped = DistributedDataParallel(models[group.rank])
        for _ in range(2):
            wrapped(x[4 * group.rank :][:4]).pow(2).mean().backward()

    run_local(body, 2)
    for _ in range(2):
        model(x).pow(2).mean().backward()
    for ours in models:
        for a, b in zip(ours.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)
