"""Gradients equal those of torch's DistributedDataParallel for all models.

Dense gradients are equal to the bit; for sparse gradients the order of additions differs.
"""

from itertools import product

import pytest
import zoo
from beside_torch import VARYING, both, join_gloo

from nc10d.testing import Ranks
from nc10d.torch import slots

STEPS = 4
CASES = [
    (name, views, kind)
    for name, views in product(zoo.ZOO, [False, True])
    for kind in (["find"] if name in VARYING else ["plain", "static"])
]
OPTIONS = {"plain": {}, "find": {"find_unused_parameters": True}, "static": {"static_graph": True}}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    with Ranks(2, "processes", timeout=60) as two:
        two.run(join_gloo, [str(tmp_path_factory.mktemp("gloo") / "meet")] * 2)
        yield two


@pytest.mark.parametrize(("name", "views", "kind"), CASES)
def test_gradients_and_buffers_are_torchs(ranks, name, views, kind):
    options = {"gradient_as_bucket_view": views, "bucket_cap_mb": 0.001, **OPTIONS[kind]}
    answers = ranks.run(both, [name] * 2, [[True] * STEPS] * 2, [options] * 2)
    assert answers == [None, None]


def both_as_on_a_device(*arguments):
    """As `both`, with buckets that are tensors, into which the Reducer copies, as on GPUs."""
    before, slots.MOVED = slots.MOVED, {"cpu"}
    try:
        return both(*arguments)
    finally:
        slots.MOVED = before


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("name", ["perceptron", "convolution", "branches", "repeats"])
def test_gradients_are_torchs_where_the_reducer_moves_them(ranks, name, views):
    options = {"gradient_as_bucket_view": views, "find_unused_parameters": name in VARYING}
    passes = [[True, False, True, True]] * 2
    assert ranks.run(both_as_on_a_device, [name] * 2, passes, [options] * 2) == [None, None]


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("name", ["perceptron", "convolution", "rows", "branches"])
def test_sums_of_passes_without_reduction_are_torchs(ranks, name, views):
    options = {"gradient_as_bucket_view": views, "find_unused_parameters": name in VARYING}
    passes = [[False, True, False, False, True, True]] * 2
    assert ranks.run(both, [name] * 2, passes, [options] * 2) == [None, None]
