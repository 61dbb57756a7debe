"""DistributedDataParallel with leaves: the same weights on any number of ranks; rank order."""

import copy
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import zoo
from torch import nn

from nc10d.errors import CollectiveMismatch
from nc10d.reducer.hooks import allreduce_hook
from nc10d.testing import run_local
from nc10d.torch import (
    DistributedDataParallel,
    MixedPrecision,
    SyncBatchNorm,
    apply_optimizer_in_backward,
)

LEAVES = 8
SIZES = 1, 2, 3, 4, 8
VIEWS, STATIC = {"gradient_as_bucket_view": True}, {"static_graph": True}
UNUSED = {"find_unused_parameters": True}
LOW = {"mixed_precision": MixedPrecision(torch.bfloat16)}
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
CASES = [
    ("perceptron", F32, {}),
    ("perceptron", BF16, VIEWS),
    ("perceptron", F32, LOW),
    ("convolution", F32, VIEWS),
    ("convolution", F64, STATIC),
    ("transformer", F32, {}),
    ("transformer", F32, STATIC),
    ("checkpointed", F64, STATIC),
    ("branches", F32, UNUSED),
    ("branches", BF16, {**UNUSED, **VIEWS}),
    ("repeats", F64, UNUSED),
]


@pytest.fixture(autouse=True)
def one_thread():
    """Run torch's kernels on a thread: more threads may add in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def bits(module):
    found = hashlib.sha256()
    for x in module.parameters():
        found.update(x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def seeded(name, dtype):
    module = zoo.ZOO[name][0]().to(dtype)
    own = torch.Generator().manual_seed(0)  # ranks are threads
    for x in module.parameters():
        x.data.copy_(torch.randn(x.shape, generator=own) / 4)
    return module


def batch(name, leaf, step, dtype):
    """Return the arguments for a leaf's forward pass."""
    given = zoo.inputs(name, leaf, step)
    return [x.to(dtype) if getattr(x, "is_floating_point", bool)() else x for x in given]


def train(model, optimizer, name, dtype, steps):
    for step in steps:
        for leaf in model.my_leaves:
            zoo.loss(model(*batch(name, leaf, step, dtype))).backward()
        optimizer.step()


def trained(_group, name, dtype, options):
    module = seeded(name, dtype)
    model = DistributedDataParallel(module, leaves=LEAVES, bucket_cap_mb=5e-4, **options)
    train(model, torch.optim.Adam(model.parameters(), 0.01), name, dtype, range(3))
    return bits(module)


@pytest.mark.parametrize(("name", "dtype", "options"), CASES)
def test_any_number_of_ranks_ends_with_the_same_weights(name, dtype, options):
    found = [run_local(trained, n, [name] * n, [dtype] * n, [options] * n) for n in SIZES]
    assert len({each for ranks in found for each in ranks}) == 1


def test_a_run_may_change_its_number_of_ranks():
    def run(_group, state, steps):
        module = seeded("transformer", F32)
        model = DistributedDataParallel(module, leaves=LEAVES)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        if state is not None:
            state = copy.deepcopy(state)  # ranks are threads, and an optimizer takes the tensors
            module.load_state_dict(state[0])
            optimizer.load_state_dict(state[1])
        train(model, optimizer, "transformer", F32, steps)
        return module.state_dict(), optimizer.state_dict()

    (whole,) = run_local(run, 1, [None], [range(4)])
    half = run_local(run, 4, [None] * 4, [range(2)] * 4)[0]
    ended = run_local(run, 3, [half] * 3, [range(2, 4)] * 3)
    for state, _ in ended:
        assert all(torch.equal(x, whole[0][name]) for name, x in state.items())


