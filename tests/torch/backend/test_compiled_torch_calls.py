"""Every public call of torch.distributed on nc10d gives the same below a compiled frame.

torch's own groups are C++ below Python's calls, and the compiler does not see into them. nc10d's
are Python, and stay as closed.
"""

import warnings
from datetime import timedelta
from types import FunctionType

import pytest
import torch
import torch.distributed as dist
import torch_calls as calls

import nc10d

RANKS = {"world_size": 2, "kind": "processes", "timeout": 900.0}


def begin(group, name, place):
    """Make torch's default group of a backend, for the calls below."""
    warnings.simplefilter("ignore")  # the compiler's
    torch.set_num_threads(1)
    limit = timedelta(minutes=5)  # inductor compiles by the C++ compiler
    dist.init_process_group(name, f"file://{place}", rank=group.rank(), world_size=2, timeout=limit)


def given(function):
    """Return what a function gives, as text."""
    return repr(function(torch.arange(4.0) + 10 * dist.get_rank()))


def program(function):
    """Return a function that is compiled around a call of `function`."""

    def around(x):
        y = x + 1
        found = function(y)
        return y * 2, found

    return around


def rows():
    found = {name: f for name, f in calls.FUNCTIONS.items() if hasattr(dist, name)}
    return found | calls.FORMS | {"methods of a group": calls.methods}


def skip_callers():
    """Let the compiler pass over functions that call a group's methods, but not over methods."""
    lambdas = [f for f in calls.METHODS.values() if isinstance(f, FunctionType)]
    for function in calls.BELOW + lambdas:
        torch._dynamo.decorators.skip_code(function.__code__)


def differing(group, place, backend):
    """Return the calls that give another thing compiled, and the compiled functions of nc10d.

    One rank is enough to compile.
    """
    begin(group, "nc10d", place)
    skip_callers()
    torch._dynamo.config.recompile_limit = 500  # for one program around all calls
    found, files = {}, set()
    for name, function in rows().items():
        if name in calls.REFUSED:
            continue
        torch._dynamo.utils.clear_compilation_metrics()
        around = program(function)
        compiled = around if group.rank() else torch.compile(around, backend=backend)
        gives = [given(around), given(compiled), given(compiled)]  # cold and warm
        if len({*gives}) > 1:
            found[name] = gives
        files |= {x.co_filename or "" for x in torch._dynamo.utils.get_compilation_metrics()}
    dist.destroy_process_group()
    return found, [name for name in files if name.startswith(nc10d.__path__[0])]


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.long)]
)
def test_a_compiled_program_gives_what_it_gives_uncompiled(backend, ranks, tmp_path):
    for found in ranks.run(differing, [tmp_path / "store"] * 2, [backend] * 2):
        assert found == ({}, []), "nothing of nc10d's is compiled"


def refused(group, place):
    """Return the calls that the compiler refuses on gloo."""
    begin(group, "gloo", place)
    found = set()
    for name in calls.REFUSED & {*rows()}:
        torch._dynamo.reset()
        try:
            given(torch.compile(program(rows()[name]), backend="eager"))
        except torch._dynamo.exc.InternalTorchDynamoError:
            found.add(name)
    dist.destroy_process_group()
    return found, calls.REFUSED & {*rows()}


@pytest.mark.slow
def test_gloo_is_refused_where_nc10d_is(ranks, tmp_path):
    for found, expected in ranks.run(refused, [tmp_path / "store"] * 2):
        assert found == expected


def test_every_public_call_has_a_row():
    functions, methods = calls.public_functions(), calls.public_methods()
    assert len(functions) > 60
    assert len(methods) > 25
    assert functions - {*calls.FUNCTIONS, *calls.UNCALLED} == set()
    assert methods - {*calls.METHODS, *calls.UNCALLED} == set()
