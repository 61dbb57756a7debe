"""The guarantees of DistributedDataParallel besides the numbers: views, hooks, errors."""

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest
import torch
from torch import nn

import nc10d as dist
from nc10d.ops import SUM
from nc10d.reducer import hooks
from nc10d.reducer.plan import Slot
from nc10d.testing import run_local
from nc10d.torch import DistributedDataParallel, MixedPrecision, apply_optimizer_in_backward
from nc10d.torch.tensor_bucket import on_tensors
from nc10d.work import Future


class Two(nn.Module):
    """Two weights; the second is optional."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.ones(2))
        self.b = nn.Parameter(torch.ones(3))

    def forward(self, x, both=True):
        return x * self.a.sum() + (x * self.b.sum() if both else 0)


def step(model, x, **options):
    model(torch.tensor(float(x)), **options).backward()


def both_gradients(model):
    return [None if x.grad is None else x.grad.tolist() for x in (model.module.a, model.module.b)]


def test_ranks_start_with_rank_0s_parameters_and_buffers_by_default():
    def run(group, sync):
        model = nn.BatchNorm1d(2)
        for x in (*model.parameters(), *model.buffers()):
            x.data.fill_(group.rank + 1)
        DistributedDataParallel(model, init_sync=sync)
        return {x.detach().double().mean().item() for x in (*model.parameters(), *model.buffers())}

    assert run_local(run, 2, [True] * 2) == [{1.0}] * 2
    assert run_local(run, 2, [False] * 2) == [{1.0}, {2.0}]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("views", [True, False])
def test_gradients_are_bucket_views_only_on_request_also_after_a_rebuild(world, views):
    model = DistributedDataParallel(Two(), gradient_as_bucket_view=views)
    found = []
    for _ in range(3):
        step(model, world.rank)
        mine = {x.ctypes.data for x in model.reducer.gradients}
        found.append([x.grad.data_ptr() in mine for x in model.parameters()])
    assert (found, both_gradients(model)) == ([[views] * 2] * 3, [[1.5] * 2, [1.5] * 3])


@pytest.mark.ranks(2)
def test_a_forward_pass_without_a_backward_pass_has_no_effect(world):
    model = DistributedDataParallel(Two())
    model(torch.tensor(7.0))
    with torch.no_grad():
        model(torch.tensor(7.0))
    step(model, world.rank)
    assert both_gradients(model) == [[0.5] * 2, [0.5] * 3]


@pytest.mark.ranks(2)
def test_each_of_two_backward_passes_through_one_output_is_reduced(world):
    model = DistributedDataParallel(Two())
    output = model(torch.tensor(float(world.rank)))
    output.backward(retain_graph=True)
    output.backward()
    assert both_gradients(model) == [[1.0] * 2, [1.0] * 3]


@pytest.mark.ranks(2)
def test_gradients_of_inputs_only_need_no_other_rank(world):
    model = DistributedDataParallel(Two())
    x = torch.tensor(float(world.rank + 1), requires_grad=True)
    output = model(x)
    (slope,) = torch.autograd.grad(output, x, create_graph=True)
    (output + slope**2).backward()  # a penalty on the slope, which is the sum of all weights
    # By each weight: x, and twice the slope of 5; x is 1 and 2.
    assert both_gradients(model) == [[11.5] * 2, [11.5] * 3]


def test_a_parameter_that_another_rank_used_gets_its_mean_an_unused_parameter_nothing():
    def run(group, used):
        model = DistributedDataParallel(Two(), find_unused_parameters=True)
        step(model, 1, both=used)
        mine = {x.ctypes.data for x in model.reducer.gradients}
        assert not mine & {x.grad.data_ptr() for x in model.parameters() if x.grad is not None}
        return both_gradients(model)

    assert run_local(run, 2, [True, False]) == [[[1.0] * 2, [0.5] * 3]] * 2
    assert run_local(run, 2, [False, False]) == [[[1.0] * 2, None]] * 2


class Outputs(nn.Module):
    """Two outputs, each by a weight of its own."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(1)) for _ in range(2))

    def forward(self, x):
        return x * self.a, {"b": x * self.b}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("views", [True, False])
def test_each_output_may_have_a_backward_pass_of_its_own_if_unused_ones_are_looked_for(
    world, views
):
    options = {"find_unused_parameters": True, "gradient_as_bucket_view": views}
    model = DistributedDataParallel(Outputs(), **options)
    a, rest = model(torch.tensor([world.rank + 1.0]))
    a.backward()
    found = [both_gradients(model)]
    (2 * rest["b"]).backward()
    assert [*found, both_gradients(model)] == [[[1.5], None], [[1.5], [3.0]]]