class Two(nn.Module):
    """Two weights; the second is optional."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.ones(1)) for _ in range(2))

    def forward(self, x, both=True):
        return x * self.a + (x * self.b if both else 0)


def test_gradients_are_means_over_leaves_and_need_no_zero_grad():
    def run(_group):
        model = DistributedDataParallel(Two(), leaves=4)
        for _ in range(2):
            for leaf in model.my_leaves:
                model(torch.tensor([float(leaf)])).backward()
        return [x.grad.tolist() for x in model.parameters()], list(model.my_leaves)

    assert [found for found, _ in run_local(run, 3)] == [[[1.5], [1.5]]] * 3
    assert [mine for _, mine in run_local(run, 3)] == [[0, 1], [2], [3]]


def test_a_parameter_counts_where_a_leaf_has_used_it_and_keeps_nothing_elsewhere():
    def run(_group, using):
        model = DistributedDataParallel(Two(), leaves=4, find_unused_parameters=True)
        for leaf in model.my_leaves:
            model(torch.ones(1), both=leaf in using).backward()
        return [None if x.grad is None else x.grad.item() for x in model.parameters()]

    for size in (1, 2, 3):
        for using, mean in (((0,), 0.25), ((1, 3), 0.5), ((), None)):
            assert run_local(run, size, [using] * size) == [[1.0, mean]] * size


def test_forward_passes_may_come_before_the_backward_passes():
    def run(_group):
        module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        for x in module.parameters():
            x.data.fill_(0.5)
        model = DistributedDataParallel(module, leaves=8)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            inputs = [zoo.numbers(leaf, step, 3, 2).float() for leaf in model.my_leaves]
            for loss in [model(x).square().mean() for x in inputs]:
                loss.backward()
            optimizer.step()
        return bits(module)

    assert len({each for size in (1, 3) for each in run_local(run, size)}) == 1


@pytest.mark.ranks(2)
def test_what_does_not_go_with_leaves_is_an_error(world):
    model = DistributedDataParallel(Two(), leaves=2)
    for call in (
        lambda: model.no_sync().__enter__(),
        lambda: model.join().__enter__(),
        lambda: model.register_comm_hook(None, allreduce_hook),
        lambda: model._register_buffer_comm_hook(None, print),
        lambda: model.reducer.shadow_pass(),
    ):
        with pytest.raises(ValueError, match="leaves"):
            call()
    stepping = Two()
    apply_optimizer_in_backward(torch.optim.SGD, stepping.parameters(), {"lr": 0.1})
    for module, options in (
        (stepping, {}),
        (zoo.Rows(), {}),
        (nn.Sequential(nn.Linear(2, 2), SyncBatchNorm(2)), {}),
        (Two(), {"skip_all_reduce_unused_params": True}),
    ):
        with pytest.raises(ValueError, match="leaves"):
            DistributedDataParallel(module, leaves=2, **options)
    with pytest.raises(ValueError, match="power of two, at most 65536, got 3"):
        DistributedDataParallel(Two(), leaves=3)
    with pytest.raises(ValueError, match="without leaves"):
        _ = DistributedDataParallel(Two()).my_leaves
    with pytest.raises(ValueError, match="numbers of leaves"):
        DistributedDataParallel(Two(), leaves=2 << world.rank)


@pytest.mark.parametrize("where", ["a", "b"])
@pytest.mark.parametrize("size", [2, 3])
def test_an_exception_that_ends_a_leaf_on_every_rank_begins_the_step_again(size, where):
    """With 3 ranks, rank 0 has had a pass before the exception, and the others have had none."""

    def run(_group):
        model = DistributedDataParallel(Two(), leaves=4)
        x = getattr(model.module, where)
        for _ in model.my_leaves[1:]:
            model(torch.full((1,), 7.0)).backward()
        output = model(torch.ones(1))
        handle = x.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            output.backward()
        handle.remove()
        with pytest.raises(RuntimeError, match="an exception has ended the last backward pass"):
            model(torch.ones(1))
        found = []
        for _ in range(2):
            for leaf in model.my_leaves:
                model(torch.tensor([float(leaf)])).backward()
            found.append(([x.grad.item() for x in model.parameters()], model.reducer.rebuilt))
        return found

    assert run_local(run, size) == [[([1.5, 1.5], False), ([1.5, 1.5], True)]] * size


def loader(model, leaf):
    raise OSError("no batch")


def loss(model, leaf):
    output = model(torch.ones(1)) * 1
    output.register_hook(lambda _: 1 / 0)  # before any gradient
    output.backward()


def forgotten(model, leaf):
    pass


@pytest.mark.parametrize("fault", [loader, loss, forgotten])
def test_a_step_that_all_ranks_leave_is_dropped_before_the_optimizer(fault):
    def run(_group):
        model, errors = DistributedDataParallel(Two(), leaves=4), []
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        for step in range(4):
            try:
                for place, leaf in enumerate(model.my_leaves):
                    if (step, place) == (1, 1):
                        fault(model, leaf)
                    else:
                        model(torch.tensor([float(leaf)])).backward()
                optimizer.step()
            except (OSError, ArithmeticError, RuntimeError) as error:
                errors.append(str(error))
        assert [x.item() for x in model.parameters()] == [1 - 1.5 * (4 - len(errors))] * 2
        return errors[-1]

    for text in run_local(run, 2):
        assert "amid a step: this rank has had 1 of 2 leaves" in text


def test_ranks_that_leave_a_step_alone_are_told_apart():
    def run(group):
        model = DistributedDataParallel(Two(), leaves=4)
        for leaf in model.my_leaves:
            if (leaf, group.rank) == (3, 1):
                with pytest.raises(RuntimeError, match="my_leaves amid a step"):
                    list(model.my_leaves)
            model(torch.ones(1)).backward()

    with pytest.raises(CollectiveMismatch, match="an exception in step 1 of reducer"):
        run_local(run, 2)


def test_an_optimizer_of_other_parameters_steps_amid_a_step():
    def run(_group):
        model, other = DistributedDataParallel(Two(), leaves=2), torch.nn.Linear(1, 1)
        for _ in model.my_leaves:
            model(torch.ones(1)).backward()
            torch.optim.SGD(other.parameters(), 1.0).step()
        return [x.grad.item() for x in model.parameters()]

    assert run_local(run, 1) == [[1.0, 1.0]]


@pytest.mark.ranks(2)
def test_a_step_without_a_gradient_fails_once(world):
    model = DistributedDataParallel(Two(), leaves=2)
    with pytest.raises(RuntimeError, match="ended without the gradients of b"):
        model(torch.ones(1), both=False).backward()
    model(torch.ones(1)).backward()
    assert [x.grad.item() for x in model.parameters()] == [1.0, 1.0]


def test_a_parameter_that_only_a_left_pass_has_used_is_unused():
    def run(_group):
        model = DistributedDataParallel(Two(), leaves=4, find_unused_parameters=True)
        output = model(torch.ones(1))
        handle = model.module.a.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            output.backward()
        handle.remove()
        with pytest.raises(RuntimeError, match="an exception has ended the last backward pass"):
            model(torch.ones(1))
        for _ in model.my_leaves:
            model(torch.ones(1), both=False).backward()
        return model.module.b.grad

    assert run_local(run, 2) == [None, None]


@pytest.mark.ranks(3)
@pytest.mark.parametrize("cap", [1e-5, 2e-4, 25])
def test_ordered_gradients_are_added_in_rank_order_by_any_buckets(world, cap):
    model = DistributedDataParallel(seeded("perceptron", F32), ordered=True, bucket_cap_mb=cap)
    zoo.loss(model(*batch("perceptron", world.rank, 0, F32))).backward()
    alone = seeded("perceptron", F32)
    parts = []
    for rank in range(3):
        alone.zero_grad()
        zoo.loss(alone(*batch("perceptron", rank, 0, F32))).backward()
        parts.append([x.grad / 3 for x in alone.parameters()])
    for x, first, second, third in zip(model.parameters(), *parts, strict=True):
        assert torch.equal(x.grad, (first + second) + third)
    assert model.reducer.settings.ordered


PROGRAM = """
import hashlib, os, sys
os.environ["NC10D_HOST_ID"] = sys.argv[1][int(os.environ["RANK"])]
import torch
import torch.distributed as dist
from nc10d.torch import DistributedDataParallel
dist.init_process_group("nc10d")
x = torch.randn(5000, generator=torch.Generator().manual_seed(dist.get_rank()))
found = hashlib.sha256()
for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
    y = x.clone()
    dist.all_reduce(y, op)
    found.update(y.numpy().tobytes())
