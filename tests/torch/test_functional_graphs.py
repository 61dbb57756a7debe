"""Tracers, transforms and torch.compile record functional collectives, and lose none."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import nc10d as dist
from nc10d.torch import functional as F

TWICE = dist.premul_sum(2.0)
"""A reduction that changes its input in a world of one rank, too."""


@pytest.fixture
def alone():
    """A world of one rank, and no compiled code of other tests."""
    dist.init_process_group(rank=0, world_size=1, store=dist.HashStore())
    torch._dynamo.reset()
    yield
    dist.destroy_process_group()


RANKS = {"world_size": 2}


def step(x):
    return F.all_reduce(x * 2, TWICE) + 1


class Step(torch.nn.Module):
    def forward(self, x):
        return step(x)


def exported(strict):
    def trace(x):
        return torch.export.export(Step(), (x,), strict=strict).module()

    return trace


TRACERS = {
    "make_fx real": make_fx(step),
    "make_fx fake": make_fx(step, tracing_mode="fake"),
    "make_fx symbolic": make_fx(step, tracing_mode="symbolic"),
    "functionalize": make_fx(torch.func.functionalize(step)),
    "export": exported(False),
    "strict export": exported(True),
    "jit.trace": lambda x: torch.jit.trace(step, x),
    "vmap": lambda x: torch.vmap(step),
    "linearize": lambda x: lambda y: torch.func.linearize(step, y)[0],
    "grad": lambda x: lambda y: torch.func.vjp(step, y)[0],
    "gradient in vmap": lambda x: torch.vmap(lambda y: torch.func.vjp(step, y)[0]),
    "jvp": lambda x: lambda y: torch.func.jvp(step, (y,), (x,))[0],
    "eager": lambda x: step,
    "compiled": lambda x: torch.compile(step, backend="eager", fullgraph=True),
    "compiled by AOT": lambda x: torch.compile(step, backend="aot_eager", fullgraph=True),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tracer", TRACERS)
def test_no_tracer_loses_a_collective(tracer, alone):
    traced = TRACERS[tracer](torch.ones(2, 3))
    assert torch.equal(traced(torch.full((2, 3), 3.0)), torch.full((2, 3), 13.0))
    if isinstance(traced, torch.fx.GraphModule):
        assert "nc10d.all_reduce" in traced.code


DERIVATIVES = {
    "backward": lambda x: torch.autograd.grad(step(x.requires_grad_()).sum(), x)[0],
    "grad": lambda x: torch.func.grad(lambda y: step(y).sum())(x),
    "jvp": lambda x: torch.func.jvp(step, (x,), (torch.ones(2, 3),))[1],
    "linearize": lambda x: torch.func.linearize(step, x)[1](torch.ones(2, 3)),
    "per sample": torch.vmap(torch.func.grad(lambda y: step(y).sum())),
    "forward mode": lambda x: forward(x),
    "of several": lambda x: torch.func.grad(
        lambda y: F.all_reduce_coalesced([y * 2], TWICE)[0].sum()
    )(x),
    "of several, forward": lambda x: torch.func.jvp(
        lambda y: F.all_reduce_coalesced([y * 2], TWICE)[0], (x,), (torch.ones(2, 3),)
    )[1],
    "second": lambda x: torch.func.grad(
        lambda y: torch.func.grad(lambda z: (step(z) ** 2).sum() / 8)(y).sum()
    )(x),
}


def forward(x):
    with forward_ad.dual_level():
        out = step(forward_ad.make_dual(x, torch.ones(2, 3)))
        return forward_ad.unpack_dual(out).tangent


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", DERIVATIVES)
def test_no_way_of_differentiation_loses_a_gradient(way, alone):
    assert torch.equal(DERIVATIVES[way](torch.ones(2, 3)), torch.full((2, 3), 4.0))


def test_a_reduction_without_a_gradient_says_so(alone):
    for way in (torch.func.grad(lambda x: F.all_reduce(x, "max").sum()), backward_of_max):
        with pytest.raises(NotImplementedError, match="'max' has no gradient"):
            way(torch.ones(2))


def backward_of_max(x):
    F.all_reduce(x.requires_grad_(), "max").sum().backward()


def exchange(group, x, other):
    """Swap tensors by all kinds of messages, both ranks at once."""
    sent = F.isend(x, other, group)
    received = F.wait_tensor(F.irecv(x, other, group))
    F.wait_tensor(sent)
    (swapped,) = F.batch_p2p(["isend", "irecv"], [other] * 2, [3, 3], [received + 1, x], group)
    F.barrier(group)
    return swapped


def pass_on(group, x, me):
    """A stage of a pipeline: rank 0 computes and sends, rank 1 receives and computes."""
    if me == 0:
        F.send(x * 2, 1, group)
        return x
    return F.recv(x, 0, group) + 1


PROGRAMS = {
    "exchange": lambda group, x: exchange(group, x, 1 - int(group.rank)),
    "pipeline": lambda group, x: pass_on(group, x, int(group.rank)),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_messages_are_part_of_a_graph(program, backend, ranks):
    torch._dynamo.reset()

    def run(group):
        function, x = PROGRAMS[program], torch.arange(4.0) + group.rank
        compiled = torch.compile(function, backend=backend, fullgraph=True)
        return function(group, x), compiled(group, x), compiled(group, x)

    for eager, cold, warm in ranks.run(run):
        assert torch.equal(eager, cold)
        assert torch.equal(eager, warm)


def in_place(call):
    """Return a step that makes an ordinary call on intermediate tensors."""

    def step(group, x):
        y = x * 2
        call(group, y)
        return y + 1

    return step


ORDINARY = {
    "all_reduce": lambda g, y: dist.all_reduce(y),
    "named": lambda g, y: dist.all_reduce(tensor=y, op=dist.AVG, group=g),
    "broadcast": lambda g, y: dist.broadcast(y, 1),
    "all_gather_into_tensor": lambda g, y: dist.all_gather_into_tensor(y, y[2:] + 1),
    "all_gather": lambda g, y: dist.all_gather([y[:2], y[2:]], y[1:3] + 1),
    "reduce_scatter_tensor": lambda g, y: dist.reduce_scatter_tensor(y[:2], y + 1),
    "rows": lambda g, y: dist.all_gather_into_tensor(y.view(2, 2), y[2:] + 1),
    "all_to_all_single": lambda g, y: dist.all_to_all_single(y, y + 1),
    "barrier": lambda g, y: dist.barrier(),
    "send and recv": lambda g, y: dist.send(y, 1) if g.rank == 0 else dist.recv(y, 0),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", ORDINARY)
def test_an_ordinary_call_becomes_part_of_a_graph(call, ranks):
    torch._dynamo.reset()

    def run(group):
        function, x = in_place(ORDINARY[call]), torch.arange(4.0) + group.rank
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        on_one_rank = function if group.rank else compiled
        return [step(group, x) for step in (function, compiled, compiled, on_one_rank)]

    for eager, *others in ranks.run(run):
        assert all(torch.equal(eager, x) for x in others)


BREAKING = {
    "asynchronous": lambda x: dist.all_reduce(x, TWICE, async_op=True).wait(),
    "out": lambda x: dist.all_reduce(x.clone(), TWICE, out=x),
    "timeout": lambda x: dist.get_default_group().all_reduce(x, TWICE, timeout=5.0),
    "of a group": lambda x: dist.get_default_group().all_reduce(x, TWICE),
    "array": lambda x: dist.all_reduce(x.numpy(), TWICE),
    "block": lambda x: in_block(x),
}


def in_block(x):
    with dist.coalescing_manager():
        dist.all_reduce(x, TWICE)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("call", BREAKING)
def test_a_call_that_no_graph_can_have_stays_with_python(call, alone):
    def run(x):
        y = x * 2
        BREAKING[call](y)
        return y + 1

    compiled = torch.compile(run, backend="aot_eager")
    for _ in range(2):
        assert compiled(torch.ones(3)).tolist() == [5.0] * 3


def test_an_operator_in_a_coalescing_block_is_refused(alone):
    with pytest.raises(RuntimeError, match="in a coalescing block"), dist.coalescing_manager():
        F.all_reduce_autograd(torch.ones(3), "sum")


def test_a_graph_notices_another_size_of_its_group(alone):
    gather = torch.ops.nc10d.all_gather_into_tensor
    with pytest.raises(RuntimeError, match="made for 2 ranks of group 'world', which has 1 now"):
        gather(torch.ones(2), 2, "world")
    with pytest.raises(RuntimeError, match="there is no group 'other'"):
        gather(torch.ones(2), 2, "other")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tracer", ["make_fx real", "make_fx fake", "export", "jit.trace"])
def test_an_ordinary_call_that_a_tracer_would_lose_is_refused(tracer, alone):
    def lost(x):
        y = x * 2
        dist.all_reduce(y, TWICE)
        return y + 1

    x = torch.ones(3)
    for _ in range(3):  # prepared calls, and views of memory that the tracer's tensors may have
        lost(x)
    with pytest.raises(TypeError, match=r"would not record this call: .* nc10d\.torch\.functional"):
        LOSING[tracer](lost, x)
    with torch.utils.flop_counter.FlopCounterMode(display=False):  # watches, and records nothing
        assert lost(x).tolist() == [5.0] * 3


class Calling(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


LOSING = {
    "make_fx real": lambda f, x: make_fx(f)(x),
    "make_fx fake": lambda f, x: make_fx(f, tracing_mode="fake")(x),
    "export": lambda f, x: torch.export.export(Calling(f), (x,)),
    "jit.trace": torch.jit.trace,
}


def test_a_message_below_vmap_is_refused(alone):
    with pytest.raises(TypeError, match="send has no meaning below vmap"):
        torch.vmap(lambda x: F.send(x, 0))(torch.ones(2, 3))


@dist.reduction("f4")
def halved_difference(a, b):
    return (a - b) / 2


NAMED = [halved_difference, dist.WELFORD, dist.SUM.ordered, dist.premul_sum(0.5).ordered]


def by_each(x, op):
    return F.all_reduce(x * 2, op) + 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", NAMED, ids=lambda op: op.name)
def test_a_graph_has_a_reduction_by_its_name(op):
    torch._dynamo.reset()
    x = torch.arange(6.0).reshape(2, 3) * (dist.get_rank() + 1)
    compiled = torch.compile(by_each, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, op), by_each(x, op))
    assert torch.equal(compiled(x, op), by_each(x, op)), "again, without tracing"


def best_of(values, indices):
    values, indices = F.all_reduce((values * 2, indices), dist.ARGMAX)
    mine = F.reduce_scatter_tensor((values, indices), dist.ARGMIN, 0)
    return values, indices, *mine


@pytest.mark.ranks(2)
def test_a_graph_has_fields_in_tensors_of_their_own():
    torch._dynamo.reset()
    rank = dist.get_rank()
    given = torch.tensor([1.0, 5.0 * rank, 2.0, -4.0 * rank]), torch.full((4,), rank)
    values, indices, low, place = best_of(*given)
    assert (values.tolist(), indices.tolist()) == ([2, 10, 4, 0], [0, 1, 0, 0])
    assert (low.tolist(), place.tolist()) == [([2, 10], [0, 1]), ([4, 0], [0, 0])][rank]
    compiled = torch.compile(best_of, backend="aot_eager", fullgraph=True)
    for mine, expected in zip(compiled(*given), (values, indices, low, place), strict=True):
        assert torch.equal(mine, expected)
    samples = torch.stack([given[0], given[0] + 1]), torch.stack([given[1]] * 2)
    low, place = torch.vmap(lambda *x: F.reduce_scatter_tensor(x, dist.ARGMIN, 0))(*samples)
    for row in range(2):
        mine = F.reduce_scatter_tensor((samples[0][row], samples[1][row]), dist.ARGMIN, 0)
        assert torch.equal(low[row], mine[0])
        assert torch.equal(place[row], mine[1])
    with pytest.raises(ValueError, match="cut along dimension 0, not 1"):
        F.reduce_scatter_tensor(given, dist.ARGMIN, 1)
    with pytest.raises(TypeError, match="take fields"):
        F.all_reduce_coalesced([given], dist.ARGMIN)
    with pytest.raises(NotImplementedError, match=r"'ARGMAX.* has no gradient"):
        F.all_reduce((given[0].clone().requires_grad_(), given[1]), dist.ARGMAX)[0].sum().backward()
