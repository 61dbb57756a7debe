"""Whole programs as one graph on two ranks that are processes: the bits of eager mode."""

import warnings

import pytest
import torch
from test_compiled_programs import PROGRAMS, outcome, same

from nc10d.testing import Ranks


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


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_the_programs_are_one_graph_with_the_bits_of_eager_mode(backend):
    with Ranks(2, "processes", timeout=300.0) as two:
        assert two.run(bits, [backend] * 2) == [{name: [True, True] for name in PROGRAMS}] * 2