model = torch.nn.Linear(50, 20)
for p in model.parameters():
    p.data.fill_(0.25)
model = DistributedDataParallel(model, bucket_cap_mb=float(sys.argv[2]))
model(x[:500].reshape(10, 50)).square().sum().backward()
for p in model.parameters():
    found.update(p.grad.numpy().tobytes())
if dist.get_rank() == 0:
    print(found.hexdigest())
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_the_variable_orders_torchs_groups_and_ddp_on_any_hosts(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def digest(hosts, cap, ordered):
        command = [sys.executable, "-m", "nc10d.run", "--nproc-per-node", "4", "--no-prefix"]
        environment = {**os.environ, "NC10D_ORDERED": ordered, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [*command, str(program), hosts, cap],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    found = {digest(*case, "1") for case in (("aaaa", "25"), ("aabb", "0.001"), ("abab", "25"))}
    assert len(found) == 1
    assert digest("aabb", "25", "0") not in found


@pytest.mark.slow
def test_the_example_prints_the_same_digest_on_1_to_4_ranks():
    example = Path(__file__).parents[2] / "examples" / "same_weights.py"

    def last_line(size):
        command = [sys.executable, "-m", "nc10d.run", "--nproc-per-node", str(size), "--no-prefix"]
        done = subprocess.run(
            [*command, str(example)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()[-1]

    lines = {last_line(size) for size in (1, 2, 3, 4)}
    assert len(lines) == 1
    assert lines.pop().startswith("weights ")
