"""Whole programs as one graph on two ranks: their values and gradients are those of eager mode."""

import random

import pytest
import torch
from functorch.compile import make_boxed_func
from graph_programs import PROGRAMS, outcome, same
from torch._dynamo.backends.common import aot_autograd

import nc10d as dist
from nc10d.torch import functional as F

pytestmark = pytest.mark.filterwarnings("ignore")


RANKS = {"world_size": 2, "timeout": 120.0}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_is_one_graph_with_the_bits_of_eager_mode(program, ranks):
    function, shapes = PROGRAMS[program]

    def run(group):
        eager = outcome(function, group, shapes)
        graph = torch.compile(function, backend="aot_eager", fullgraph=True)
        return [same(outcome(graph, group, shapes), eager) for _ in range(2)]

    assert ranks.run(run) == [[True, True]] * 2


@pytest.mark.slow
def test_inductor_keeps_order_values_and_unused_calls(ranks):
    """Inductor may fuse and move what is between operators, but no operator."""

    def program(group, params, x):
        weight = params[0]
        a = F.all_reduce(x @ weight, "sum", group)
        F.all_reduce(a.detach(), "max", group)  # no result is used; the other rank waits for it
        b = F.all_reduce(x @ weight, "sum", group)  # equal, and yet another call
        return (a * 2 + b).sum()

    def run(group):
        eager = outcome(program, group, [(4, 4)])
        before = group.seq
        found = outcome(torch.compile(program, fullgraph=True), group, [(4, 4)])
        return same(found, eager), group.seq - before

    assert ranks.run(run) == [(True, 5)] * 2  # two of them backward


def random_program(seed):
    """Return a program of calls on two groups, some of whose results are never read."""
    choose = random.Random(seed)
    steps = [(choose.randrange(4), choose.randrange(2), choose.random() < 0.3) for _ in range(12)]

    def program(groups, x):
        live = x
        for kind, which, dropped in steps:
            group = groups[which]
            if kind == 0:
                y = F.all_reduce(live, "max", group)
            elif kind == 1:
                y = F.broadcast(live + 1, which, group)
            elif kind == 2:
                y = F.reduce_scatter_tensor(F.all_gather_tensor(live, 0, group), "avg", 0, group)
            else:
                y = F.permute_tensor(live, [1, 0], group)
            live = live if dropped else y + which
        return live

    return program


def in_any_order(graph, choose):
    """Schedule a graph's nodes anew: each time any node whose inputs are there."""
    done, order = set(), []
    places = [node for node in graph.graph.nodes if node.op in ("placeholder", "get_attr")]
    left = [node for node in graph.graph.nodes if node not in places]
    done.update(places)
    last = left.pop()  # the output
    while left:
        node = choose.choice([x for x in left if done.issuperset(x.all_input_nodes)])
        last.prepend(node)
        left.remove(node)
        done.add(node)
        order.append(node)
    graph.graph.lint()
    graph.recompile()
    return order


def scheduler(seed, moved):
    """Return a backend of torch.compile that runs every graph in an order of the seed's."""
    choose = random.Random(seed)

    def schedule(graph, inputs):
        before = [node for node in graph.graph.nodes if node.op.startswith("call")]
        moved.append(in_any_order(graph, choose) != before)
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=schedule)


@pytest.mark.parametrize("seed", range(5))
def test_no_scheduler_reorders_or_drops_operators(seed, ranks):
    def run(group):
        groups = [group, dist.new_group([0, 1])]
        program, x, seen, moved = random_program(seed), torch.arange(4.0) + group.rank, [], []
        backend = scheduler(100 * seed + group.rank, moved)  # another order on each rank
        compiled = torch.compile(program, backend=backend, fullgraph=True)
        for each in groups:
            each.observe(lambda g, ops, number: seen.append((g.name, type(ops[0]).__name__)))
        return program(groups, x) + 0, [*seen], compiled(groups, x), seen, moved

    for expected, order, found, both, moved in ranks.run(run):
        assert both == [*order, *order]
        assert len(order) >= 12
        assert torch.equal(expected, found)
        assert moved == [True]
