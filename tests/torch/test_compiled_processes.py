"""Compiled programs and compiled backward passes of DDP on two ranks that are processes.

torch compiles the backward pass (compiled_autograd) of one thread at a time.
"""

import warnings

import pytest
import torch
import zoo
from graph_programs import PROGRAMS, outcome, same

from nc10d.torch import DistributedDataParallel

RANKS = {"world_size": 2, "kind": "processes", "timeout": 300.0}


def bits(group, backend):
    """Return for each program and call whether the graph's bits are those of eager mode."""
    warnings.simplefilter("ignore")  # the compiler's
    found = {}
    for name, (function, shapes) in PROGRAMS.items():
        torch._dynamo.reset()
        eager = outcome(function, group, shapes)
        graph = torch.compile(function, backend=backend, fullgraph=True)
        found[name] = [same(outcome(graph, group, shapes), eager) for _ in range(2)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_the_programs_are_one_graph_with_the_bits_of_eager_mode(backend, ranks):
    assert ranks.run(bits, [backend] * 2) == [{name: [True, True] for name in PROGRAMS}] * 2


def gradients(name, rank, as_views, compiled):
    torch.manual_seed(0)
    own = zoo.make(name)
    searching = name in ("branches", "repeats")
    options = {"find_unused_parameters": searching, "gradient_as_bucket_view": as_views}
    model = DistributedDataParallel(own, **options)

    def step(*inputs):
        zoo.loss(model(*inputs)).backward()

    if compiled:
        step = torch.compile(step, backend="eager")
    for number in range(2):  # buckets are rebuilt before the second pass
        for x in own.parameters():
            x.grad = None
        with torch._dynamo.config.patch(compiled_autograd=compiled):
            step(*zoo.inputs(name, rank, number))
    return [None if x.grad is None else x.grad.to_dense() for x in own.parameters()]


def compare(group, name, as_views):
    warnings.simplefilter("ignore")  # the compiler's
    torch._dynamo.reset()
    ways = [gradients(name, int(group.rank), as_views, compiled) for compiled in (False, True)]
    pairs = list(zip(*ways, strict=True))
    return [a is b is None or torch.allclose(a, b, rtol=1e-12, atol=0) for a, b in pairs]


def all_equal(ranks, name, as_views):
    return all(map(all, ranks.run(compare, [name] * 2, [as_views] * 2)))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "as_views"), [("perceptron", True), ("branches", False)])
def test_gradients_are_those_of_an_uncompiled_pass(name, as_views, ranks):
    assert all_equal(ranks, name, as_views)


@pytest.mark.long
@pytest.mark.parametrize("as_views", [False, True])
@pytest.mark.parametrize("name", zoo.ZOO)
def test_gradients_of_every_model_are_those_of_an_uncompiled_pass(name, as_views, ranks):
    assert all_equal(ranks, name, as_views)


def left_out(group):
    """Make a compiled pass that leaves a parameter out, and another forward pass."""
    warnings.simplefilter("ignore")
    torch._dynamo.reset()
    model = DistributedDataParallel(torch.nn.ModuleList(torch.nn.Linear(2, 1) for _ in range(2)))
    model.module.forward = lambda x: model.module[0](x)
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda x: model(x).sum().backward(), backend="eager")(torch.ones(1, 2))
    with pytest.raises(RuntimeError, match="gradient") as raised:
        model(torch.ones(1, 2))
    return str(raised.value), raised.value.__notes__


@pytest.mark.slow
def test_a_pass_without_a_parameter_is_an_error_of_the_next_forward_pass(ranks):
    for message, notes in ranks.run(left_out):
        assert "1.weight" in message
        assert any("ends with the last gradient" in note for note in notes)