def test_a_static_graph_drops_other_ranks_values_of_an_unused_gradient():
    def run(group, used):
        model = DistributedDataParallel(Two(), static_graph=True)
        found = []
        for _ in range(3):
            step(model, 1, both=used)
            found.append(both_gradients(model))
            model.zero_grad()
        return found

    assert run_local(run, 2, [True, False]) == [[[[1.0] * 2, [0.5] * 3]] * 3] * 2


@pytest.mark.ranks(2)
def test_gradients_that_never_come_are_named_with_what_to_do(world):
    model = DistributedDataParallel(Two())
    with pytest.raises(RuntimeError, match="without the gradients of b") as caught:
        step(model, 1, both=False)
    assert "find_unused_parameters=True" in caught.value.__notes__[0]
    step(model, world.rank)
    # Gradients of the failed pass are still there, since the user did not zero them.
    assert both_gradients(model) == [[1.5] * 2, [0.5] * 3]


@pytest.mark.ranks(1)
def test_hooks_go_with_their_model():
    model = Two()
    whole = DistributedDataParallel(model)
    reference = weakref.ref(whole)
    del whole
    gc.collect()
    model(torch.tensor(1.0)).backward()
    assert reference() is None
    assert model.a.grad.tolist() == [1.0] * 2
    assert len(model.a._post_accumulate_grad_hooks) == 0


def train_plainly(model):
    step(model, 1)


def train_in_a_join(model):
    with model.join():
        step(model, 1)


@pytest.mark.parametrize("train", [train_plainly, train_in_a_join])
@pytest.mark.parametrize("mode", ["plain", "in backward", "mixed"])
def test_a_dropped_model_leaves_its_module_without_hooks_at_once(train, mode):
    def run(group):
        module = Two()
        if mode == "in backward":
            apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
        low = MixedPrecision(torch.bfloat16) if mode == "mixed" else None
        model = DistributedDataParallel(module, mixed_precision=low)
        train(model)
        alive = weakref.ref(model)
        del model
        return alive() is None, len(module._forward_pre_hooks), len(module._forward_hooks)

    gc.disable()
    try:
        assert run_local(run, 2) == [(True, 0, 0)] * 2
    finally:
        gc.enable()


@pytest.mark.ranks(2)
def test_names_to_ignore_are_ignored(world):
    model = Two()
    model._ddp_params_and_buffers_to_ignore = ["b"]
    with torch.no_grad():
        model.b += world.rank
    whole = DistributedDataParallel(model)
    step(whole, world.rank)
    expected = [([[0.5] * 2, [0.0] * 3], 3.0), ([[0.5] * 2, [1.0] * 3], 6.0)][world.rank]
    assert (both_gradients(whole), model.b.sum().item()) == expected


