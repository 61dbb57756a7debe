"""An uncaught error of torch's compiler is short where it concerns nc10d or a group of torch."""

import linecache
import os
import subprocess
import sys
import textwrap
import traceback
import warnings

import pytest
import torch
import torch.distributed as dist

import nc10d
import nc10d.torch
from nc10d.base import uncaught
from nc10d.torch import functional

MOST_LINES = 25
modules = []


RANKS = {"world_size": 1, "kind": "processes", "timeout": 120.0}


def start(group):
    warnings.simplefilter("ignore")  # the compiler's
    nc10d.torch.as_torch_group()
    modules.append(nc10d.torch.DistributedDataParallel(torch.nn.Linear(4, 4)))


def own_method(x):
    return nc10d.get_default_group().all_reduce(x)


def own_asynchronous_call(x):
    return nc10d.all_reduce(x, async_op=True)


def own_objects(x):
    return nc10d.all_gather_object([0], 1)


def own_module(x):
    return modules[0](x)


def torchs_method(x):
    return dist.group.WORLD.allreduce([x])


def torchs_objects(x):
    return dist.all_gather_object([0], 1)


def torchs_asynchronous_call(x):
    return dist.all_reduce(x, async_op=True)


def torchs_barrier(x):
    return dist.barrier()


def torchs_new_group(x):
    return dist.new_group([0])


def torchs_mesh(x):
    return dist.init_device_mesh("cpu", (1,))


def wrong_reduction(x):
    return functional.all_reduce(x, "nonsense") + 1


def wrong_root(x):
    return functional.broadcast(x, 7) + 1


def unrelated(x):
    print("x")
    return x


def named_alike(x):
    torch._dynamo.graph_break("in distributed_tools")
    return x


def printed(group, function, backend):
    """Return the error of a compiled function as torch shows it, and as it is printed."""
    torch._dynamo.reset()
    with pytest.raises((RuntimeError, ValueError)) as caught:
        torch.compile(function, fullgraph=True, backend=backend)(torch.ones(4))
    return "".join(traceback.format_exception(caught.value)), uncaught.text_of(caught.value)


REFUSED = [
    own_method,
    own_asynchronous_call,
    own_objects,
    own_module,
    torchs_method,
    torchs_objects,
    torchs_asynchronous_call,
    torchs_barrier,
    torchs_new_group,
    torchs_mesh,
]


@pytest.mark.parametrize("function", REFUSED)
def test_a_call_that_is_refused_is_named_and_told_what_to_do(function, ranks):
    ((_, text),) = ranks.run(printed, [function], ["eager"])
    assert len(text.splitlines()) < MOST_LINES
    assert line_of(function) in text
    assert "  nc10d: a graph of torch.compile cannot have this call. " in text
    assert "site-packages" not in text
    assert "Hint" not in text


def line_of(function):
    code = function.__code__
    return linecache.getline(code.co_filename, code.co_firstlineno + 1).strip()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("function", [wrong_reduction, wrong_root])
def test_a_wrong_argument_is_told_by_nc10ds_text_alone(function, backend, ranks):
    ((_, text),) = ranks.run(printed, [function], [backend])
    assert len(text.splitlines()) < MOST_LINES
    assert text.splitlines()[-1].split("ValueError: ")[1].startswith(("unknown", "broadcast"))
    assert f"in {function.__name__}" in text
    assert "torch.compiler.disable" not in text


@pytest.mark.parametrize("function", [unrelated, named_alike])
def test_an_error_that_does_not_concern_nc10d_stays(function, ranks):
    ((whole, text),) = ranks.run(printed, [function], ["eager"])
    assert text == whole


PROGRAM = """
import torch, torch.distributed as dist
dist.init_process_group("nc10d")
def program(x):
    dist.group.WORLD.allreduce([x])
torch.compile(program, backend="eager")(torch.ones(4))
"""


@pytest.mark.slow
def test_a_rank_writes_few_lines(tmp_path):
    file = tmp_path / "program.py"
    file.write_text(textwrap.dedent(PROGRAM))
    run = subprocess.run(
        [sys.executable, "-m", "nc10d.run", "--nproc-per-node", "2", file],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    for number in range(2):
        lines = [x for x in run.stderr.splitlines() if x.startswith(f"[rank {number}]")]
        assert len(lines) < MOST_LINES
        if lines:  # the launcher may end a rank before it writes
            assert any("nc10d: a graph of torch.compile" in line for line in lines)
            assert any(f'File "{file}", line 5' in line for line in lines)
    assert run.stderr.count("nc10d: a graph of torch.compile") > 1  # a rank and the launcher