def test_a_sparse_gradient_that_is_not_used_has_no_rows():
    class Rows(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = nn.Embedding(5, 2, sparse=True)
            self.a = nn.Parameter(torch.ones(2))

        def forward(self, places):
            return (self.rows(places) if len(places) else self.a).sum() + self.a.sum()

    def run(group, places):
        model = DistributedDataParallel(Rows(), find_unused_parameters=True)
        model(torch.tensor(places)).backward()
        grad = model.module.rows.weight.grad
        return None if grad is None else (grad.is_sparse, grad.to_dense()[:, 0].tolist())

    assert run_local(run, 2, [[1, 3, 1], []]) == [(True, [0, 1.0, 0, 0.5, 0])] * 2
    assert run_local(run, 2, [[], []]) == [None] * 2


def tensor_work(group, bucket):
    x = bucket.buffer()
    assert isinstance(x, torch.Tensor)
    x /= group.size
    return group.all_reduce(x, SUM, async_op=True)


def tensor_future(group, bucket):
    return tensor_work(group, bucket).get_future().then(lambda done: [done.value()[0] * 2])


def torch_future(group, bucket):
    future = torch.futures.Future()
    group.all_reduce(bucket.buffer())
    future.set_result(bucket.buffer() * 3)
    return future


def every_answer(group, bucket):
    assert bucket.is_last()
    assert bucket.index() == 0
    params = bucket.parameters()
    assert all(isinstance(x, nn.Parameter) for x in params)
    assert [x.shape for x in bucket.gradients()] == [x.shape for x in params]
    bucket.set_buffer(bucket.buffer() + 1)
    done = Future()
    done.set_result(bucket.buffer())
    return done


HOOKS = [
    (tensor_work, [0.5, 0.5]),
    (tensor_future, [1.0, 1.0]),
    (torch_future, [3.0, 3.0]),
    (every_answer, [1.0, 2.0]),
    (hooks.fp16_compress_hook, [0.5, 0.5]),
    (hooks.bf16_compress_wrapper(hooks.allreduce_hook), [0.5, 0.5]),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("hook", "means"), HOOKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_hooks_see_tensors_and_reduce_them(world, hook, means, dtype):
    model = DistributedDataParallel(Two().to(dtype))
    model.register_comm_hook(None, hook)
    step(model, world.rank)
    assert both_gradients(model)[0][0] == means[world.rank]


class Embedded(nn.Module):
    """Rows of an embedding beside dense weights."""

    def __init__(self):
        super().__init__()
        weights = torch.arange(10.0).reshape(5, 2) / 7
        self.rows = nn.Embedding.from_pretrained(weights, freeze=False, sparse=True)
        self.a = nn.Parameter(torch.ones(2))

    def forward(self, places):
        return (self.rows(places) * self.a).square().sum()


def doubled_sum(group, bucket):
    x = bucket.buffer()
    if not x.is_sparse:
        return tensor_work(group, bucket)
    (weight,), (gradient,) = bucket.parameters(), bucket.gradients()
    assert isinstance(weight, nn.Parameter)
    assert gradient.shape == weight.shape
    bucket.set_buffer((x + x).coalesce())
    return bucket.all_reduce(group, SUM).then(lambda done: done.value() / (2 * group.size))


def waiting(group, bucket):
    outcome = hooks.allreduce_hook(group, bucket)
    outcome.wait()
    return outcome


def rows_after(group, hook, dtype):
    model = DistributedDataParallel(Embedded().to(dtype))
    if hook is not None:
        model.register_comm_hook(None, hook)
    found = []
    for places in ([1, 3, 1], [group.rank], [[], [4]][group.rank]):
        model.zero_grad()
        model(torch.tensor(places, dtype=torch.int64)).backward()
        grad = model.module.rows.weight.grad.coalesce()
        found.append((grad.indices().tolist(), grad.values().tolist()))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("hook", [hooks.allreduce_hook, doubled_sum, waiting])
def test_a_sparse_gradient_is_the_same_with_a_hook_and_without(hook, dtype):
    without = run_local(rows_after, 2, [None] * 2, [dtype] * 2)
    assert run_local(rows_after, 2, [hook] * 2, [dtype] * 2) == without
    assert without[0] == without[1]


def test_rows_are_marked_coalesced_only_after_a_reduction():
    own = [[[1, 3]], [[0]], [[]]], [[[1, 3]], [[1]], [[4]]]
    first, second = run_local(rows_after, 2, [hooks.noop_hook] * 2, [torch.float32] * 2)
    assert ([places for places, _ in first], [places for places, _ in second]) == own
    assert first[0] == second[0]


@pytest.mark.ranks(1)
def test_a_dense_result_for_rows_is_a_type_error(world):
    def dense(group, bucket):
        future = torch.futures.Future()
        x = bucket.buffer()
        future.set_result(x.to_dense() if x.is_sparse else x)
        return future

    with pytest.raises(TypeError, match=r"rows\.weight must be a SparseGradient"):
        rows_after(world, dense, torch.float32)


def test_torchs_builtin_hooks_are_found_by_their_names():
    def run(group, kind):
        model = DistributedDataParallel(Two())
        model._register_builtin_comm_hook(getattr(torch.distributed.BuiltinCommHookType, kind))
        step(model, group.rank)
        return both_gradients(model)[0], model.reducer.hook_name

    for kind, name in [("ALLREDUCE", "allreduce_hook"), ("FP16_COMPRESS", "fp16_compress_hook")]:
        assert run_local(run, 2, [kind] * 2) == [([0.5] * 2, name)] * 2


@pytest.mark.ranks(2, strict=False)
def test_a_result_in_the_buckets_own_memory_is_the_bucket(world):
    slots = [Slot(0, 0, 4, (4,))]
    bucket = hooks.GradBucket(0, np.ones(4, np.float32), slots, [], True)
    work = on_tensors(tensor_work)(world, bucket)
    future = on_tensors(lambda *given: tensor_work(*given).get_future())(world, bucket)
    assert [one is bucket.buffer() for one in (*work.result(), *future.wait())] == [True, True]


@pytest.mark.ranks(2)
def test_a_hook_that_fails_fails_backward():
    def failing(state, bucket):
        future = torch.futures.Future()
        future.set_exception(ValueError("not today"))
        return future

    model = DistributedDataParallel(Two())
    model.register_comm_hook(None, failing)
    with pytest.raises(ValueError, match="not today"):
        step(model, 1)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_has_weights_of_its_own_and_takes_part_when_it_is_trained(world, again):
    model = DistributedDataParallel(Two(), find_unused_parameters=True)
    step(model, 1)
    twin = again(model)
    with torch.no_grad():
        if world.rank == 0:  # only rank 0, as for an average of weights
            assert again(model)(torch.tensor(1.0)).item() == 5
        model.module.a.zero_()
    twin.zero_grad()
    step(twin, world.rank, both=False)
    assert both_gradients(model)[0] == [1.0] * 2
    assert both_gradients(twin) == [[0.5] * 2, None]
    assert twin.module.a.tolist() == [1.0] * 2


@pytest.mark.ranks(2)
def test_a_model_on_a_subgroup_has_no_copies():
    model = DistributedDataParallel(Two(), process_group=dist.new_group([0, 1]))
    with pytest.raises(RuntimeError, match="by the default group"):
        copy.deepcopy(model)


@pytest.mark.ranks(2)
def test_a_module_can_be_wrapped_again_when_its_hooks_are_removed(world):
    model = Two()
    first = DistributedDataParallel(model)
    first._remove_autograd_hooks()
    second = DistributedDataParallel(model)
    step(second, world.rank)
    assert both_gradients(second) == [[0.5] * 2, [0.5] * 3]
    assert first.reducer.passes == 0
    assert second.reducer.passes == 1


@pytest.mark.ranks(2)
def test_a_graph_can_be_declared_static_before_the_first_pass(world):
    model = DistributedDataParallel(Two())
    model._set_static_graph()
    for _ in range(2):
        step(model, world.rank, both=False)
    with pytest.raises(RuntimeError, match="static_graph=True"):
        model._set_static_graph()
    assert "before training loop starts" in model._get_ddp_logging_data()["error"]
    assert both_gradients(model) == [[1.0] * 2, None]
    assert model.static_graph


def test_buffers_are_rank_0s_from_the_start_or_before_passes_or_never():
    def run(group, options):
        model = nn.BatchNorm1d(2)
        model.running_mean.fill_(group.rank + 1)
        whole = DistributedDataParallel(model, **options)
        found = [model.running_mean[0].item()]
        model.running_mean.fill_(group.rank + 1)
        model.eval()
        whole(torch.ones(1, 2))
        return [*found, model.running_mean[0].item(), whole.will_sync_module_buffers()]

    two = [{"broadcast_buffers": False}] * 2
    assert run_local(run, 2, two) == [[1.0, 1.0, False], [2.0, 2.0, False]]
    two = [{"forward_sync_buffers": False}] * 2
    assert run_local(run, 2, two) == [[1.0, 1.0, False], [1.0, 2.0, False]]
    assert run_local(run, 2, [{}] * 2) == [[1.0, 1.0, True], [1.0, 1.0, True]]


@pytest.mark.ranks(2)
def test_a_buffer_whose_elements_share_memory_is_named_on_every_rank():
    model = Two()
    model.register_buffer("places", torch.zeros(1).expand(3))
    with pytest.raises(ValueError, match="elements of places share memory"):
        DistributedDataParallel(model)


@pytest.mark.ranks(1)
def test_an_output_that_is_a_parameter_does_not_collect_hooks():
    class Open(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.ones(2))

        def forward(self, x):
            return x * self.a.sum(), self.a

    model = DistributedDataParallel(Open())
    for _ in range(3):
        model(torch.tensor(1.0))[0].backward()
    assert len(model.module.a._backward_hooks or ()) == 0


@pytest.mark.ranks(1)
def test_mistakes_are_named_before_any_communication():
    with pytest.raises(ValueError, match="bucket_cap_mb"):
        DistributedDataParallel(Two(), bucket_cap_mb=0)
    with pytest.raises(RuntimeError, match="weight has no shape yet"):
        DistributedDataParallel(nn.LazyLinear(2))
    with pytest.raises(ValueError, match=r"nc10d\.torch\.SyncBatchNorm"):
        DistributedDataParallel(nn.SyncBatchNorm(2))
    with pytest.raises(TypeError, match="must be a group of nc10d's"):
        DistributedDataParallel(Two(), process_group=[0])
    with pytest.raises(TypeError, match="must be callable"):
        DistributedDataParallel(Two()).register_comm_hook(None, 3)


@pytest.mark.ranks(2)
def test_parameters_with_another_memory_order_are_named(world):
    model = nn.Conv2d(2, 2, 3)
    if world.rank == 1:
        model = model.to(memory_format=torch.channels_last)
    with pytest.raises(ValueError, match=r"'weight'.* rank 1 .*'weight'.* order \(0, 2"):
        DistributedDataParallel(model)


@pytest.mark.ranks(2)
def test_passes_are_logged_in_torchs_fields():
    model = DistributedDataParallel(Two())
    step(model, 1)
    found = model._get_ddp_logging_data()
    times = [found[f"avg_{what}_time"] for what in ("forward_compute", "backward_compute")]
    views = found["gradient_as_bucket_view"], found["broadcast_buffers"]
    assert found["module_name"] == "Two"
    assert found["iteration"] == 0
    assert min(times) > 0
    assert views == (0, 1)
